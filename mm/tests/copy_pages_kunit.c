// SPDX-License-Identifier: GPL-2.0-only
/*
 * KUnit tests for the copy of folios with several CPUs.
 */
#include <kunit/test.h>
#include <linux/completion.h>
#include <linux/cpu.h>
#include <linux/delay.h>
#include <linux/kthread.h>
#include <linux/mm.h>
#include <linux/prandom.h>
#include <linux/preempt.h>
#include <linux/workqueue.h>

#include "../copy_pages.h"
#include "../internal.h"

/* COPY_CHUNK_PAGES, for what has to be constant. */
#define CHUNK_ORDER	(ilog2(SZ_128K) - MIN(ilog2(SZ_128K), PAGE_SHIFT))
#define CHUNK_PAGES	BIT(CHUNK_ORDER)
#define HALF_ORDER	(CHUNK_ORDER - !!CHUNK_ORDER)

/* What a PMD maps, where pages are of 4K. One order more is for a guard. */
#define BIG_ORDER	MIN(ilog2(SZ_2M / PAGE_SIZE), MAX_PAGE_ORDER - 1)

#define MAX_FOLIOS	256
#define MAX_HELPERS	16

/* How long to wait for what is certain to happen, but for a fault. */
#define LONG_TIME	(5 * HZ)

/* How often to try what depends on helpers, which may give up, and how long. */
#define NR_TRIES	100
#define SHORT_TIME	(HZ / 10)

/* What is in a destination before, and behind it. */
#define DST_BYTE	0xd5

/**
 * struct test_lists - Folios to copy, and what has become of them.
 * @job: The job that copies them.
 * @src: The list to copy from.
 * @dst: The list to copy to.
 * @failed_src: The list of those that failed.
 * @failed_dst: The list of their counterparts.
 * @test: The test.
 * @seed: Tells these folios from those of other lists.
 * @nr: The number of folios.
 * @pair: The folios, in order.
 */
struct test_lists {
	struct copy_job job;
	struct list_head src;
	struct list_head dst;
	struct list_head failed_src;
	struct list_head failed_dst;
	struct kunit *test;
	unsigned int seed;
	unsigned int nr;
	struct test_pair {
		struct folio *src;
		struct folio *dst;
		unsigned int order;
		bool fails;
		bool seen;
	} pair[MAX_FOLIOS];
};

/* A word tells its place in the page, the page, the folio and the lists. */
static u64 word_of_page(unsigned int seed, unsigned int idx, unsigned long page)
{
	return (((u64)seed << 48) ^ ((u64)idx << 32) ^ page) *
	       0x9e3779b97f4a7c15ULL;
}

#define WORD_STEP	0xff51afd7ed558ccdULL
#define WORDS_PER_PAGE	(PAGE_SIZE / sizeof(u64))

static void fill_src(const struct test_lists *l, unsigned int idx)
{
	u64 *p = folio_address(l->pair[idx].src);
	unsigned long page;
	unsigned int w;

	for (page = 0; page < 1UL << l->pair[idx].order; page++) {
		u64 word = word_of_page(l->seed, idx, page);

		for (w = 0; w < WORDS_PER_PAGE; w++, word += WORD_STEP)
			*p++ = word;
	}
}

/* Every byte of the folio, and none behind it. */
static bool dst_is_copied(const struct test_lists *l, unsigned int idx)
{
	const u64 *p = folio_address(l->pair[idx].dst);
	const unsigned long nr_pages = 1UL << l->pair[idx].order;
	unsigned long page;
	unsigned int w;
	u64 wrong = 0;

	for (page = 0; page < nr_pages; page++) {
		u64 word = word_of_page(l->seed, idx, page);

		for (w = 0; w < WORDS_PER_PAGE; w++, word += WORD_STEP)
			wrong |= *p++ ^ word;
	}

	return !wrong && !memchr_inv(p, DST_BYTE,
				     min(nr_pages, CHUNK_PAGES) * PAGE_SIZE);
}

static void reset_dst(const struct test_lists *l, unsigned int idx)
{
	const unsigned long nr_pages = 1UL << l->pair[idx].order;

	/* The destination is the first half of a larger folio. */
	memset(folio_address(l->pair[idx].dst), DST_BYTE,
	       (nr_pages + min(nr_pages, CHUNK_PAGES)) * PAGE_SIZE);
}

static void free_lists(void *lists)
{
	struct test_lists *l = lists;
	unsigned int i;

	for (i = 0; i < l->nr; i++) {
		if (l->pair[i].src)
			folio_put(l->pair[i].src);
		if (l->pair[i].dst)
			folio_put(l->pair[i].dst);
	}
}

static struct test_lists *alloc_lists(struct kunit *test)
{
	struct test_lists *l = kunit_kzalloc(test, sizeof(*l), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, l);
	l->test = test;
	KUNIT_ASSERT_EQ(test, 0,
			kunit_add_action_or_reset(test, free_lists, l));
	return l;
}

static void add_folios_node(struct test_lists *l, unsigned int nr,
			    unsigned int order, int nid)
{
	const gfp_t gfp = GFP_KERNEL | __GFP_RETRY_MAYFAIL | __GFP_NOWARN |
			  (nid == NUMA_NO_NODE ? 0 : __GFP_THISNODE);

	if (nid == NUMA_NO_NODE)
		nid = numa_node_id();

	KUNIT_ASSERT_LE(l->test, l->nr + nr, MAX_FOLIOS);
	for (; nr; nr--) {
		struct test_pair *pair = &l->pair[l->nr++];

		pair->order = order;
		pair->src = __folio_alloc_node(gfp, order, nid);
		pair->dst = __folio_alloc_node(gfp, order + 1, nid);
		if (!pair->src || !pair->dst)
			kunit_skip(l->test, "not enough memory");
		fill_src(l, pair - l->pair);
	}
}

static void add_folios(struct test_lists *l, unsigned int nr, unsigned int order)
{
	add_folios_node(l, nr, order, NUMA_NO_NODE);
}

/* As before a job: destinations without contents, nothing failed. */
static void reset_lists(struct test_lists *l)
{
	unsigned int i;

	INIT_LIST_HEAD(&l->src);
	INIT_LIST_HEAD(&l->dst);
	INIT_LIST_HEAD(&l->failed_src);
	INIT_LIST_HEAD(&l->failed_dst);
	for (i = 0; i < l->nr; i++) {
		list_add_tail(&l->pair[i].src->lru, &l->src);
		list_add_tail(&l->pair[i].dst->lru, &l->dst);
		l->pair[i].fails = false;
		l->pair[i].seen = false;
		reset_dst(l, i);
	}
	copy_job_init_lists(&l->job, &l->dst, &l->src, &l->failed_dst,
			    &l->failed_src);
}

/* The number of chunks, when no folio fails. */
static unsigned long expected_chunks(const struct test_lists *l)
{
	unsigned long nr = 0, used = CHUNK_PAGES;
	unsigned int i;

	for (i = 0; i < l->nr; i++) {
		const unsigned long nr_pages = 1UL << l->pair[i].order;

		if (nr_pages > CHUNK_PAGES) {
			nr += nr_pages / CHUNK_PAGES;
			used = CHUNK_PAGES;
		} else if (used + nr_pages > CHUNK_PAGES) {
			nr++;
			used = nr_pages;
		} else {
			used += nr_pages;
		}
	}

	return nr;
}

