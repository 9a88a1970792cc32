// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests for the machine-check-safe copy of pages and folios.
 */
#include <linux/mm.h>
#include <linux/uaccess.h>

/*
 * copy_mc_highpages() is an inline function: compile it here on top of a copy
 * that can be told to hit poison, and of a memory_failure_queue() that only
 * takes notes. The kernel proper needs no hook for that.
 */
static __must_check unsigned long
real_copy_mc_to_kernel(void *to, const void *from, size_t len)
{
	return copy_mc_to_kernel(to, from, len);
}

static __must_check unsigned long
test_copy_mc_to_kernel(void *to, const void *from, size_t len);
static void test_memory_failure_queue(unsigned long pfn, int flags);

#ifdef _LINUX_HIGHMEM_H
#error "linux/highmem.h must not be included before this"
#endif
#undef copy_mc_to_kernel
#define copy_mc_to_kernel	test_copy_mc_to_kernel
#define memory_failure_queue	test_memory_failure_queue
#include <linux/highmem.h>
#undef memory_failure_queue
#undef copy_mc_to_kernel

#include <kunit/test.h>
#include <linux/io.h>
#include <linux/page-flags.h>

/* What the copy shall run into, and what it reported. */
static struct {
	phys_addr_t poison;
	bool transient;
	unsigned long queued_pfn;
	int nr_queued;
} mc;

static __must_check unsigned long
test_copy_mc_to_kernel(void *to, const void *from, size_t len)
{
	const phys_addr_t start = page_to_phys(kmap_to_page((void *)from)) +
				  offset_in_page(from);
	size_t good = len;

	if (mc.poison >= start && mc.poison < start + len) {
		good = mc.poison - start;
		if (mc.transient)
			mc.poison = 0;
	}

	return len - good + real_copy_mc_to_kernel(to, from, good);
}

static void test_memory_failure_queue(unsigned long pfn, int flags)
{
	mc.queued_pfn = pfn;
	mc.nr_queued++;
}

/* A word tells its page, its place in the page and what it belongs to. */
static u64 pattern(u64 seed, unsigned long page, unsigned int word)
{
	return (seed << 56) ^ (((u64)page << 16 | word) * 0x9e3779b97f4a7c15ULL);
}

#define WORDS_PER_PAGE	(PAGE_SIZE / sizeof(u64))

static void fill_pages(struct page *page, unsigned long nr_pages, u64 seed)
{
	unsigned long i;
	unsigned int w;

	for (i = 0; i < nr_pages; i++) {
		u64 *p = kmap_local_page(page + i);

		for (w = 0; w < WORDS_PER_PAGE; w++)
			p[w] = pattern(seed, i, w);
		kunmap_local(p);
	}
}

/* Do pages [start, end) at @page still hold what fill_pages(@page) wrote? */
static bool pages_hold(struct page *page, unsigned long start,
		       unsigned long end, u64 seed)
{
	unsigned long i;
	unsigned int w;

	for (i = start; i < end; i++) {
		u64 *p = kmap_local_page(page + i);
		bool same = true;

		for (w = 0; w < WORDS_PER_PAGE; w++)
			same &= p[w] == pattern(seed, i, w);
		kunmap_local(p);
		if (!same)
			return false;
	}
	return true;
}

enum { SRC = 1, DST = 2 };

KUNIT_DEFINE_ACTION_WRAPPER(test_folio_put, folio_put, struct folio *);

static struct folio *test_folio_alloc(struct kunit *test, unsigned int order,
				      u64 seed)
{
	const gfp_t gfp = GFP_KERNEL | __GFP_RETRY_MAYFAIL | __GFP_NOWARN;
	struct folio *folio = folio_alloc(gfp, order);

	if (!folio && order > PAGE_ALLOC_COSTLY_ORDER)
		kunit_skip(test, "no folio of order %u to be had", order);
	KUNIT_ASSERT_NOT_NULL(test, folio);
	KUNIT_ASSERT_EQ(test, 0,
			kunit_add_action_or_reset(test, test_folio_put, folio));
	fill_pages(&folio->page, 1UL << order, seed);
	return folio;
}

/* One order more than what is copied must be there to allocate. */
#define TEST_MAX_ORDER	min(PMD_SHIFT - PAGE_SHIFT, MAX_PAGE_ORDER - 1)

static const void *order_gen_params(struct kunit *test, const void *prev,
				    char *desc)
{
	/* NULL ends the series, so order N is passed as N + 1. */
	unsigned long next = (unsigned long)prev + 1;

	if (next > TEST_MAX_ORDER + 1)
		return NULL;
	snprintf(desc, KUNIT_PARAM_DESC_SIZE, "order %lu", next - 1);
	return (const void *)next;
}

static unsigned int test_order(struct kunit *test)
{
	return (unsigned long)test->param_value - 1;
}

/* A folio arrives whole, and what follows it in a larger folio stays. */
static void folio_mc_copy_order(struct kunit *test)
{
	const unsigned int order = test_order(test);
	const unsigned long nr = 1UL << order;
	struct folio *src = test_folio_alloc(test, order, SRC);
	struct folio *dst = test_folio_alloc(test, order + 1, DST);

	KUNIT_EXPECT_EQ(test, folio_mc_copy(dst, src), 0);
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, 0, nr, SRC));
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, nr, 2 * nr, DST));
	KUNIT_EXPECT_TRUE(test, pages_hold(&src->page, 0, nr, SRC));
}

