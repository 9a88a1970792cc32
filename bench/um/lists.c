// SPDX-License-Identifier: GPL-2.0-only
/*
 * How fast are lists of folios copied by one CPU, and by two? One goes through
 * the list with folio_mc_copy(), as migration does by default; two do it as
 * copy_page_lists_mt() does, when one other CPU is idle.
 */
#include <kunit/test.h>
#include <linux/delay.h>
#include <linux/list.h>
#include <linux/mm.h>

#include "../copy_pages.h"
#include "../internal.h"
#include "native.h"

#define BYTES		SZ_64M
#define NR_PASSES	25

static void free_folios(struct list_head *folios)
{
	struct folio *folio, *next;

	list_for_each_entry_safe(folio, next, folios, lru) {
		list_del(&folio->lru);
		folio_put(folio);
	}
}

static bool alloc_folios(struct list_head *folios, unsigned int order)
{
	size_t bytes;

	for (bytes = 0; bytes < BYTES; bytes += PAGE_SIZE << order) {
		struct folio *folio = folio_alloc(GFP_KERNEL | __GFP_NOWARN, order);

		if (!folio)
			return false;
		list_add_tail(&folio->lru, folios);
	}

	return true;
}

static void fill_folios(struct list_head *folios, bool zero)
{
	struct folio *folio;
	u64 word = 1, *p;
	size_t i;

	list_for_each_entry(folio, folios, lru) {
		p = folio_address(folio);
		for (i = 0; i < folio_size(folio) / sizeof(*p); i++, word++)
			p[i] = zero ? 0 : word * 0x9e3779b97f4a7c15ULL;
	}
}

static bool same_folios(struct list_head *dst_folios, struct list_head *src_folios)
{
	struct folio *src, *dst;

	dst = list_first_entry(dst_folios, struct folio, lru);
	list_for_each_entry(src, src_folios, lru) {
		if (memcmp(folio_address(dst), folio_address(src), folio_size(src)))
			return false;
		dst = list_next_entry(dst, lru);
	}

	return true;
}

static u64 copy_alone(struct kunit *test, struct list_head *dst_folios,
		      struct list_head *src_folios)
{
	struct folio *src, *dst;
	const u64 start = ktime_get_ns();

	dst = list_first_entry(dst_folios, struct folio, lru);
	list_for_each_entry(src, src_folios, lru) {
		cond_resched();
		KUNIT_EXPECT_EQ(test, folio_mc_copy(dst, src), 0);
		dst = list_next_entry(dst, lru);
	}

	return ktime_get_ns() - start;
}

static u64 copy_together(struct kunit *test, struct list_head *dst_folios,
			 struct list_head *src_folios, unsigned int nr_helpers,
			 unsigned long *nr_helper_pages)
{
	LIST_HEAD(failed_src);
	LIST_HEAD(failed_dst);
	struct copy_job job;
	unsigned int i;
	u64 ns;

	/* The other CPU has become idle, once it has. */
	for (i = 0; i < 100; i++) {
		usleep_range(1000, 2000);
		ns = ktime_get_ns();
		copy_job_init_lists(&job, dst_folios, src_folios, &failed_dst,
				    &failed_src);
		if (copy_job_ask_idle(&job, nr_helpers) == nr_helpers)
			break;
		copy_job_finish(&job);
	}
	copy_job_copy(&job);
	copy_job_finish(&job);
	ns = ktime_get_ns() - ns;

	KUNIT_EXPECT_LT(test, i, 100);
	KUNIT_EXPECT_TRUE(test, list_empty(&failed_src));
	*nr_helper_pages += job.nr_helper_pages;

	return ns;
}

static void native_lists(struct kunit *test)
{
	const size_t sizes[] = { PAGE_SIZE, SZ_64K, SZ_2M };
	unsigned long nr_helper_pages, nr_none;
	int s, n;

	for (s = 0; s < ARRAY_SIZE(sizes); s++) {
		struct passes alone = {}, one = {}, two = {};
		LIST_HEAD(src);
		LIST_HEAD(dst);

		if (!alloc_folios(&src, get_order(sizes[s])) ||
		    !alloc_folios(&dst, get_order(sizes[s]))) {
			KUNIT_FAIL(test, "no memory");
			goto next;
		}
		fill_folios(&src, false);
		fill_folios(&dst, true);
		copy_alone(test, &dst, &src);
		KUNIT_EXPECT_TRUE(test, same_folios(&dst, &src));
		nr_helper_pages = 0;
		for (n = 0; n < NR_PASSES; n++) {
			add_pass(&alone, copy_alone(test, &dst, &src));
			add_pass(&one, copy_together(test, &dst, &src, 0, &nr_none));
			if (!n)
				fill_folios(&dst, true);
			add_pass(&two, copy_together(test, &dst, &src, 1,
						     &nr_helper_pages));
			if (!n)
				KUNIT_EXPECT_TRUE(test, same_folios(&dst, &src));
		}
		KUNIT_EXPECT_TRUE(test, same_folios(&dst, &src));
		pr_info("native: what=list len=%zu how=loop cpus=1 bytes=%u ns=%llu\n",
			sizes[s], BYTES, median(&alone));
		pr_info("native: what=list len=%zu how=job cpus=1 bytes=%u ns=%llu\n",
			sizes[s], BYTES, median(&one));
		pr_info("native: what=list len=%zu how=job cpus=2 bytes=%u ns=%llu helper_percent=%lu\n",
			sizes[s], BYTES, median(&two),
			nr_helper_pages * 100 / (NR_PASSES * (BYTES / PAGE_SIZE)));
next:
		free_folios(&src);
		free_folios(&dst);
	}
}

static struct kunit_case native_lists_cases[] = {
	KUNIT_CASE_SLOW(native_lists),
	{}
};

static struct kunit_suite native_lists_suite = {
	.name = "native_lists",
	.test_cases = native_lists_cases,
};

kunit_test_suite(native_lists_suite);