static unsigned long total_pages(const struct test_lists *l)
{
	unsigned long nr_pages = 0;
	unsigned int i;

	for (i = 0; i < l->nr; i++)
		nr_pages += 1UL << l->pair[i].order;

	return nr_pages;
}

/* Both lists have the same number of entries, and are linked in both ways. */
static unsigned int list_lengths(struct kunit *test, struct list_head *src,
				 struct list_head *dst)
{
	struct list_head *s, *d = dst;
	unsigned int nr = 0;

	list_for_each(s, src) {
		d = d->next;
		KUNIT_EXPECT_PTR_EQ(test, s->next->prev, s);
		KUNIT_EXPECT_PTR_EQ(test, d->next->prev, d);
		if (d == dst || nr++ > MAX_FOLIOS)
			break;
	}
	KUNIT_EXPECT_PTR_EQ(test, s, src);
	KUNIT_EXPECT_PTR_EQ(test, d->next, dst);

	return nr;
}

/*
 * Those that fail are on the failed lists, each one once and next to its
 * counterpart; the others are on their own lists in their old order, and are
 * copied.
 */
static void check_lists(struct test_lists *l)
{
	struct kunit *test = l->test;
	unsigned int i, nr_failed = 0;
	struct folio *src, *dst;

	for (i = 0; i < l->nr; i++)
		nr_failed += l->pair[i].fails;

	KUNIT_EXPECT_EQ(test, list_lengths(test, &l->src, &l->dst),
			l->nr - nr_failed);
	KUNIT_EXPECT_EQ(test, list_lengths(test, &l->failed_src, &l->failed_dst),
			nr_failed);
	KUNIT_EXPECT_EQ(test, l->job.failed, nr_failed > 0);
	if (test->status == KUNIT_FAILURE)
		return;

	dst = list_entry(&l->failed_dst, struct folio, lru);
	list_for_each_entry(src, &l->failed_src, lru) {
		dst = list_next_entry(dst, lru);
		for (i = 0; i < l->nr && l->pair[i].src != src; i++)
			;
		KUNIT_EXPECT_LT(test, i, l->nr);
		if (i == l->nr)
			return;
		KUNIT_EXPECT_TRUE_MSG(test, l->pair[i].fails && !l->pair[i].seen,
				      "folio %u of %u, order %u, has failed",
				      i, l->nr, l->pair[i].order);
		KUNIT_EXPECT_PTR_EQ(test, dst, l->pair[i].dst);
		l->pair[i].seen = true;
	}

	src = list_entry(&l->src, struct folio, lru);
	dst = list_entry(&l->dst, struct folio, lru);
	for (i = 0; i < l->nr; i++) {
		if (l->pair[i].fails)
			continue;
		src = list_next_entry(src, lru);
		dst = list_next_entry(dst, lru);
		KUNIT_EXPECT_PTR_EQ(test, src, l->pair[i].src);
		KUNIT_EXPECT_PTR_EQ(test, dst, l->pair[i].dst);
		KUNIT_EXPECT_TRUE_MSG(test, dst_is_copied(l, i),
				      "folio %u of %u, order %u, is not copied, or more is",
				      i, l->nr, l->pair[i].order);
	}
}

/* What the counters of a job say, of which no folio has failed. */
static void check_counters(struct test_lists *l, unsigned int nr_asked)
{
	const struct copy_job *job = &l->job;
	struct kunit *test = l->test;

	KUNIT_EXPECT_EQ(test, job->nr_chunks + job->nr_helper_chunks,
			expected_chunks(l));
	KUNIT_EXPECT_LE(test, job->nr_helpers, nr_asked);
	KUNIT_EXPECT_LE(test, job->nr_helpers, job->nr_helper_chunks);
	KUNIT_EXPECT_EQ(test, job->nr_helpers > 0, job->nr_helper_chunks > 0);
	KUNIT_EXPECT_LE(test, job->nr_helper_chunks, job->nr_helper_pages);
	KUNIT_EXPECT_LE(test, job->nr_helper_pages,
			job->nr_helper_chunks * CHUNK_PAGES);
	KUNIT_EXPECT_LE(test, job->nr_helper_pages, total_pages(l));
	KUNIT_EXPECT_EQ(test, job->nr_helper_pages < total_pages(l),
			job->nr_chunks > 0);
	KUNIT_EXPECT_TRUE(test, list_empty(&job->helpers));
}

/* The CPUs whose helpers are asked: those that were online at first. */
static struct cpumask test_cpus;

static unsigned int nr_test_cpus(void)
{
	return cpumask_weight(&test_cpus);
}

static unsigned int max_helpers(void)
{
	return min(nr_test_cpus(), MAX_HELPERS);
}

/* Ask for some helpers, all of which must be free. */
static void ask_helpers(struct kunit *test, struct copy_job *job,
			unsigned int nr)
{
	int cpu;

	for_each_cpu(cpu, &test_cpus) {
		if (!nr--)
			return;
		KUNIT_EXPECT_TRUE(test, copy_job_ask(job, cpu));
	}
}

static void run_job(struct kunit *test, struct copy_job *job,
		    unsigned int nr_helpers)
{
	ask_helpers(test, job, nr_helpers);
	copy_job_copy(job);
	copy_job_finish(job);
}

/* Keep this thread away from a CPU until the end of the test. */
static void leave_cpu(struct kunit *test, int cpu)
{
	struct cpumask *mask = kunit_kzalloc(test, cpumask_size(), GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, mask);
	cpumask_andnot(mask, &test_cpus, cpumask_of(cpu));
	if (cpumask_empty(mask))
		kunit_skip(test, "only one CPU");
	KUNIT_ASSERT_EQ(test, set_cpus_allowed_ptr(current, mask), 0);
}

/*
 * A CPU that this thread is not on, nor ever will be. It may have something to
 * do for others, but not for ever. Even the sleep of this thread would keep its
 * own CPU busy for a while, as far as the scheduler counts the tasks of a CPU.
 */
static int reserve_cpu(struct kunit *test)
{
	int cpu = cpumask_any_but(&test_cpus, raw_smp_processor_id());

	if (cpu >= nr_cpu_ids)
		cpu = raw_smp_processor_id();
	leave_cpu(test, cpu);

	return cpu;
}

/*
 * The caller leaves the copy to the helpers, as far as they get: one whose CPU
 * has other work to do gives up.
 */
static void run_job_by_helpers(struct kunit *test, struct copy_job *job,
			       unsigned int nr_helpers)
{
	ask_helpers(test, job, nr_helpers);
	flush_workqueue(copy_pages_wq);
	copy_job_copy(job);
	copy_job_finish(job);
}

/* All helpers are free for the next job. */
static void check_helpers_free(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);

	add_folios(l, 1, 0);
	reset_lists(l);
	run_job(test, &l->job, nr_test_cpus());
	check_lists(l);
	check_counters(l, nr_test_cpus());
}

