// SPDX-License-Identifier: GPL-2.0-only
/*
 * How fast does migrate_pages() move mapped anonymous pages of 4K? Nothing here
 * is of the series, so that the kernel without it can be measured as well. What
 * move_pages(2) does for each page before and after is not measured.
 */
#include <kunit/test.h>
#include <linux/migrate.h>
#include <linux/mm.h>
#include <linux/mman.h>
#include <linux/swap.h>
#include <linux/uaccess.h>

#include "../internal.h"
#include "native.h"

#define NR_PAGES	(SZ_64M / PAGE_SIZE)
#define NR_PASSES	25

static struct folio *new_folio(struct folio *src, unsigned long private)
{
	return folio_alloc(GFP_HIGHUSER_MOVABLE, 0);
}

static void page_pattern(u64 *buf, unsigned long page)
{
	unsigned int i;

	for (i = 0; i < PAGE_SIZE / sizeof(*buf); i++)
		buf[i] = ((u64)page << 16 | i) * 0x9e3779b97f4a7c15ULL;
}

/* Isolates all pages, as move_pages(2) does. */
static bool isolate(unsigned long addr, struct list_head *folios,
		    unsigned long *pfns)
{
	unsigned long i;

	lru_add_drain_all();
	for (i = 0; i < NR_PAGES; i++) {
		struct page *page;
		struct folio *folio;

		if (get_user_pages_unlocked(addr + i * PAGE_SIZE, 1, &page, 0) != 1)
			return false;
		folio = page_folio(page);
		if (!folio_isolate_lru(folio)) {
			folio_put(folio);
			return false;
		}
		list_add_tail(&folio->lru, folios);
		node_stat_mod_folio(folio, NR_ISOLATED_ANON +
				    folio_is_file_lru(folio), 1);
		folio_put(folio);
		pfns[i] = page_to_pfn(page);
	}

	return true;
}

static void native_migrate(struct kunit *test)
{
	const size_t bytes = NR_PAGES * PAGE_SIZE;
	u64 *buf = kunit_kmalloc(test, PAGE_SIZE, GFP_KERNEL);
	u64 *buf2 = kunit_kmalloc(test, PAGE_SIZE, GFP_KERNEL);
	unsigned long addr, i, *pfns, moved = 0, wrong = 0;
	long isolated;
	struct passes passes = {};
	int n;

	KUNIT_ASSERT_NOT_NULL(test, buf);
	KUNIT_ASSERT_NOT_NULL(test, buf2);
	pfns = kunit_kcalloc(test, NR_PAGES, sizeof(*pfns), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, pfns);
	addr = kunit_vm_mmap(test, NULL, 0, bytes, PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS, 0);
	KUNIT_ASSERT_FALSE(test, !addr || IS_ERR_VALUE(addr));

	for (i = 0; i < NR_PAGES; i++) {
		page_pattern(buf, i);
		KUNIT_ASSERT_EQ(test, 0,
				copy_to_user((void __user *)(addr + i * PAGE_SIZE),
					     buf, PAGE_SIZE));
	}

	isolated = global_node_page_state(NR_ISOLATED_ANON);
	for (n = 0; n < NR_PASSES; n++) {
		LIST_HEAD(folios);
		u64 ns;

		KUNIT_ASSERT_TRUE(test, isolate(addr, &folios, pfns));
		ns = ktime_get_ns();
		KUNIT_EXPECT_EQ(test, 0,
				migrate_pages(&folios, new_folio, NULL, 0,
					      MIGRATE_SYNC, MR_SYSCALL, NULL));
		add_pass(&passes, ktime_get_ns() - ns);
		KUNIT_EXPECT_TRUE(test, list_empty(&folios));
		if (!list_empty(&folios))
			putback_movable_pages(&folios);

		for (i = 0; i < NR_PAGES; i++) {
			struct page *page;

			page_pattern(buf, i);
			if (copy_from_user(buf2, (void __user *)(addr + i * PAGE_SIZE),
					   PAGE_SIZE) ||
			    memcmp(buf, buf2, PAGE_SIZE))
				wrong++;
			if (get_user_pages_unlocked(addr + i * PAGE_SIZE, 1,
						    &page, 0) == 1) {
				moved += page_to_pfn(page) != pfns[i];
				put_page(page);
			}
		}
	}
	KUNIT_EXPECT_EQ(test, wrong, 0);
	KUNIT_EXPECT_EQ(test, moved, NR_PASSES * NR_PAGES);

	/* Each CPU may keep some to itself, but not a pass of them. */
	isolated -= global_node_page_state(NR_ISOLATED_ANON);
	KUNIT_EXPECT_LT(test, abs(isolated), NR_PAGES / 4);
	pr_info("native: what=migrate len=%lu bytes=%zu ns=%llu\n",
		PAGE_SIZE, bytes, median(&passes));
}

static struct kunit_case native_migrate_cases[] = {
	KUNIT_CASE_SLOW(native_migrate),
	{}
};

static struct kunit_suite native_migrate_suite = {
	.name = "native_migrate",
	.test_cases = native_migrate_cases,
};

kunit_test_suite(native_migrate_suite);
