/* SPDX-License-Identifier: GPL-2.0-only */
/* What the suites have in common: the median of some passes. */
#include <linux/ktime.h>
#include <linux/sort.h>

#define MAX_PASSES	32

struct passes {
	u64 ns[MAX_PASSES];
	unsigned int nr;
};

static inline void add_pass(struct passes *p, u64 ns)
{
	if (p->nr < MAX_PASSES)
		p->ns[p->nr++] = ns;
}

static int cmp_ns(const void *a, const void *b)
{
	const u64 x = *(const u64 *)a, y = *(const u64 *)b;

	return x < y ? -1 : x > y;
}

static inline u64 median(struct passes *p)
{
	sort(p->ns, p->nr, sizeof(p->ns[0]), cmp_ns, NULL);
	return p->nr ? p->ns[p->nr / 2] : 0;
}