/* Lists of runs of folios of the same size. */
static const struct test_shape {
	const char *name;
	struct {
		unsigned int nr;
		unsigned int order;
	} runs[6];
} test_shapes[] = {
	{ "small", { { 1, 0 } } },
	{ "large", { { 1, BIG_ORDER } } },
	{ "5 large", { { 5, BIG_ORDER } } },
	{ "3 small", { { 3, 0 } } },
	{ "small, less than a chunk", { { CHUNK_PAGES - 1, 0 } } },
	{ "small, a chunk", { { CHUNK_PAGES, 0 } } },
	{ "small, more than a chunk", { { CHUNK_PAGES + 1, 0 } } },
	{ "small, chunks and some", { { 5 * CHUNK_PAGES + 3, 0 } } },
	{ "a chunk", { { 1, CHUNK_ORDER } } },
	{ "2 chunks", { { 1, CHUNK_ORDER + 1 } } },
	{ "a chunk and a page", { { 1, CHUNK_ORDER }, { 1, 0 } } },
	{ "a page and a chunk", { { 1, 0 }, { 1, CHUNK_ORDER } } },
	{ "2 chunks and a page", { { 1, CHUNK_ORDER + 1 }, { 1, 0 } } },
	{ "pages around 2 chunks",
	  { { 3, 0 }, { 1, CHUNK_ORDER + 1 }, { 3, 0 } } },
	{ "the last one fits",
	  { { CHUNK_PAGES / 2, 0 }, { 1, HALF_ORDER }, { 1, 0 } } },
	{ "the last one does not fit",
	  { { CHUNK_PAGES / 2 + 1, 0 }, { 1, HALF_ORDER }, { 1, 0 } } },
	{ "small and large",
	  { { 1, 0 }, { 1, BIG_ORDER }, { 2, 0 }, { 1, BIG_ORDER }, { 1, 0 } } },
	{ "halves", { { 7, HALF_ORDER } } },
};

/* Then, each order alone, and pseudo-random lists. */
#define NR_UNIFORM	(BIG_ORDER + 1)
#define NR_RANDOM	4
#define NR_SHAPES	(ARRAY_SIZE(test_shapes) + NR_UNIFORM + NR_RANDOM)

static const void *shape_gen_params(struct kunit *test, const void *prev,
				    char *desc)
{
	/* NULL ends the series, so number N is passed as N + 1. */
	const unsigned long nr = (unsigned long)prev;
	const unsigned long uniform = nr - ARRAY_SIZE(test_shapes);

	if (nr == NR_SHAPES)
		return NULL;
	if (nr < ARRAY_SIZE(test_shapes))
		strscpy(desc, test_shapes[nr].name, KUNIT_PARAM_DESC_SIZE);
	else if (uniform < NR_UNIFORM)
		snprintf(desc, KUNIT_PARAM_DESC_SIZE, "3 of order %lu", uniform);
	else
		snprintf(desc, KUNIT_PARAM_DESC_SIZE, "random %lu",
			 uniform - NR_UNIFORM);
	return (const void *)(nr + 1);
}

/* Small folios are as frequent as large ones, and no list is too long. */
static void add_random_folios(struct test_lists *l, struct rnd_state *rnd,
			      unsigned long max_pages)
{
	unsigned int order = prandom_u32_state(rnd) % (BIG_ORDER + 1);

	add_folios(l, 1, order);
	while (total_pages(l) < max_pages && l->nr < MAX_FOLIOS - 8) {
		order = prandom_u32_state(rnd) % (BIG_ORDER + 1);
		if (total_pages(l) + (1UL << order) > max_pages)
			order = 0;
		add_folios(l, 1 + prandom_u32_state(rnd) % (order ? 1 : 8), order);
	}
}

static void add_shape(struct test_lists *l, unsigned long nr)
{
	const unsigned long uniform = nr - ARRAY_SIZE(test_shapes);
	struct rnd_state rnd;
	unsigned int i;

	if (nr < ARRAY_SIZE(test_shapes)) {
		const struct test_shape *shape = &test_shapes[nr];

		for (i = 0; i < ARRAY_SIZE(shape->runs); i++)
			add_folios(l, shape->runs[i].nr, shape->runs[i].order);
	} else if (uniform < NR_UNIFORM) {
		add_folios(l, 3, uniform);
	} else {
		prandom_seed_state(&rnd, nr);
		add_random_folios(l, &rnd, 1UL << BIG_ORDER);
	}
	if (!l->nr)
		kunit_skip(l->test, "a chunk is a page");
}

/* Any number of CPUs copies lists of any shape. */
static void copy_lists(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned int nr;

	add_shape(l, (unsigned long)test->param_value - 1);

	for (nr = 0; nr <= max_helpers(); nr++) {
		reset_lists(l);
		run_job(test, &l->job, nr);
		check_lists(l);
		check_counters(l, nr);
	}
	for (nr = 1; nr <= max_helpers(); nr++) {
		reset_lists(l);
		run_job_by_helpers(test, &l->job, nr);
		check_lists(l);
		check_counters(l, nr);
	}
}

static const void *order_gen_params(struct kunit *test, const void *prev,
				    char *desc)
{
	const unsigned long order = (unsigned long)prev;

	if (order > BIG_ORDER)
		return NULL;
	snprintf(desc, KUNIT_PARAM_DESC_SIZE, "order %lu", order);
	return (const void *)(order + 1);
}

/* The same for a single folio, which is on no list. */
static void copy_single(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned int nr;

	add_folios(l, 1, (unsigned long)test->param_value - 1);

	for (nr = 0; nr <= max_helpers(); nr++) {
		reset_dst(l, 0);
		copy_job_init(&l->job, l->pair[0].dst, l->pair[0].src);
		run_job(test, &l->job, nr);
		KUNIT_EXPECT_FALSE(test, l->job.failed);
		KUNIT_EXPECT_TRUE(test, dst_is_copied(l, 0));
		check_counters(l, nr);
	}
	for (nr = 1; nr <= max_helpers(); nr++) {
		reset_dst(l, 0);
		copy_job_init(&l->job, l->pair[0].dst, l->pair[0].src);
		run_job_by_helpers(test, &l->job, nr);
		KUNIT_EXPECT_FALSE(test, l->job.failed);
		KUNIT_EXPECT_TRUE(test, dst_is_copied(l, 0));
		check_counters(l, nr);
	}
}

/* A helper can do without the caller: sooner or later its CPU is idle. */
static void helper_alone(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	const int cpu = reserve_cpu(test);
	unsigned int n;

	add_folios(l, 2, CHUNK_ORDER + 1);
	add_folios(l, CHUNK_PAGES + 3, 0);

	for (n = 0; n < NR_TRIES; n++) {
		reset_lists(l);
		KUNIT_EXPECT_TRUE(test, copy_job_ask(&l->job, cpu));
		flush_workqueue(copy_pages_wq);
		copy_job_copy(&l->job);
		copy_job_finish(&l->job);
		check_lists(l);
		check_counters(l, 1);
		if (!l->job.nr_chunks)
			break;
		usleep_range(1000, 2000);
	}
	KUNIT_EXPECT_EQ(test, l->job.nr_chunks, 0);
	KUNIT_EXPECT_EQ(test, l->job.nr_helper_pages, total_pages(l));
}

/*
 * What happens in the copy of some pages. The stub is called by everybody who
 * copies, so it is careful not to mind what is not part of the test.
 */
static struct {
	const struct task_struct *caller;

	/* These pages fail. */
	struct {
		unsigned long pfn;
		unsigned long nr_pages;
	} bad[MAX_FOLIOS];
	unsigned int nr_bad;

	/* What was copied, and by whom. */
	atomic_long_t nr_calls;
	atomic_long_t nr_helper_pages;

	/* A helper is held at its first chunk: has it started, and gone on? */
	struct test_lists *l;
	struct completion started;
	struct completion go_on;
	atomic_t nr_held;
	bool passed;
	bool timed_out;
} stub;