/* A folio known to hold a poisoned page is refused before its first byte. */
static void folio_mc_copy_poisoned(struct kunit *test)
{
#ifdef CONFIG_MEMORY_FAILURE
	const unsigned int order = test_order(test);
	const unsigned long nr = 1UL << order;
	struct folio *src = test_folio_alloc(test, order, SRC);
	struct folio *dst = test_folio_alloc(test, order, DST);

	/* Without THP, there is no flag to tell it of a large folio. */
	if (order && !IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE))
		kunit_skip(test, "no CONFIG_TRANSPARENT_HUGEPAGE");

	if (order)
		folio_set_has_hwpoisoned(src);
	else
		folio_set_hwpoison(src);

	KUNIT_EXPECT_EQ(test, folio_mc_copy(dst, src), -EHWPOISON);
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, 0, nr, DST));

	if (order)
		folio_clear_has_hwpoisoned(src);
	else
		folio_clear_hwpoison(src);

	KUNIT_EXPECT_EQ(test, folio_mc_copy(dst, src), 0);
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, 0, nr, SRC));
#else
	kunit_skip(test, "no CONFIG_MEMORY_FAILURE");
#endif
}

/* 2 ^ order - 1 pages in the middle of a larger range, nothing around them. */
static void copy_mc_highpages_odd(struct kunit *test)
{
	const unsigned int order = test_order(test);
	const unsigned long nr = (1UL << order) - 1;
	struct folio *src = test_folio_alloc(test, order + 1, SRC);
	struct folio *dst = test_folio_alloc(test, order + 1, DST);

	KUNIT_EXPECT_EQ(test, 0,
			copy_mc_highpages(folio_page(dst, 1),
					  folio_page(src, 1), nr));
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, 0, 1, DST));
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, 1, nr + 1, SRC));
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, nr + 1, 1UL << (order + 1), DST));
	KUNIT_EXPECT_EQ(test, mc.nr_queued, 0);
}

/* Poison at the first, a middle and the last byte of the page at @bad. */
static void expect_poison(struct kunit *test, struct folio *dst,
			  struct folio *src, unsigned long nr, unsigned long bad)
{
	const size_t offset[] = { 0, PAGE_SIZE / 2 + 5, PAGE_SIZE - 1 };
	int i;

	for (i = 0; i < ARRAY_SIZE(offset); i++) {
		fill_pages(&dst->page, nr, DST);
		mc.nr_queued = 0;
		mc.poison = page_to_phys(folio_page(src, bad)) + offset[i];

		KUNIT_EXPECT_EQ(test, -EHWPOISON,
				copy_mc_highpages(&dst->page, &src->page, nr));
		KUNIT_EXPECT_EQ(test, mc.nr_queued, 1);
		KUNIT_EXPECT_EQ(test, mc.queued_pfn, folio_pfn(src) + bad);
		/* Pages before the bad one are there, none after it. */
		KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, 0, bad, SRC));
		KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, bad + 1, nr, DST));
	}
	mc.poison = 0;
}

static void copy_mc_highpages_poison(struct kunit *test)
{
	const unsigned int order = test_order(test);
	const unsigned long nr = 1UL << order;
	struct folio *src = test_folio_alloc(test, order, SRC);
	struct folio *dst = test_folio_alloc(test, order, DST);

	expect_poison(test, dst, src, nr, 0);
	expect_poison(test, dst, src, nr, nr / 2);
	expect_poison(test, dst, src, nr, nr - 1);

	/* Poison outside of the range is none of the copy's business. */
	mc.nr_queued = 0;
	mc.poison = page_to_phys(folio_page(src, nr - 1));
	KUNIT_EXPECT_EQ(test, 0,
			copy_mc_highpages(&dst->page, &src->page, nr - 1));
	KUNIT_EXPECT_EQ(test, mc.nr_queued, 0);
}

/* The copy stops, and the page where it did can be read the next time. */
static void copy_mc_highpages_transient(struct kunit *test)
{
	const unsigned int order = test_order(test);
	const unsigned long nr = 1UL << order;
	struct folio *src = test_folio_alloc(test, order, SRC);
	struct folio *dst = test_folio_alloc(test, order, DST);

	mc.poison = page_to_phys(folio_page(src, nr / 2)) + PAGE_SIZE / 2;
	mc.transient = true;
	KUNIT_EXPECT_EQ(test, -EHWPOISON,
			copy_mc_highpages(&dst->page, &src->page, nr));
	KUNIT_EXPECT_EQ(test, mc.poison, 0);
	KUNIT_EXPECT_EQ(test, mc.nr_queued, 1);
	KUNIT_EXPECT_EQ(test, mc.queued_pfn, folio_pfn(src) + nr / 2);
	KUNIT_EXPECT_TRUE(test, pages_hold(&dst->page, 0, nr / 2, SRC));
}

static int copy_mc_test_init(struct kunit *test)
{
	memset(&mc, 0, sizeof(mc));
	return 0;
}

static struct kunit_case copy_mc_test_cases[] = {
	KUNIT_CASE_PARAM(folio_mc_copy_order, order_gen_params),
	KUNIT_CASE_PARAM(folio_mc_copy_poisoned, order_gen_params),
	KUNIT_CASE_PARAM(copy_mc_highpages_odd, order_gen_params),
	KUNIT_CASE_PARAM(copy_mc_highpages_poison, order_gen_params),
	KUNIT_CASE_PARAM(copy_mc_highpages_transient, order_gen_params),
	{}
};

static struct kunit_suite copy_mc_test_suite = {
	.name = "copy_mc",
	.init = copy_mc_test_init,
	.test_cases = copy_mc_test_cases,
};

kunit_test_suite(copy_mc_test_suite);

MODULE_DESCRIPTION("KUnit tests for the machine-check-safe copy");
MODULE_LICENSE("GPL");
