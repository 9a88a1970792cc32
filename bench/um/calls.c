// SPDX-License-Identifier: GPL-2.0-only
/*
 * How much is it worth to copy a large range with one call, instead of a page
 * at a time? x86's machine-check-safe copy ends in "rep movsb", which is here
 * used itself: the kernel's memcpy() is another loop in a user-mode kernel,
 * where nothing is patched for the CPU it runs on. It is measured, too.
 */
#include <kunit/test.h>
#include <linux/gfp.h>
#include <linux/mm.h>

#include "native.h"

#define NR_PASSES	7

static void copy_movsb(void *to, const void *from, size_t len)
{
	asm volatile("rep movsb"
		     : "+D" (to), "+S" (from), "+c" (len) : : "memory");
}

static void copy_memcpy(void *to, const void *from, size_t len)
{
	/* The function, not what the compiler may put in its place. */
	void *(*volatile func)(void *to, const void *from, size_t len) = memcpy;

	func(to, from, len);
}

static const struct {
	const char *name;
	void (*copy)(void *to, const void *from, size_t len);
} ways[] = {
	{ "movsb", copy_movsb },
	{ "memcpy", copy_memcpy },
};

static u64 copy_range(void (*copy)(void *to, const void *from, size_t len),
		      void *to, const void *from, size_t bytes, size_t len)
{
	const u64 start = ktime_get_ns();
	size_t done;

	for (done = 0; done < bytes; done += len) {
		copy(to + done, from + done, len);
		cond_resched();
	}

	return ktime_get_ns() - start;
}

static void fill(u64 *p, size_t bytes, u64 seed)
{
	size_t i;

	for (i = 0; i < bytes / sizeof(*p); i++)
		p[i] = (i + seed) * 0x9e3779b97f4a7c15ULL;
}

static void native_calls(struct kunit *test)
{
	struct page *src = NULL, *dst = NULL;
	unsigned long nr_pages;
	void *to, *from;
	size_t bytes;
	int i, n, w;

	for (nr_pages = SZ_1G / PAGE_SIZE; nr_pages >= SZ_2M / PAGE_SIZE; nr_pages /= 2) {
		src = alloc_contig_pages(nr_pages, GFP_KERNEL | __GFP_NOWARN,
					 numa_node_id(), NULL);
		dst = alloc_contig_pages(nr_pages, GFP_KERNEL | __GFP_NOWARN,
					 numa_node_id(), NULL);
		if (src && dst)
			break;
		if (src)
			free_contig_range(page_to_pfn(src), nr_pages);
		src = NULL;
		if (dst)
			free_contig_range(page_to_pfn(dst), nr_pages);
		dst = NULL;
	}
	KUNIT_ASSERT_NOT_NULL(test, src);

	from = page_address(src);
	to = page_address(dst);
	bytes = nr_pages * PAGE_SIZE;
	fill(from, bytes, 1);

	for (w = 0; w < ARRAY_SIZE(ways); w++) {
		const size_t lens[] = { PAGE_SIZE, SZ_64K, SZ_2M, bytes };
		struct passes passes[ARRAY_SIZE(lens)] = {};

		memset(to, 0xd5, bytes);
		/* By turns, so that all of them see the same machine. */
		for (n = 0; n < NR_PASSES; n++) {
			for (i = 0; i < ARRAY_SIZE(lens); i++)
				add_pass(&passes[i],
					 copy_range(ways[w].copy, to, from,
						    bytes, lens[i]));
		}
		KUNIT_EXPECT_EQ(test, memcmp(from, to, bytes), 0);
		for (i = 0; i < ARRAY_SIZE(lens); i++)
			pr_info("native: what=calls how=%s len=%zu bytes=%zu ns=%llu\n",
				ways[w].name, lens[i], bytes, median(&passes[i]));
	}

	free_contig_range(page_to_pfn(src), nr_pages);
	free_contig_range(page_to_pfn(dst), nr_pages);
}

static struct kunit_case native_calls_cases[] = {
	KUNIT_CASE_SLOW(native_calls),
	{}
};

static struct kunit_suite native_calls_suite = {
	.name = "native_calls",
	.test_cases = native_calls_cases,
};

kunit_test_suite(native_calls_suite);