static void replace_stub(bool (*func)(struct page *page, unsigned long nr_pages))
{
	if (IS_ENABLED(CONFIG_FAIL_PAGE_COPY))
		WRITE_ONCE(fail_page_copy_stub, func);
}

static void clear_stub(void)
{
	replace_stub(NULL);
}

static void set_stub(struct test_lists *l,
		     bool (*func)(struct page *page, unsigned long nr_pages))
{
	memset(&stub, 0, sizeof(stub));
	stub.l = l;
	stub.caller = current;
	init_completion(&stub.started);
	init_completion(&stub.go_on);
	if (!IS_ENABLED(CONFIG_FAIL_PAGE_COPY))
		kunit_skip(l->test, "no CONFIG_FAIL_PAGE_COPY");
	replace_stub(func);
}

/* Some pages of one folio fail from now on. */
static void make_bad(struct test_lists *l, unsigned int idx, unsigned long page,
		     unsigned long nr_pages)
{
	stub.bad[stub.nr_bad].pfn = folio_pfn(l->pair[idx].src) + page;
	stub.bad[stub.nr_bad].nr_pages = nr_pages;
	stub.nr_bad++;
	l->pair[idx].fails = true;
}

static bool is_bad(struct page *page, unsigned long nr_pages)
{
	const unsigned long pfn = page_to_pfn(page);
	unsigned int i;

	for (i = 0; i < stub.nr_bad; i++) {
		if (pfn < stub.bad[i].pfn + stub.bad[i].nr_pages &&
		    stub.bad[i].pfn < pfn + nr_pages)
			return true;
	}

	return false;
}

static bool bad_stub(struct page *page, unsigned long nr_pages)
{
	atomic_long_inc(&stub.nr_calls);
	if (current != stub.caller)
		atomic_long_add(nr_pages, &stub.nr_helper_pages);

	return is_bad(page, nr_pages);
}

/* Helpers are counted as having copied exactly what they did. */
static void count_helpers(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned int nr, i;

	add_folios(l, CHUNK_PAGES + 3, 0);
	add_folios(l, 2, CHUNK_ORDER + 3);
	add_folios(l, 2 * CHUNK_PAGES, 0);

	for (nr = 0; nr <= max_helpers(); nr++) {
		for (i = 0; i < 4; i++) {
			set_stub(l, bad_stub);
			reset_lists(l);
			run_job(test, &l->job, nr);
			clear_stub();
			check_lists(l);
			check_counters(l, nr);
			KUNIT_EXPECT_EQ(test, l->job.nr_helper_pages,
					atomic_long_read(&stub.nr_helper_pages));
		}
	}
}

/* The lists that something fails of. */
static void add_folios_to_fail(struct test_lists *l)
{
	add_folios(l, 3, 0);
	add_folios(l, 1, HALF_ORDER);
	add_folios(l, 2, 0);
	add_folios(l, 1, CHUNK_ORDER + 2);
	add_folios(l, 2, 0);
	add_folios(l, 1, CHUNK_ORDER + 1);
	add_folios(l, 1, CHUNK_ORDER);
	add_folios(l, 1, 0);
	add_folios(l, 1, CHUNK_ORDER + 2);
}

/* Without helpers, what is left of a folio that has failed is not read. */
static unsigned long expected_calls(struct test_lists *l, unsigned int bad_idx,
				    unsigned long bad_page)
{
	unsigned long nr = 0;
	unsigned int i;

	for (i = 0; i < l->nr; i++)
		nr += i == bad_idx ? bad_page / CHUNK_PAGES + 1 :
				     DIV_ROUND_UP(1UL << l->pair[i].order,
						  CHUNK_PAGES);
	return nr;
}

static void fail_page(struct test_lists *l, unsigned int idx,
		      unsigned long page)
{
	struct kunit *test = l->test;

	set_stub(l, bad_stub);
	reset_lists(l);
	make_bad(l, idx, page, 1);
	run_job(test, &l->job, 0);
	check_lists(l);
	KUNIT_EXPECT_EQ(test, atomic_long_read(&stub.nr_calls),
			expected_calls(l, idx, page));

	set_stub(l, bad_stub);
	reset_lists(l);
	make_bad(l, idx, page, 1);
	run_job(test, &l->job, max_helpers());
	check_lists(l);

	set_stub(l, bad_stub);
	reset_lists(l);
	make_bad(l, idx, page, 1);
	run_job_by_helpers(test, &l->job, max_helpers());
	check_lists(l);
	clear_stub();
}

/* Exactly the folio fails that a page of cannot be read, whichever it is. */
static void fail_each_chunk(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned long page, nr_pages;
	unsigned int i;

	add_folios_to_fail(l);

	for (i = 0; i < l->nr; i++) {
		nr_pages = 1UL << l->pair[i].order;
		for (page = 0; page < nr_pages; page += CHUNK_PAGES)
			fail_page(l, i, page);
		if (l->pair[i].order)
			fail_page(l, i, nr_pages - 1);
	}
}

/* The same for a single folio. */
static void fail_single(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned long page;
	unsigned int nr;

	add_folios(l, 1, CHUNK_ORDER + 2);

	for (page = 0; page < 4 * CHUNK_PAGES; page += CHUNK_PAGES / 2 ?: 1) {
		for (nr = 0; nr <= max_helpers(); nr++) {
			set_stub(l, bad_stub);
			make_bad(l, 0, page, 1);
			copy_job_init(&l->job, l->pair[0].dst, l->pair[0].src);
			run_job(test, &l->job, nr);
			KUNIT_EXPECT_TRUE(test, l->job.failed);
		}
	}

	/* Everything that comes afterwards is fine again. */
	clear_stub();
	reset_dst(l, 0);
	copy_job_init(&l->job, l->pair[0].dst, l->pair[0].src);
	run_job(test, &l->job, max_helpers());
	KUNIT_EXPECT_FALSE(test, l->job.failed);
	KUNIT_EXPECT_TRUE(test, dst_is_copied(l, 0));
}

/* Neighbours in one chunk, all of a chunk, both ends, every other one, all. */
static void fail_several(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned int nr, pattern, i;

	add_folios_to_fail(l);

	for (pattern = 0; pattern < 6; pattern++) {
		for (nr = 0; nr <= max_helpers(); nr++) {
			set_stub(l, bad_stub);
			reset_lists(l);
			for (i = 0; i < l->nr; i++) {
				const bool bad[] = {
					i == 1 || i == 2,
					i < 6,
					i == 0 || i == l->nr - 1,
					i % 2,
					i % 2 == 0,
					true,
				};

				if (bad[pattern])
					make_bad(l, i, 0, 1UL << l->pair[i].order);
			}
			run_job(test, &l->job, nr);
			check_lists(l);
		}
	}
	clear_stub();
}

/* Pseudo-random pages of pseudo-random lists. */
static void fail_random(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	struct rnd_state rnd;
	unsigned int n, i;

	prandom_seed_state(&rnd, 1);
	add_random_folios(l, &rnd, 1UL << BIG_ORDER);

	for (n = 0; n < 24; n++) {
		set_stub(l, bad_stub);
		reset_lists(l);
		for (i = 0; i < l->nr; i++) {
			if (prandom_u32_state(&rnd) % 4)
				continue;
			make_bad(l, i, prandom_u32_state(&rnd) %
				 (1UL << l->pair[i].order), 1);
		}
		if (n % 2)
			run_job(test, &l->job, n % (max_helpers() + 1));
		else
			run_job_by_helpers(test, &l->job, max_helpers());
		check_lists(l);
	}
	clear_stub();
}

/* CPUs that do nothing but fail get in each other's way as much as they can. */
static void fail_all(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned int n, i;

	add_folios(l, MAX_FOLIOS, 0);

	for (n = 0; n < 32; n++) {
		set_stub(l, bad_stub);
		stub.bad[stub.nr_bad++].nr_pages = ULONG_MAX;
		reset_lists(l);
		for (i = 0; i < l->nr; i++)
			l->pair[i].fails = true;
		run_job(test, &l->job, max_helpers());
		check_lists(l);
	}
	clear_stub();
}

/* A helper does not go on with its first chunk before it is told to. */
static bool hold_stub(struct page *page, unsigned long nr_pages)
{
	const bool bad = is_bad(page, nr_pages);

	if (page_folio(page) == stub.l->pair[0].src)
		atomic_long_inc(&stub.nr_calls);
	if (current == stub.caller || atomic_inc_return(&stub.nr_held) != 1)
		return bad;

	complete(&stub.started);
	if (!wait_for_completion_timeout(&stub.go_on, LONG_TIME))
		WRITE_ONCE(stub.timed_out, true);
	msleep(20);
	WRITE_ONCE(stub.passed, true);

	return bad;
}

/* Let nobody wait any longer. */
static void release_helper(void)
{
	complete_all(&stub.go_on);
}

/*
 * Start a job, with the helper of a CPU being held at the first chunk. It may
 * have given up, so that takes several tries.
 */
static bool hold_helper(struct test_lists *l, int cpu,
			void (*prepare)(struct test_lists *l))
{
	unsigned int n;

	for (n = 0; n < NR_TRIES; n++) {
		set_stub(l, hold_stub);
		reset_lists(l);
		if (prepare)
			prepare(l);
		KUNIT_EXPECT_TRUE(l->test, copy_job_ask(&l->job, cpu));
		if (wait_for_completion_timeout(&stub.started, SHORT_TIME))
			return true;
		release_helper();
		copy_job_copy(&l->job);
		copy_job_finish(&l->job);
		check_lists(l);
	}
	KUNIT_FAIL(l->test, "no helper in %d tries", n);

	return false;
}

/* After everything that was done with a helper that was held. */
static void check_held(struct test_lists *l)
{
	KUNIT_EXPECT_TRUE(l->test, READ_ONCE(stub.passed));
	KUNIT_EXPECT_FALSE(l->test, READ_ONCE(stub.timed_out));
	check_lists(l);
	clear_stub();

	/* Only for the sake of a kernel that has failed. */
	flush_workqueue(copy_pages_wq);
}

static void make_all_bad(struct test_lists *l)
{
	make_bad(l, 0, 0, 1UL << l->pair[0].order);
}

/* A folio that two CPUs fail to read fails once. */
static void fail_twice(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);

	add_folios(l, 1, CHUNK_ORDER + 4);
	add_folios(l, 3, 0);

	if (!hold_helper(l, reserve_cpu(test), make_all_bad))
		return;
	copy_job_copy(&l->job);
	KUNIT_EXPECT_TRUE(test, l->job.failed);
	release_helper();
	copy_job_finish(&l->job);
	KUNIT_EXPECT_EQ(test, atomic_long_read(&stub.nr_calls), 2);
	check_held(l);
}

static void make_first_bad(struct test_lists *l)
{
	make_bad(l, 0, 0, 1);
}

static void make_second_bad(struct test_lists *l)
{
	make_bad(l, 0, CHUNK_PAGES, 1);
}

/* The second chunk is at work when the first one fails. */
static bool overtake_stub(struct page *page, unsigned long nr_pages)
{
	const unsigned long end = jiffies + LONG_TIME;
	const bool bad = hold_stub(page, nr_pages);

	if (current == stub.caller && !bad) {
		release_helper();
		while (!READ_ONCE(stub.l->job.failed) && time_before(jiffies, end))
			usleep_range(50, 100);
	}

	return bad;
}

/* Nobody goes on with a folio of which another CPU could not read a piece. */
static void fail_underway(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	const int cpu = reserve_cpu(test);

	add_folios(l, 1, CHUNK_ORDER + 3);
	add_folios(l, 2, 0);

	/* The caller fails while the helper is at work. */
	if (!hold_helper(l, cpu, make_second_bad))
		return;
	copy_job_copy(&l->job);
	KUNIT_EXPECT_TRUE(test, l->job.failed);
	release_helper();
	copy_job_finish(&l->job);
	KUNIT_EXPECT_EQ(test, atomic_long_read(&stub.nr_calls), 2);
	check_held(l);

	/* The helper fails while the caller is at work. */
	if (!hold_helper(l, cpu, make_first_bad))
		return;
	replace_stub(overtake_stub);
	copy_job_copy(&l->job);
	copy_job_finish(&l->job);
	KUNIT_EXPECT_EQ(test, atomic_long_read(&stub.nr_calls), 2);
	check_held(l);
}

static void set_poisoned(const struct test_pair *pair, bool poisoned)
{
#ifdef CONFIG_MEMORY_FAILURE
	if (pair->order && poisoned)
		folio_set_has_hwpoisoned(pair->src);
	else if (pair->order)
		folio_clear_has_hwpoisoned(pair->src);
	else if (poisoned)
		folio_set_hwpoison(pair->src);
	else
		folio_clear_hwpoison(pair->src);
#endif
}

/* Folios that are known to hold a poisoned page: all chunks of them fail. */
static void fail_poisoned(struct kunit *test)
{
	struct test_lists *l;
	unsigned int n, i, nr;

	if (!IS_ENABLED(CONFIG_MEMORY_FAILURE))
		kunit_skip(test, "no CONFIG_MEMORY_FAILURE");
	/* Without THP, there is no flag to tell it of a large folio. */
	if (!IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE))
		kunit_skip(test, "no CONFIG_TRANSPARENT_HUGEPAGE");

	l = alloc_lists(test);
	add_folios_to_fail(l);

	/* Each one, then all of them. */
	for (n = 0; n <= l->nr; n++) {
		for (nr = 0; nr <= max_helpers(); nr++) {
			reset_lists(l);
			for (i = 0; i < l->nr; i++) {
				if (i != n && n != l->nr)
					continue;
				l->pair[i].fails = true;
				set_poisoned(&l->pair[i], true);
			}
			run_job(test, &l->job, nr);
			for (i = 0; i < l->nr; i++) {
				if (l->pair[i].fails)
					set_poisoned(&l->pair[i], false);
			}
			check_lists(l);
		}
	}
}

/* Helpers have one job at a time: another one gets none of them. */
static void no_helper(struct kunit *test)
{
	struct test_lists *a = alloc_lists(test);
	struct test_lists *b = alloc_lists(test);
	int cpu;

	add_folios(a, 3, CHUNK_ORDER);
	add_folios(b, 3, CHUNK_ORDER + 1);
	reset_lists(a);
	reset_lists(b);

	ask_helpers(test, &a->job, nr_test_cpus());
	copy_job_copy(&a->job);

	for_each_cpu(cpu, &test_cpus)
		KUNIT_EXPECT_FALSE(test, copy_job_ask(&b->job, cpu));
	KUNIT_EXPECT_EQ(test, copy_job_ask_idle(&b->job, nr_test_cpus()), 0);
	copy_job_copy(&b->job);
	copy_job_finish(&b->job);
	check_lists(b);
	check_counters(b, 0);

	/* That has taken none away from the other job. */
	for_each_cpu(cpu, &test_cpus)
		KUNIT_EXPECT_FALSE(test, copy_job_ask(&b->job, cpu));
	copy_job_finish(&a->job);
	check_lists(a);
	check_counters(a, nr_test_cpus());

	check_helpers_free(test);
}

/* Occupies the workqueue, so that no helper can start. */
static struct {
	struct work_struct *work;
	struct completion release;
	bool timed_out;
} blockers;

static void blocker_work(struct work_struct *work)
{
	if (!wait_for_completion_timeout(&blockers.release, LONG_TIME))
		WRITE_ONCE(blockers.timed_out, true);
}

/*
 * The limit is for each node, or for what an unbound workqueue takes for one.
 * With a work item of our own for each CPU, there is none which is below it.
 */
static void block_workqueue(struct kunit *test)
{
	int cpu;

	blockers.work = kunit_kcalloc(test, nr_cpu_ids, sizeof(*blockers.work),
				      GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, blockers.work);
	init_completion(&blockers.release);
	blockers.timed_out = false;
	workqueue_set_max_active(copy_pages_wq, 1);
	for_each_possible_cpu(cpu) {
		INIT_WORK(&blockers.work[cpu], blocker_work);
		queue_work_on(cpu, copy_pages_wq, &blockers.work[cpu]);
	}
}

static void unblock_workqueue(void)
{
	if (!blockers.work)
		return;

	complete_all(&blockers.release);
	workqueue_set_max_active(copy_pages_wq, WQ_DFL_ACTIVE);
	flush_workqueue(copy_pages_wq);
	blockers.work = NULL;
}

/* Helpers that never run are not waited for. */
static void helpers_never_run(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	int i;

	add_folios(l, 3, CHUNK_ORDER + 1);
	add_folios(l, 3, 0);

	block_workqueue(test);
	for (i = 0; i < 3; i++) {
		reset_lists(l);
		run_job(test, &l->job, nr_test_cpus());
		KUNIT_EXPECT_FALSE(test, READ_ONCE(blockers.timed_out));
		check_lists(l);
		check_counters(l, 0);
		KUNIT_EXPECT_EQ(test, l->job.nr_helper_chunks, 0);
	}
	unblock_workqueue();
	check_helpers_free(test);
}

/* Helpers that start when all is copied find nothing, and do nothing. */
static void helpers_run_late(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);

	add_folios(l, 3, CHUNK_ORDER + 1);
	add_folios(l, 3, 0);

	block_workqueue(test);
	reset_lists(l);
	ask_helpers(test, &l->job, nr_test_cpus());
	copy_job_copy(&l->job);
	KUNIT_EXPECT_FALSE(test, READ_ONCE(blockers.timed_out));
	unblock_workqueue();
	copy_job_finish(&l->job);
	check_lists(l);
	check_counters(l, 0);
	check_helpers_free(test);
}

/* At the third chunk of the caller, helpers can start. */
static bool join_stub(struct page *page, unsigned long nr_pages)
{
	if (current != stub.caller) {
		complete_all(&stub.started);
	} else if (atomic_long_inc_return(&stub.nr_calls) == 3) {
		complete_all(&blockers.release);
		wait_for_completion_timeout(&stub.started, SHORT_TIME);
	}
	return false;
}

/* Helpers that start in the middle join in. */
static void helpers_join(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	unsigned int n;

	add_folios(l, 2, CHUNK_ORDER + 2);
	add_folios(l, 3, 0);
	reserve_cpu(test);

	for (n = 0; n < NR_TRIES; n++) {
		set_stub(l, join_stub);
		block_workqueue(test);
		reset_lists(l);
		run_job(test, &l->job, nr_test_cpus());
		clear_stub();
		KUNIT_EXPECT_FALSE(test, READ_ONCE(blockers.timed_out));
		unblock_workqueue();
		check_lists(l);
		check_counters(l, nr_test_cpus());
		KUNIT_EXPECT_GE(test, l->job.nr_chunks, 3);
		if (l->job.nr_helper_chunks)
			break;
	}
	KUNIT_EXPECT_GE(test, l->job.nr_helper_chunks, 1);
	check_helpers_free(test);
}

struct test_asker {
	struct copy_job job;
	struct completion done;
	int cpu;
	bool asked;
};

/* A helper that another job waits for does not take the next one. */
static int ask_thread(void *data)
{
	struct test_asker *asker = data;

	msleep(20);
	asker->asked = copy_job_ask(&asker->job, asker->cpu);
	release_helper();
	copy_job_copy(&asker->job);
	copy_job_finish(&asker->job);
	kthread_complete_and_exit(&asker->done, 0);
}

/* A helper that is copying a chunk is waited for. */
static void finish_waits(struct kunit *test)
{
	struct test_asker *asker = kunit_kzalloc(test, sizeof(*asker), GFP_KERNEL);
	struct test_lists *l = alloc_lists(test);
	struct test_lists *other = alloc_lists(test);

	KUNIT_ASSERT_NOT_NULL(test, asker);
	init_completion(&asker->done);
	asker->cpu = reserve_cpu(test);
	add_folios(l, 1, CHUNK_ORDER + 2);
	add_folios(l, 2 * CHUNK_PAGES, 0);
	add_folios(other, 1, 0);
	copy_job_init(&asker->job, other->pair[0].dst, other->pair[0].src);

	if (!hold_helper(l, asker->cpu, NULL))
		return;
	copy_job_copy(&l->job);
	KUNIT_EXPECT_FALSE(test, READ_ONCE(stub.passed));
	if (IS_ERR(kthread_run(ask_thread, asker, "copy_pages"))) {
		KUNIT_FAIL(test, "no thread");
		release_helper();
		complete(&asker->done);
	}
	copy_job_finish(&l->job);
	check_held(l);
	check_counters(l, 1);
	KUNIT_EXPECT_EQ(test, l->job.nr_helper_chunks, 1);

	wait_for_completion(&asker->done);
	KUNIT_EXPECT_FALSE(test, asker->asked);
	check_helpers_free(test);
}

struct test_spinners {
	struct task_struct **tasks;
	struct completion started;
};

static int spin(void *started)
{
	complete(started);
	while (!kthread_should_stop()) {
		cpu_relax();
		cond_resched();
	}

	return 0;
}

static void stop_spinners(void *data)
{
	struct test_spinners *spinners = data;
	int cpu;

	for_each_cpu(cpu, &test_cpus) {
		if (!IS_ERR_OR_NULL(spinners->tasks[cpu]))
			kthread_stop(spinners->tasks[cpu]);
		spinners->tasks[cpu] = NULL;
	}
}

/* Give these CPUs something to do, until the end of the test at the latest. */
static struct test_spinners *start_spinners(struct kunit *test,
					    const struct cpumask *cpus)
{
	struct test_spinners *spinners;
	int cpu;

	spinners = kunit_kzalloc(test, sizeof(*spinners), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, spinners);
	spinners->tasks = kunit_kcalloc(test, nr_cpu_ids, sizeof(*spinners->tasks),
					GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, spinners->tasks);
	init_completion(&spinners->started);
	KUNIT_ASSERT_EQ(test, 0,
			kunit_add_action_or_reset(test, stop_spinners, spinners));
	for_each_cpu(cpu, cpus) {
		spinners->tasks[cpu] = kthread_run_on_cpu(spin, &spinners->started,
							  cpu, "copy_pages/%u");
		KUNIT_ASSERT_FALSE(test, IS_ERR(spinners->tasks[cpu]));
		wait_for_completion(&spinners->started);
	}

	return spinners;
}

/* Helpers leave their CPUs to everybody else. */
static void helpers_give_up(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	struct test_spinners *spinners;

	add_folios(l, 2, CHUNK_ORDER + 2);
	add_folios(l, 3, 0);

	/* After the chunk that one is at. */
	if (!hold_helper(l, reserve_cpu(test), NULL))
		return;
	spinners = start_spinners(test, &test_cpus);
	release_helper();
	flush_workqueue(copy_pages_wq);
	copy_job_copy(&l->job);
	copy_job_finish(&l->job);
	check_held(l);
	check_counters(l, 1);
	KUNIT_EXPECT_EQ(test, l->job.nr_helper_chunks, 1);

	/* Before the first one. */
	reset_lists(l);
	run_job_by_helpers(test, &l->job, nr_test_cpus());
	check_lists(l);
	check_counters(l, 0);
	stop_spinners(spinners);
	check_helpers_free(test);
}

/* One of several jobs at the same time. */
struct test_thread {
	struct test_lists *l;
	struct completion done;
	unsigned int nr_helpers;
	bool single;
};

static int run_thread(void *data)
{
	struct test_thread *thread = data;
	struct test_lists *l = thread->l;
	int cpu, n;

	for (n = 0; n < 16; n++) {
		unsigned int nr_asked = 0;

		reset_lists(l);
		if (thread->single)
			copy_job_init(&l->job, l->pair[0].dst, l->pair[0].src);
		for_each_cpu(cpu, &test_cpus)
			nr_asked += copy_job_ask(&l->job, cpu);
		copy_job_copy(&l->job);
		copy_job_finish(&l->job);
		check_lists(l);
		check_counters(l, nr_asked);
		thread->nr_helpers += nr_asked;
	}
	kthread_complete_and_exit(&thread->done, 0);
}

/* Jobs that run at the same time share the helpers, and nothing else. */
static void concurrent_jobs(struct kunit *test)
{
	const unsigned int nr = 4;
	struct test_thread *threads;
	unsigned int i, nr_helpers = 0;

	threads = kunit_kcalloc(test, nr, sizeof(*threads), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, threads);
	for (i = 0; i < nr; i++) {
		struct test_lists *l = alloc_lists(test);

		threads[i].l = l;
		threads[i].single = i == 3;
		init_completion(&threads[i].done);
		l->seed = i + 1;
		if (threads[i].single) {
			add_folios(l, 1, CHUNK_ORDER + 2);
			continue;
		}
		add_folios(l, 1 + i, CHUNK_ORDER + 1);
		add_folios(l, 2 * CHUNK_PAGES + i, 0);
	}
	for (i = 0; i < nr; i++) {
		if (IS_ERR(kthread_run(run_thread, &threads[i], "copy_pages/%u", i))) {
			KUNIT_FAIL(test, "no thread");
			complete(&threads[i].done);
		}
	}
	for (i = 0; i < nr; i++) {
		wait_for_completion(&threads[i].done);
		nr_helpers += threads[i].nr_helpers;
	}
	KUNIT_EXPECT_GT(test, nr_helpers, 0);
	check_helpers_free(test);
}

/* Only as many as wanted, and the caller's own CPU is not idle. */
static void ask_idle(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	struct test_lists *other = alloc_lists(test);
	unsigned int nr_max = 0, wanted, nr, n;

	add_folios_node(l, 3, CHUNK_ORDER, cpu_to_node(reserve_cpu(test)));
	add_folios(other, 1, 0);

	for (n = 0; n < 100 && (n < 3 || !nr_max); n++) {
		for (wanted = 0; wanted <= max_helpers(); wanted++) {
			usleep_range(1000, 2000);
			reset_lists(l);
			reset_lists(other);
			copy_job_copy(&other->job);

			/* Whose helpers are free tells who was not asked. */
			migrate_disable();
			nr = copy_job_ask_idle(&l->job, wanted);
			KUNIT_EXPECT_TRUE(test, copy_job_ask(&other->job,
							     raw_smp_processor_id()));
			migrate_enable();
			nr_max = max(nr_max, nr);
			KUNIT_EXPECT_LE(test, nr, wanted);
			KUNIT_EXPECT_EQ(test, nr, list_count_nodes(&l->job.helpers));

			copy_job_copy(&l->job);
			copy_job_finish(&other->job);
			copy_job_finish(&l->job);
			check_lists(l);
			check_counters(l, nr);
		}
	}
	KUNIT_EXPECT_GT(test, nr_max, 0);
	check_helpers_free(test);
}

/* A helper that has a job is not asked, nor counted. */
static void ask_idle_claimed(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	struct test_lists *other = alloc_lists(test);
	const int cpu = reserve_cpu(test);
	unsigned int nr, n;

	add_folios_node(l, 3, CHUNK_ORDER, cpu_to_node(cpu));
	add_folios(other, 1, 0);

	for (n = 0; n < 10; n++) {
		reset_lists(l);
		reset_lists(other);
		copy_job_copy(&other->job);
		KUNIT_EXPECT_TRUE(test, copy_job_ask(&other->job, cpu));
		usleep_range(1000, 2000);

		migrate_disable();
		nr = copy_job_ask_idle(&l->job, nr_test_cpus());
		migrate_enable();
		KUNIT_EXPECT_LE(test, nr, nr_test_cpus() - 2);
		KUNIT_EXPECT_EQ(test, nr, list_count_nodes(&l->job.helpers));
		KUNIT_EXPECT_EQ(test, 1, list_count_nodes(&other->job.helpers));

		copy_job_copy(&l->job);
		copy_job_finish(&l->job);
		KUNIT_EXPECT_FALSE(test, copy_job_ask(&l->job, cpu));
		copy_job_finish(&other->job);
		check_lists(l);
		check_counters(l, nr);
	}
	check_helpers_free(test);
}

/* A CPU that has something else to do is not asked. */
static void ask_idle_busy(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	struct test_lists *other = alloc_lists(test);
	const int cpu = reserve_cpu(test);
	unsigned int n;

	add_folios_node(l, 3, CHUNK_ORDER, cpu_to_node(cpu));
	add_folios(other, 1, 0);

	start_spinners(test, cpumask_of(cpu));
	for (n = 0; n < 10; n++) {
		reset_lists(l);
		reset_lists(other);
		copy_job_copy(&other->job);
		usleep_range(1000, 2000);

		copy_job_ask_idle(&l->job, nr_test_cpus());
		KUNIT_EXPECT_TRUE(test, copy_job_ask(&other->job, cpu));
		copy_job_copy(&l->job);
		copy_job_finish(&other->job);
		copy_job_finish(&l->job);
		check_lists(l);
	}
}

#ifdef CONFIG_HOTPLUG_CPU

/* A CPU that can be taken away, and is not this one. */
static int cpu_to_remove(struct kunit *test)
{
	int cpu;

	for_each_online_cpu(cpu) {
		if (cpu != raw_smp_processor_id() && cpu_is_hotpluggable(cpu))
			return cpu;
	}
	kunit_skip(test, "no CPU that can be taken offline");
}

static void remove_test_cpu(struct kunit *test, int cpu)
{
	const int err = remove_cpu(cpu);

	if (err)
		kunit_skip(test, "CPU %d cannot be taken offline: %d", cpu, err);
}

/* The helper of a CPU which is not there may help from another one. */
static void cpu_offline(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	const int cpu = cpu_to_remove(test);
	unsigned int n;

	add_folios(l, 2, CHUNK_ORDER + 2);
	add_folios(l, 3, 0);

	remove_test_cpu(test, cpu);
	for (n = 0; n < 3; n++) {
		reset_lists(l);
		KUNIT_EXPECT_TRUE(test, copy_job_ask(&l->job, cpu));
		flush_workqueue(copy_pages_wq);
		copy_job_copy(&l->job);
		copy_job_finish(&l->job);
		check_lists(l);
		check_counters(l, 1);
	}

	/* No helper is sought there. */
	reset_lists(l);
	copy_job_ask_idle(&l->job, nr_test_cpus());
	copy_job_copy(&l->job);
	KUNIT_EXPECT_TRUE(test, copy_job_ask(&l->job, cpu));
	copy_job_finish(&l->job);
	check_lists(l);

	KUNIT_EXPECT_EQ(test, add_cpu(cpu), 0);
	check_helpers_free(test);
}

/* A CPU goes while its helper is in the middle of a chunk. */
static void cpu_offline_underway(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	const int cpu = cpu_to_remove(test);
	int err;

	add_folios(l, 2, CHUNK_ORDER + 2);
	add_folios(l, 3, 0);

	leave_cpu(test, cpu);
	if (!hold_helper(l, cpu, NULL))
		return;
	err = remove_cpu(cpu);
	release_helper();
	copy_job_copy(&l->job);
	copy_job_finish(&l->job);
	check_held(l);
	check_counters(l, 1);
	KUNIT_EXPECT_GE(test, l->job.nr_helper_chunks, 1);
	if (err)
		kunit_skip(test, "CPU %d cannot be taken offline: %d", cpu, err);
	KUNIT_EXPECT_EQ(test, add_cpu(cpu), 0);
	check_helpers_free(test);
}

struct test_hotplug {
	struct completion done;
	int cpu;
	int err;
};

static int hotplug_thread(void *data)
{
	struct test_hotplug *hotplug = data;
	int n;

	for (n = 0; n < 3 && !hotplug->err; n++) {
		hotplug->err = remove_cpu(hotplug->cpu);
		if (hotplug->err)
			break;
		msleep(20);
		hotplug->err = add_cpu(hotplug->cpu);
		msleep(20);
	}
	kthread_complete_and_exit(&hotplug->done, 0);
}

/* A CPU comes and goes while jobs run. */
static void cpu_hotplug(struct kunit *test)
{
	struct test_lists *l = alloc_lists(test);
	struct test_hotplug *hotplug;
	unsigned int n = 0, nr;

	hotplug = kunit_kzalloc(test, sizeof(*hotplug), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, hotplug);
	hotplug->cpu = cpu_to_remove(test);
	init_completion(&hotplug->done);
	add_folios(l, 1, CHUNK_ORDER + 2);
	add_folios(l, CHUNK_PAGES + 3, 0);

	KUNIT_ASSERT_FALSE(test, IS_ERR(kthread_run(hotplug_thread, hotplug,
						    "copy_pages")));
	do {
		reset_lists(l);
		nr = max_helpers();
		if (n % 3 == 0) {
			run_job(test, &l->job, nr);
		} else if (n % 3 == 1) {
			run_job_by_helpers(test, &l->job, nr);
		} else {
			nr = copy_job_ask_idle(&l->job, nr);
			copy_job_copy(&l->job);
			copy_job_finish(&l->job);
		}
		check_lists(l);
		check_counters(l, nr);
		n++;
	} while (!completion_done(&hotplug->done));
	wait_for_completion(&hotplug->done);

	if (hotplug->err && cpu_online(hotplug->cpu))
		kunit_skip(test, "CPU %d cannot be taken offline: %d",
			   hotplug->cpu, hotplug->err);
	KUNIT_EXPECT_EQ(test, hotplug->err, 0);
	check_helpers_free(test);
}

#else /* CONFIG_HOTPLUG_CPU */

static void cpu_offline(struct kunit *test)
{
	kunit_skip(test, "no CONFIG_HOTPLUG_CPU");
}

static void cpu_offline_underway(struct kunit *test)
{
	kunit_skip(test, "no CONFIG_HOTPLUG_CPU");
}

static void cpu_hotplug(struct kunit *test)
{
	kunit_skip(test, "no CONFIG_HOTPLUG_CPU");
}

#endif /* CONFIG_HOTPLUG_CPU */

static int copy_pages_suite_init(struct kunit_suite *suite)
{
	cpumask_copy(&test_cpus, cpu_online_mask);
	return copy_pages_start();
}

static int copy_pages_test_init(struct kunit *test)
{
	KUNIT_ASSERT_EQ(test, CHUNK_PAGES, COPY_CHUNK_PAGES);
	return 0;
}

/* Whatever has gone wrong, the next test starts from the same state. */
static void copy_pages_test_exit(struct kunit *test)
{
	clear_stub();
	unblock_workqueue();
	flush_workqueue(copy_pages_wq);
}

static struct kunit_case copy_pages_test_cases[] = {
	KUNIT_CASE_PARAM(copy_lists, shape_gen_params),
	KUNIT_CASE_PARAM(copy_single, order_gen_params),
	KUNIT_CASE(helper_alone),
	KUNIT_CASE(count_helpers),
	KUNIT_CASE(fail_each_chunk),
	KUNIT_CASE(fail_single),
	KUNIT_CASE(fail_several),
	KUNIT_CASE(fail_random),
	KUNIT_CASE(fail_all),
	KUNIT_CASE(fail_twice),
	KUNIT_CASE(fail_underway),
	KUNIT_CASE(fail_poisoned),
	KUNIT_CASE(no_helper),
	KUNIT_CASE(helpers_never_run),
	KUNIT_CASE(helpers_run_late),
	KUNIT_CASE(helpers_join),
	KUNIT_CASE(helpers_give_up),
	KUNIT_CASE(finish_waits),
	KUNIT_CASE(concurrent_jobs),
	KUNIT_CASE(ask_idle),
	KUNIT_CASE(ask_idle_claimed),
	KUNIT_CASE(ask_idle_busy),
	KUNIT_CASE(cpu_offline),
	KUNIT_CASE(cpu_offline_underway),
	KUNIT_CASE(cpu_hotplug),
	{}
};

static struct kunit_suite copy_pages_test_suite = {
	.name = "copy_pages",
	.suite_init = copy_pages_suite_init,
	.init = copy_pages_test_init,
	.exit = copy_pages_test_exit,
	.test_cases = copy_pages_test_cases,
};

kunit_test_suite(copy_pages_test_suite);

MODULE_IMPORT_NS("EXPORTED_FOR_KUNIT_TESTING");
MODULE_DESCRIPTION("KUnit tests for the copy of folios with several CPUs");
MODULE_LICENSE("GPL");
