// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of migration in company: what callers of move_pages(2) are told, what
 * the rest of memory management does to pages while they are moved, and who but
 * a system call moves them. None of it may show in what the pages hold.
 *
 * Every page of the memory under test holds words that occur nowhere else, so
 * that a page in the wrong place, or an older version of it, is noticed. Its
 * last word is a counter, for those who write to pages that others look at.
 *
 * The folios are of a few sizes: of a PMD, of 16 pages and of one.
 */

#include "kselftest_harness.h"

#include <fcntl.h>
#include <glob.h>
#include <limits.h>
#include <numa.h>
#include <numaif.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>

#include "../../../../mm/gup_test.h"
#include "hugepage_settings.h"
#include "migrate_util.h"
#include "vm_util.h"

#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED	24
#endif

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE		25
#endif

#define KPF_SWAPCACHE		BIT_ULL(13)

#define MAX_PMD_BYTES		(32UL << 20)
#define LARGE_PAGES		16U
#define NR_LARGE		8U
#define NR_SMALL		256U
#define MAX_CHUNK		32U
#define MAX_TRIES		100
#define MAX_BLOCKS		16
#define OFFLINE_S		5

/* Emulators are slow, and may share a machine. */
#define TIMEOUT_S		180
#define RACE_NS			150000000ULL
#define RACES			3
#define RACE_MAX_NS		60000000000ULL
#define RACE_MOVES		4
#define NR_POISONED		16
#define NR_MOVES		1000
#define MT_CPUS			4

#define SWAP_BYTES		(64UL << 20)
#define TMPFS_BYTES		(8UL << 20)
#define FILE_BYTES		(4UL << 20)
#define CHARGE_TOLERANCE	(1024UL << 10)
#define FULL_MAX_BYTES		(8ULL << 30)
#define FULL_TRIES		16U
#define FULL_THPS		8U
#define FULL_LEAVE		(8UL << 20)
#define FULL_CHUNK		(32UL << 20)

#define KNOB_DIR		"/sys/kernel/mm/migrate/"
#define SPLIT_PATH		"/sys/kernel/debug/split_huge_pages"
#define UNPOISON_PATH		"/sys/kernel/debug/hwpoison/unpoison-pfn"
#define GUP_TEST_PATH		"/sys/kernel/debug/gup_test"
#define PAGE_OWNER_PATH		"/sys/kernel/debug/page_owner"
#define STACKS_PATH		"/sys/kernel/debug/page_owner_stacks/show_stacks"
#define ALLOCINFO_PATH		"/proc/allocinfo"
#define PROFILING_PATH		"/proc/sys/vm/mem_profiling"
#define ZRAM_CONTROL		"/sys/class/zram-control/"
#define NODE_DIR		"/sys/devices/system/node/"
#define MEMORY_DIR		"/sys/devices/system/memory/"
#define COMPACT_PATH		"/proc/sys/vm/compact_unevictable_allowed"
#define COMPACT_NOW_PATH	"/proc/sys/vm/compact_memory"
#define MIN_FREE_PATH		"/proc/sys/vm/min_free_kbytes"
#define BALANCING_PATH		"/proc/sys/kernel/numa_balancing"
#define BALANCING_DIR		"/sys/kernel/debug/sched/numa_balancing/"
#define DEMOTION_PATH		"/sys/kernel/mm/numa/demotion_enabled"
#define TIER_DIR		"/sys/devices/virtual/memory_tiering/"

/* The memory under test: folios of a PMD, then large and then small ones. */
struct area {
	char *start;
	unsigned int nr_pages;
	unsigned int nr_pmd;	/* pages that are in such folios */
	unsigned int nr_large;
	unsigned int *version;	/* of the content of each page */

	void **pages;		/* arguments of move_pages() */
	int *nodes;
	int *status;
	unsigned int at_once;	/* so many pages, by move_some() */
	unsigned long moves;
};

/* What is changed for a time, and what it was. */
struct setting {
	char path[96];
	char value[64];
};

#define MAX_SETTINGS	8

/* Shared, so that what a test leaves that was killed can be restored. */
static struct {
	unsigned int nr;
	struct setting setting[MAX_SETTINGS];
} *settings;

static bool change_setting(const char *path, const char *value)
{
	struct setting *setting = &settings->setting[settings->nr];

	if (settings->nr == MAX_SETTINGS)
		ksft_exit_fail_msg("too many settings\n");
	if (access(path, W_OK) ||
	    !read_file(path, setting->value, sizeof(setting->value)))
		return false;
	snprintf(setting->path, sizeof(setting->path), "%s", path);
	settings->nr++;
	if (try_write_file(path, value))
		return true;
	settings->nr--;
	return false;
}

static void restore_changed_settings(void)
{
	while (settings->nr) {
		struct setting *setting = &settings->setting[--settings->nr];

		try_write_file(setting->path, setting->value);
	}
}

static void __attribute__((constructor)) save_settings(void)
{
	settings = alloc_shared(sizeof(*settings));
	atexit(restore_changed_settings);
	if (!geteuid())
		hugepage_save_settings(true, false);
}

static void set_thp(size_t size, const char *value)
{
	char name[64];

	snprintf(name, sizeof(name), "hugepages-%zukB/enabled", size >> 10);
	thp_write_string(name, value);
}

/* Contents. */

static unsigned int nr_words(void)
{
	return pagesize / sizeof(uint64_t) - 1;
}

static uint64_t page_word(unsigned int i, unsigned int version, unsigned int w)
{
	/* An odd factor: different before it is different after it. */
	return ((uint64_t)i << 44 | (uint64_t)version << 16 | w) *
	       0x9e3779b97f4a7c15ULL;
}

static void fill(void *to, unsigned int i, unsigned int version)
{
	uint64_t *word = to;
	unsigned int w;

	for (w = 0; w < nr_words(); w++)
		word[w] = page_word(i, version, w);
}

static bool holds(const void *from, unsigned int i, unsigned int version)
{
	const uint64_t *word = from;
	unsigned int w;

	for (w = 0; w < nr_words(); w++)
		if (word[w] != page_word(i, version, w))
			return false;
	return true;
}

static char *page_addr(const struct area *area, unsigned int i)
{
	return area->start + i * pagesize;
}

static uint64_t *page_counter(const struct area *area, unsigned int i)
{
	return (uint64_t *)page_addr(area, i) + nr_words();
}

static void write_page(struct area *area, unsigned int i)
{
	fill(page_addr(area, i), i, ++area->version[i]);
}

static void write_pages(struct area *area)
{
	unsigned int i;

	for (i = 0; i < area->nr_pages; i++)
		write_page(area, i);
}

static unsigned int nr_wrong(const struct area *area, unsigned int first,
			     unsigned int nr)
{
	unsigned int i, wrong = 0;

	for (i = first; i < first + nr; i++)
		wrong += !holds(page_addr(area, i), i, area->version[i]);
	return wrong;
}

static unsigned int nr_not_zero(const struct area *area, unsigned int first,
				unsigned int nr)
{
	unsigned int i, w, wrong = 0;

	for (i = first; i < first + nr; i++)
		for (w = 0; w <= nr_words(); w++)
			wrong += ((uint64_t *)page_addr(area, i))[w] != 0;
	return wrong;
}

static void check_contents(struct __test_metadata *_metadata,
			   const struct area *area)
{
	ASSERT_EQ(nr_wrong(area, 0, area->nr_pages), 0);
}

static uint64_t page_flags(char *addr)
{
	unsigned long pfn = pagemap_get_pfn(pagemap_fd, addr);
	uint64_t flags;

	if (pfn == -1UL || pageflags_get(pfn, kpageflags_fd, &flags))
		return 0;
	return flags;
}

/* While a page is being moved, by compaction perhaps, it has no flags. */
static bool is_large(char *addr)
{
	unsigned int tries = 0;
	uint64_t flags;

	while (!(flags = page_flags(addr)) && tries++ < MAX_TRIES)
		usleep(10000);
	return flags & KPF_COMPOUND_HEAD;
}

/* Memory. */

static void area_init(struct area *area, char *start, unsigned int nr_pmd,
		      unsigned int nr_large, unsigned int nr_small)
{
	unsigned int nr = nr_pmd + nr_large + nr_small;

	*area = (struct area) {
		.start = start,
		.nr_pages = nr,
		.nr_pmd = nr_pmd,
		.nr_large = nr_large,
		.at_once = nr,
		.version = alloc(nr, sizeof(*area->version)),
		.pages = alloc(nr, sizeof(*area->pages)),
		.nodes = alloc(nr, sizeof(*area->nodes)),
		.status = alloc(nr, sizeof(*area->status)),
	};
}

static void area_free(struct area *area)
{
	racers_stop();
	if (!area->start)
		return;
	munmap(area->start, area->nr_pages * pagesize);
	free(area->version);
	free(area->pages);
	free(area->nodes);
	free(area->status);
	area->start = NULL;
}

/* The number of pages of the folio that page @i was allocated in. */
static unsigned int folio_pages(const struct area *area, unsigned int i)
{
	if (i < area->nr_pmd)
		return pmdsize / pagesize;
	return i < area->nr_pmd + area->nr_large ? LARGE_PAGES : 1;
}

static void *map_anon(char *start, size_t len)
{
	return mmap(start, len, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

/* False, with the reason reported, if there are no such folios for us. */
static bool area_alloc(struct __test_metadata *_metadata, struct area *area,
		       unsigned int nr_pmd, unsigned int nr_large,
		       unsigned int nr_small)
{
	size_t large = LARGE_PAGES * pagesize;
	unsigned long orders = 1UL << sz2ord(pmdsize, pagesize) |
			       1UL << sz2ord(large, pagesize);
	unsigned int i, n = pmdsize / pagesize;
	size_t len;

	if ((thp_supported_orders() & orders) != orders)
		SKIP(return false, "no anonymous folios of these sizes");
	area_init(area, NULL, nr_pmd * n, nr_large * LARGE_PAGES, nr_small);
	len = area->nr_pages * pagesize;
	area->start = reserve(len);
	ASSERT_EQ(map_anon(area->start, len), area->start);
	ASSERT_EQ(madvise(area->start,
			  (area->nr_pmd + area->nr_large) * pagesize,
			  MADV_HUGEPAGE), 0);

	/* Only while we allocate: khugepaged must not collapse anything. */
	if (nr_pmd)
		set_thp(pmdsize, "madvise");
	for (i = 0; i < area->nr_pmd; i++)
		write_page(area, i);
	if (nr_pmd)
		set_thp(pmdsize, "never");
	if (nr_large)
		set_thp(large, "madvise");
	for (; i < area->nr_pages; i++)
		write_page(area, i);
	if (nr_large)
		set_thp(large, "never");

	for (i = 0; i < area->nr_pages; i += folio_pages(area, i))
		if (is_large(page_addr(area, i)) != (folio_pages(area, i) > 1))
			SKIP(return false, "could not allocate large folios");
	return true;
}

/* Moving. */

/* The nodes of all pages, or errors, in area->nodes. */
static void get_nodes(struct area *area)
{
	unsigned int i;

	for (i = 0; i < area->nr_pages; i++)
		area->pages[i] = page_addr(area, i);
	if (move_pages(0, area->nr_pages, area->pages, NULL, area->nodes, 0))
		ksft_exit_fail_perror("move_pages() failed");
}

static unsigned int nr_on_node(struct area *area, int nid)
{
	unsigned int i, nr = 0;

	get_nodes(area);
	for (i = 0; i < area->nr_pages; i++)
		nr += area->nodes[i] == nid;
	return nr;
}

/* Ask for @nr of area->pages; any result will do. */
static long move_listed(struct area *area, unsigned int nr, int target)
{
	unsigned int i;

	for (i = 0; i < nr; i++) {
		area->nodes[i] = target;
		area->status[i] = -1;
	}
	return move_pages(0, nr, area->pages, area->nodes, area->status,
			  MPOL_MF_MOVE_ALL);
}

/* ENOMEM: there was no place for a folio, which could not be split either. */
static void check_moved(struct __test_metadata *_metadata, long ret)
{
	if (ret < 0)
		ASSERT_EQ(errno, ENOMEM);
}

/*
 * Move what can be moved: one page of each folio, as they were allocated, or
 * all pages, since they may be folios of their own now. What cannot be found or
 * moved ends a batch, or the call, so each time another page comes first.
 */
static long move_some(struct area *area, int target)
{
	unsigned int i, nr = 0, skip = area->moves * 61 % area->nr_pages;
	bool all = ++area->moves % 4 == 0;

	for (i = 0; i < area->at_once; i += all ? 1 : folio_pages(area, i))
		area->pages[nr++] = page_addr(area,
					      (i + skip) % area->nr_pages);
	return move_listed(area, nr, target);
}

/*
 * Whatever has been done to a page, it can be moved: if not this time, then some
 * time. Pages that are swapped out do not count.
 */
static void move_all(struct __test_metadata *_metadata, struct area *area,
		     int target)
{
	unsigned int i, nr, tries = 0;

	for (;;) {
		get_nodes(area);
		for (i = 0, nr = 0; i < area->nr_pages; i++)
			if (area->nodes[i] != target &&
			    area->nodes[i] != -ENOENT)
				area->pages[nr++] = page_addr(area, i);
		if (!nr)
			break;
		ASSERT_LT(tries++, MAX_TRIES) {
			TH_LOG("%u pages are not on node %d", nr, target);
		}
		if (tries > 1)
			usleep(10000);
		check_moved(_metadata, move_listed(area, nr, target));
	}
}

static void bounce(struct __test_metadata *_metadata, struct area *area)
{
	int i;

	for (i = 1; i <= 2; i++) {
		move_all(_metadata, area, node[i % 2]);
		check_contents(_metadata, area);
	}
}

/* Others may be at it, but not all the time. */
static void check_not_isolated(struct __test_metadata *_metadata)
{
	uint64_t start = now_ns();

	while (nr_isolated()) {
		ASSERT_LT(now_ns() - start, RACE_MAX_NS);
		usleep(10000);
	}
}

/* Copying with several CPUs, or not. A kernel that cannot has no such file. */
static void setup_knobs(struct __test_metadata *_metadata, bool mt)
{
	unsigned long nr = sysconf(_SC_NPROCESSORS_CONF);
	char value[32];

	if (nr > MT_CPUS)
		nr = MT_CPUS;
	if (access(KNOB_DIR, F_OK)) {
		if (mt)
			SKIP(return, "no " KNOB_DIR);
		return;
	}
	if (mt && nr == 1)
		SKIP(return, "there is only one CPU");
	snprintf(value, sizeof(value), "%lu", mt ? nr : 1);
	ASSERT_TRUE(change_setting(KNOB_DIR "copy_cpus", value));
	snprintf(value, sizeof(value), "%d", getpagesize());
	ASSERT_TRUE(change_setting(KNOB_DIR "copy_min_bytes", value));
}

static void setup(struct __test_metadata *_metadata, bool mt)
{
	const char *reason;

	restore_changed_settings();
	reason = migrate_setup();
	if (reason)
		SKIP(return, "%s", reason);
	if (pmdsize <= LARGE_PAGES * pagesize || pmdsize > MAX_PMD_BYTES)
		SKIP(return, "a PMD is of %zu bytes", pmdsize);
	setup_knobs(_metadata, mt);
}

/* False, with the reason reported, if there is no such cgroup for us. */
static bool enter_cgroup(struct __test_metadata *_metadata,
			 const char *controller)
{
	const char *reason = cgroup_enter(controller);

	if (reason)
		SKIP(return false, "%s: %s", controller, reason);
	return true;
}

/* Swap on a zram device of our own. */

static int zram_id = -1;
static bool zram_is_on;

static bool zram_write(const char *name, const char *value)
{
	char path[64];

	snprintf(path, sizeof(path), "/sys/block/zram%d/%s", zram_id, name);
	return try_write_file(path, value);
}

static void make_swap(struct __test_metadata *_metadata, const char *path)
{
	uint32_t *header = alloc(1, pagesize);
	int fd = open(path, O_WRONLY);

	ASSERT_GE(fd, 0);
	/* After 1024 bytes for a boot loader: the version and the last page. */
	header[256] = 1;
	header[257] = SWAP_BYTES / pagesize - 1;
	memcpy((char *)header + pagesize - 10, "SWAPSPACE2", 10);
	ASSERT_EQ(write(fd, header, pagesize), pagesize);
	close(fd);
	free(header);
}

static bool swap_on(struct __test_metadata *_metadata)
{
	char value[32];

	if (access(ZRAM_CONTROL "hot_add", R_OK))
		SKIP(return false, "no zram");
	zram_id = read_num(ZRAM_CONTROL "hot_add");
	snprintf(value, sizeof(value), "%lu", SWAP_BYTES);
	ASSERT_TRUE(zram_write("disksize", value));
	snprintf(value, sizeof(value), "/dev/zram%d", zram_id);
	make_swap(_metadata, value);
	/* Preferred to any other. */
	ASSERT_EQ(swapon(value, SWAP_FLAG_PREFER | 1000), 0);
	zram_is_on = true;
	return true;
}

static void swap_off(struct __test_metadata *_metadata)
{
	unsigned int tries = 0;
	char value[32];

	if (zram_id < 0)
		return;
	snprintf(value, sizeof(value), "/dev/zram%d", zram_id);
	if (zram_is_on)
		EXPECT_EQ(swapoff(value), 0);
	/* udev may have a look at it. */
	while (!zram_write("reset", "1") && tries++ < MAX_TRIES)
		usleep(10000);
	snprintf(value, sizeof(value), "%d", zram_id);
	EXPECT_TRUE(try_write_file(ZRAM_CONTROL "hot_remove", value));
	zram_id = -1;
	zram_is_on = false;
}

static unsigned int nr_swapped(const struct area *area)
{
	unsigned int i, nr = 0;

	for (i = 0; i < area->nr_pages; i++)
		nr += pagemap_is_swapped(pagemap_fd, page_addr(area, i));
	return nr;
}

/* What undoes all of the above. */
static void teardown(struct __test_metadata *_metadata)
{
	EXPECT_TRUE(cgroup_leave());
	swap_off(_metadata);
	restore_changed_settings();
}

/* What callers of move_pages(2) are told. */

#define UNTOUCHED	-12345

FIXTURE(move_pages)
{
	struct area area;
	struct area hog;
	int gup_fd;
};

FIXTURE_VARIANT(move_pages)
{
	bool mt;
};

FIXTURE_VARIANT_ADD(move_pages, off) { };
FIXTURE_VARIANT_ADD(move_pages, mt) { .mt = true };

FIXTURE_SETUP(move_pages)
{
	self->gup_fd = -1;
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	area_alloc(_metadata, &self->area, 1, NR_LARGE, NR_SMALL);
}

FIXTURE_TEARDOWN(move_pages)
{
	if (self->gup_fd >= 0)
		close(self->gup_fd);
	area_free(&self->area);
	area_free(&self->hog);
	teardown(_metadata);
}

struct request {
	void *page;
	int node;
	int status;		/* expected */
};

/* @ret and @err: what move_pages() is to return, and errno if that is -1. */
static void check_request(struct __test_metadata *_metadata,
			  const struct request *request, unsigned int nr,
			  long ret, int err)
{
	void *pages[32];
	int nodes[32], status[32];
	unsigned int i;

	ASSERT_LE(nr, 32);
	for (i = 0; i < nr; i++) {
		pages[i] = request[i].page;
		nodes[i] = request[i].node;
		status[i] = UNTOUCHED;
	}
	errno = 0;
	ASSERT_EQ(move_pages(0, nr, pages, nodes, status, MPOL_MF_MOVE_ALL),
		  ret);
	ASSERT_EQ(errno, err);
	for (i = 0; i < nr; i++) {
		ASSERT_EQ(status[i], request[i].status) {
			TH_LOG("status %u", i);
		}
	}
}

static void check_page_node(struct __test_metadata *_metadata,
			    struct area *area, unsigned int i, int nid)
{
	void *page = page_addr(area, i);
	int status = UNTOUCHED;

	ASSERT_EQ(move_pages(0, 1, &page, NULL, &status, 0), 0);
	ASSERT_EQ(status, nid) {
		TH_LOG("page %u", i);
	}
}

static unsigned int first_small(const struct area *area)
{
	return area->nr_pmd + area->nr_large;
}

/* The second time it is in a list already, later it is where it should be. */
TEST_F(move_pages, duplicates)
{
	unsigned int s = first_small(&self->area);
	char *a = page_addr(&self->area, s), *b = a + pagesize;
	const struct request request[] = {
		{ a, node[1], node[1] },
		{ a, node[1], -EBUSY },
		{ b, node[1], node[1] },
		{ a, node[1], node[1] },
		{ a, node[0], node[0] },
		{ b, node[1], node[1] },
	};

	check_request(_metadata, request, ARRAY_SIZE(request), 0, 0);
	check_page_node(_metadata, &self->area, s, node[0]);
	check_page_node(_metadata, &self->area, s + 1, node[1]);
	check_contents(_metadata, &self->area);
}

/* All of a folio goes along with any page of it. */
TEST_F(move_pages, pages_of_one_folio)
{
	struct area *area = &self->area;
	unsigned int l = area->nr_pmd, n = area->nr_pmd - 1;
	const struct request request[] = {
		{ page_addr(area, 5), node[1], node[1] },
		{ page_addr(area, 0), node[1], -EBUSY },
		{ page_addr(area, n), node[1], node[1] },
		{ page_addr(area, l + 3) + 1, node[1], node[1] },
		{ page_addr(area, l + 2), node[1], -EBUSY },
		{ page_addr(area, l), node[1], node[1] },
	};
	unsigned int i;

	check_request(_metadata, request, ARRAY_SIZE(request), 0, 0);
	get_nodes(area);
	for (i = 0; i < area->nr_pages; i++)
		ASSERT_EQ(area->nodes[i],
			  node[i < area->nr_pmd + LARGE_PAGES]);
	check_contents(_metadata, area);
}

TEST_F(move_pages, not_there)
{
	struct area *area = &self->area;
	unsigned int s = first_small(area);
	char *none = reserve(pmdsize), *zero = reserve(pmdsize), *huge;
	struct request request[] = {
		{ page_addr(area, s), node[1], node[1] },
		{ none, node[1], -ENOENT },		/* nothing there */
		{ page_addr(area, s + 1), node[1], node[1] },
		{ NULL, node[1], -EFAULT },		/* no mapping */
		{ page_addr(area, s + 2), node[1], node[1] },
		{ zero, node[1], -EFAULT },		/* the zero page */
		{ page_addr(area, s + 3), node[1], -ENOENT },
		{ page_addr(area, s + 4), node[1], node[1] },
		{ NULL, node[1], -EFAULT },		/* the huge one */
	};
	char *hole = reserve(pmdsize);

	ASSERT_EQ(munmap(hole, pmdsize), 0);
	request[3].page = hole;
	ASSERT_EQ(map_anon(zero, pagesize), zero);
	FORCE_READ(*zero);
	ASSERT_EQ(madvise(page_addr(area, s + 3), pagesize, MADV_DONTNEED), 0);

	huge = reserve(pmdsize);
	ASSERT_EQ(map_anon(huge, pmdsize), huge);
	ASSERT_EQ(madvise(huge, pmdsize, MADV_HUGEPAGE), 0);
	set_thp(pmdsize, "madvise");
	FORCE_READ(*huge);
	set_thp(pmdsize, "never");
	request[8].page = huge + pagesize;

	check_request(_metadata, request, ARRAY_SIZE(request), 0, 0);
	write_page(area, s + 3);
	check_contents(_metadata, area);
}

/* What comes before it is moved, what comes after it is not looked at. */
static void check_bad_node(struct __test_metadata *_metadata,
			   struct area *area, int bad, int err)
{
	unsigned int s = first_small(area);
	const struct request request[] = {
		{ page_addr(area, s), node[1], node[1] },
		{ page_addr(area, s + 1), node[1], node[1] },
		{ page_addr(area, s + 2), bad, UNTOUCHED },
		{ page_addr(area, s + 3), node[1], UNTOUCHED },
	};
	unsigned int i;

	check_request(_metadata, request, ARRAY_SIZE(request), -1, err);
	for (i = 0; i < ARRAY_SIZE(request); i++)
		check_page_node(_metadata, area, s + i, node[i < 2]);
	move_all(_metadata, area, node[0]);
}

TEST_F(move_pages, wrong_node)
{
	check_bad_node(_metadata, &self->area, -1, ENODEV);
	check_bad_node(_metadata, &self->area, 1 << 20, ENODEV);
	check_bad_node(_metadata, &self->area, INT_MIN, ENODEV);
	/* There could be such a node, but there is none. */
	check_bad_node(_metadata, &self->area, numa_max_node() + 1, ENODEV);
	check_contents(_metadata, &self->area);
}

TEST_F(move_pages, cpuset)
{
	unsigned int s = first_small(&self->area);
	const struct request request[] = {
		{ page_addr(&self->area, s), node[0], node[0] },
		{ page_addr(&self->area, s + 1), node[1], UNTOUCHED },
		{ page_addr(&self->area, s + 2), node[0], UNTOUCHED },
	};
	char value[16];

	if (!enter_cgroup(_metadata, "cpuset"))
		return;
	snprintf(value, sizeof(value), "%d", node[0]);
	ASSERT_TRUE(cgroup_write("cpuset.mems", value));
	check_request(_metadata, request, ARRAY_SIZE(request), -1, EACCES);
	ASSERT_EQ(nr_on_node(&self->area, node[0]), self->area.nr_pages);

	snprintf(value, sizeof(value), "%d,%d", node[0], node[1]);
	ASSERT_TRUE(cgroup_write("cpuset.mems", value));
	bounce(_metadata, &self->area);
}

/*
 * What cannot be moved ends the call: the rest is not looked at, and all of it
 * counts as not moved.
 */
TEST_F(move_pages, pinned)
{
	struct area *area = &self->area;
	unsigned int s = first_small(area);
	struct pin_longterm_test pin = {
		.addr = (uintptr_t)page_addr(area, s + 1),
		.size = pagesize,
		.flags = PIN_LONGTERM_TEST_FLAG_USE_WRITE,
	};
	const struct request last[] = {
		{ page_addr(area, s), node[1], UNTOUCHED },
		{ page_addr(area, s + 1), node[1], UNTOUCHED },
		{ page_addr(area, s + 2), node[1], UNTOUCHED },
	};
	const struct request first[] = {
		{ page_addr(area, s + 3), node[1], node[1] },
		{ page_addr(area, s + 3), node[0], node[0] },
		{ page_addr(area, s + 1), node[1], UNTOUCHED },
		{ page_addr(area, s + 1), node[0], UNTOUCHED },
		{ page_addr(area, s + 4), node[1], UNTOUCHED },
		{ page_addr(area, s + 5), node[1], UNTOUCHED },
	};
	const struct request large[] = {
		{ page_addr(area, s), node[1], UNTOUCHED },
		{ page_addr(area, 0), node[1], UNTOUCHED },
		{ page_addr(area, s + 1), node[1], UNTOUCHED },
	};
	unsigned int i;

	self->gup_fd = open(GUP_TEST_PATH, O_RDWR);
	if (self->gup_fd < 0)
		SKIP(return, "no " GUP_TEST_PATH);
	ASSERT_EQ(ioctl(self->gup_fd, PIN_LONGTERM_TEST_START, &pin), 0);

	/* All of one list: the others are moved, but nobody says so. */
	check_request(_metadata, last, ARRAY_SIZE(last), 1, 0);
	check_page_node(_metadata, area, s, node[1]);
	check_page_node(_metadata, area, s + 1, node[0]);
	check_page_node(_metadata, area, s + 2, node[1]);

	check_request(_metadata, first, ARRAY_SIZE(first), 4, 0);
	check_page_node(_metadata, area, s + 1, node[0]);
	check_page_node(_metadata, area, s + 4, node[0]);
	check_page_node(_metadata, area, s + 5, node[0]);

	ASSERT_EQ(ioctl(self->gup_fd, PIN_LONGTERM_TEST_STOP), 0);
	bounce(_metadata, area);

	/* One page of it keeps all of a folio. */
	pin.addr = (uintptr_t)page_addr(area, 7);
	ASSERT_EQ(ioctl(self->gup_fd, PIN_LONGTERM_TEST_START, &pin), 0);
	check_request(_metadata, large, ARRAY_SIZE(large), 1, 0);
	check_page_node(_metadata, area, s, node[1]);
	for (i = 0; i < area->nr_pmd; i++)
		check_page_node(_metadata, area, i, node[0]);
	check_page_node(_metadata, area, s + 1, node[1]);
	ASSERT_EQ(ioctl(self->gup_fd, PIN_LONGTERM_TEST_STOP), 0);
	bounce(_metadata, area);
	check_not_isolated(_metadata);
}

static unsigned long long node_bytes(int nid, const char *name)
{
	char path[64], line[64];

	snprintf(path, sizeof(path), NODE_DIR "node%d/meminfo", nid);
	snprintf(line, sizeof(line), "Node %d %s:", nid, name);
	return (unsigned long long)read_stat(path, line) << 10;
}

/* Memory that compaction does not move away, on @nid if there is any. */
static void hog_memory(struct __test_metadata *_metadata, char *start,
		       size_t len, int nid)
{
	numa_set_preferred(nid);
	ASSERT_EQ(map_anon(start, len), start);
	ASSERT_EQ(madvise(start, len, MADV_HUGEPAGE), 0);
	ASSERT_EQ(mlock(start, len), 0);
	numa_set_preferred(node[0]);
}

/* Fill node[1], but for what the kernel keeps for itself. */
static bool fill_node(struct __test_metadata *_metadata, struct area *hog,
		      size_t small)
{
	unsigned long long total = node_bytes(node[1], "MemTotal");
	unsigned long before, now;
	size_t len, pos = small;
	unsigned int i;
	long ret;

	if (total > FULL_MAX_BYTES)
		SKIP(return false, "node %d is too large to fill", node[1]);
	if (!change_setting(COMPACT_PATH, "0"))
		SKIP(return false, "no " COMPACT_PATH);

	len = total + small + 3 * FULL_CHUNK;
	area_init(hog, reserve(len), 0, 0, len / pagesize);
	/* So much of it in base pages. */
	hog_memory(_metadata, hog->start, small, node[1]);

	set_thp(pmdsize, "madvise");
	now = node_bytes(node[1], "MemFree");
	do {
		before = now;
		hog_memory(_metadata, hog->start + pos, FULL_CHUNK, node[1]);
		pos += FULL_CHUNK;
		now = node_bytes(node[1], "MemFree");
	} while (now > FULL_CHUNK / 2 && now < before && pos < total);
	set_thp(pmdsize, "never");

	/*
	 * To be moved there takes what other allocations leave alone, which is
	 * little if nobody has asked for more, as khugepaged does.
	 */
	if (!change_setting(MIN_FREE_PATH, "4096"))
		SKIP(return false, "no " MIN_FREE_PATH);
	do {
		ASSERT_LE(pos + FULL_CHUNK, len);
		hog_memory(_metadata, hog->start + pos, FULL_CHUNK, node[0]);
		for (i = 0; i < FULL_CHUNK / pagesize; i++)
			hog->pages[i] = hog->start + pos + i * pagesize;
		pos += FULL_CHUNK;
		ret = move_listed(hog, i, node[1]);
	} while (ret >= 0);
	check_moved(_metadata, ret);
	return true;
}

/* Free every second page of a part of the base pages: none of it is large. */
static void free_small_pages(struct __test_metadata *_metadata,
			     struct area *hog, unsigned int part)
{
	unsigned int i, n = 2 * FULL_LEAVE / pagesize;

	for (i = part * n; i < (part + 1) * n; i += 2)
		ASSERT_EQ(madvise(page_addr(hog, i), pagesize,
				  MADV_DONTNEED_LOCKED), 0);
}

/*
 * Folios that find no place as a whole are split: their pages may. If there was
 * more room than it seemed, since CPUs keep pages for themselves, other folios
 * are next.
 */
TEST_F_TIMEOUT(move_pages, target_full, TIMEOUT_S)
{
	unsigned long split = read_vmstat("thp_migration_split ");
	unsigned int n = pmdsize / pagesize, i, k, t, nr_partly = 0, freed = 0;
	struct area *area = &self->area;
	long ret = -1;

	area_free(area);
	if (!area_alloc(_metadata, area, FULL_TRIES * FULL_THPS, 0, 0) ||
	    !fill_node(_metadata, &self->hog, FULL_TRIES * 2 * FULL_LEAVE))
		return;

	for (t = 0; t < FULL_TRIES && !nr_partly; t++) {
		char *start = area->start + t * FULL_THPS * pmdsize;

		if (ret)
			free_small_pages(_metadata, &self->hog, freed++);
		for (k = 0; k < FULL_THPS; k++)
			area->pages[k] = start + k * pmdsize;
		ret = move_listed(area, FULL_THPS, node[1]);
		ASSERT_GE(ret, 0);
		ASSERT_LE(ret, FULL_THPS);
		for (k = 0; k < FULL_THPS; k++)
			ASSERT_EQ(area->status[k], ret ? -1 : node[1]);

		get_nodes(area);
		for (k = t * FULL_THPS; k < (t + 1) * FULL_THPS; k++) {
			unsigned int nr = 0;

			for (i = 0; i < n; i++)
				nr += area->nodes[k * n + i] == node[1];
			nr_partly += nr && nr < n;
		}
		if (nr_partly) {
			ASSERT_GE(ret, 1);
		} else {
			TH_LOG("of %u large folios, %ld were not moved whole, none in part",
			       FULL_THPS, ret);
		}
	}
	ASSERT_GT(nr_partly, 0);
	ASSERT_GE(read_vmstat("thp_migration_split "), split + 1);
	check_contents(_metadata, area);

	area_free(&self->hog);
	bounce(_metadata, area);
	check_not_isolated(_metadata);
}

/* What is counted, and for whom, is the same after many moves. */

FIXTURE(migrate_counts)
{
	struct area area;
};

FIXTURE_VARIANT(migrate_counts)
{
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_counts, off) { };
FIXTURE_VARIANT_ADD(migrate_counts, mt) { .mt = true };

FIXTURE_SETUP(migrate_counts)
{
	setup(_metadata, variant->mt);
}

FIXTURE_TEARDOWN(migrate_counts)
{
	area_free(&self->area);
	teardown(_metadata);
}

/* An even number of times, so that they are where they were. */
static void move_often(struct __test_metadata *_metadata, struct area *area)
{
	unsigned long nr_moved = read_vmstat("pgmigrate_success ");
	unsigned int i, nr, nr_folios = 0, round = 0;

	while (nr_folios < NR_MOVES || round % 2) {
		nr = 0;
		for (i = 0; i < area->nr_pages; i += folio_pages(area, i))
			area->pages[nr++] = page_addr(area, i);
		ASSERT_GE(move_listed(area, nr, node[++round % 2]), 0);
		nr_folios += nr;
	}
	nr_moved = read_vmstat("pgmigrate_success ") - nr_moved;
	ASSERT_GE(nr_moved, (round - 2) * area->nr_pages);
	move_all(_metadata, area, node[0]);
	check_contents(_metadata, area);
	check_not_isolated(_metadata);
}

static const char * const memcg_stats[] = {
	"anon ", "anon_thp ", "file ", "shmem ", "unevictable ",
};

/* NULL if all is as in @stat, else what is not. */
static const char *memcg_stat_changed(const unsigned long *stat)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(memcg_stats); i++)
		if (cgroup_stat("memory.stat", memcg_stats[i]) != stat[i])
			return memcg_stats[i];
	return NULL;
}

TEST_F_TIMEOUT(migrate_counts, memcg, TIMEOUT_S)
{
	unsigned long stat[ARRAY_SIZE(memcg_stats)] = {}, charge, mlocked;
	struct area *area = &self->area;
	unsigned int i, tries = 0;
	const char *changed;

	if (!enter_cgroup(_metadata, "memory") ||
	    !area_alloc(_metadata, area, 1, NR_LARGE, NR_SMALL))
		return;
	ASSERT_EQ(mlock(area->start, area->nr_pages * pagesize), 0);
	/* What we need to look and to move is ours from now on. */
	bounce(_metadata, area);
	memcg_stat_changed(stat);
	drain_lru_caches();
	write_num(STAT_REFRESH_PATH, 1);
	mlocked = read_stat("/proc/meminfo", "Mlocked:");
	/* The counts are gathered every two seconds. */
	sleep(3);
	charge = cgroup_read("memory.current");
	for (i = 0; i < ARRAY_SIZE(memcg_stats); i++)
		stat[i] = cgroup_stat("memory.stat", memcg_stats[i]);
	ASSERT_GE(stat[0], area->nr_pages * pagesize);
	ASSERT_GE(stat[4], area->nr_pages * pagesize);

	move_often(_metadata, area);

	drain_lru_caches();
	write_num(STAT_REFRESH_PATH, 1);
	while ((changed = memcg_stat_changed(stat)) && tries++ < MAX_TRIES)
		usleep(50000);
	ASSERT_EQ(changed, NULL) {
		TH_LOG("%schanged", changed);
	}
	ASSERT_LT(cgroup_read("memory.current"), charge + CHARGE_TOLERANCE);
	ASSERT_GT(cgroup_read("memory.current") + CHARGE_TOLERANCE, charge);
	ASSERT_EQ(read_stat("/proc/meminfo", "Mlocked:"), mlocked);
}

/* Pages that page_owner says were allocated by @function. */
static unsigned long owned_by(const char *function)
{
	FILE *fp = fopen(STACKS_PATH, "r");
	unsigned long nr, sum = 0;
	bool found = false;
	char line[256];

	if (!fp)
		ksft_exit_fail_perror(STACKS_PATH);
	while (fgets(line, sizeof(line), fp)) {
		found |= !!strstr(line, function);
		if (sscanf(line, "nr_base_pages: %lu", &nr) != 1)
			continue;
		if (found)
			sum += nr;
		found = false;
	}
	fclose(fp);
	return sum;
}

/* What page_owner knows of the first page of a folio: a few lines. */
static void read_owner(struct __test_metadata *_metadata, char *addr,
		       char *record, size_t len)
{
	unsigned long pfn = pagemap_get_pfn(pagemap_fd, addr);
	int fd = open(PAGE_OWNER_PATH, O_RDONLY);
	char name[32];
	ssize_t ret;

	ASSERT_GE(fd, 0);
	ASSERT_GE(lseek(fd, pfn, SEEK_SET), 0);
	ret = read(fd, record, len - 1);
	ASSERT_GT(ret, 0);
	record[ret] = '\0';
	close(fd);
	snprintf(name, sizeof(name), "\nPFN 0x%lx ", pfn);
	ASSERT_NE(strstr(record, name), NULL);
}

/* A page belongs to who allocated it first, and only to him. */
TEST_F_TIMEOUT(migrate_counts, page_owner, TIMEOUT_S)
{
	struct area *area = &self->area;
	char before[4096], after[4096], *end;
	unsigned long copies, faults;
	unsigned int i, k;

	if (access(PAGE_OWNER_PATH, R_OK) || access(STACKS_PATH, R_OK))
		SKIP(return, "no " PAGE_OWNER_PATH ": boot with page_owner=on");
	if (!area_alloc(_metadata, area, 1, NR_LARGE, NR_SMALL))
		return;
	move_all(_metadata, area, node[0]);
	copies = owned_by("alloc_migration_target");
	faults = owned_by("do_anonymous_page");
	ASSERT_GE(faults, area->nr_large + NR_SMALL);

	for (i = 0, k = 0; i < area->nr_pages; i += folio_pages(area, i), k++) {
		char *addr = page_addr(area, i);

		/* Of each size. */
		if (k && k % 50 != 4)
			continue;
		read_owner(_metadata, addr, before, sizeof(before));
		/* To the end of the line: who, and when. */
		end = strchr(before, '\n');
		ASSERT_NE(end, NULL);
		*end = '\0';
		ASSERT_NE(strstr(before, "pid "), NULL);
		move_often(_metadata, area);
		read_owner(_metadata, addr, after, sizeof(after));
		ASSERT_EQ(strncmp(before, after, strlen(before)), 0) {
			TH_LOG("page %u: %s, then %s", i, before, after);
		}
		ASSERT_EQ(strstr(after, "alloc_migration_target"), NULL);
		ASSERT_NE(strstr(after, "last migrate reason: syscall"), NULL);
	}
	ASSERT_EQ(owned_by("alloc_migration_target"), copies);
	ASSERT_LT(owned_by("do_anonymous_page"), faults + NR_MOVES / 2);
	ASSERT_GT(owned_by("do_anonymous_page") + NR_MOVES / 2, faults);
}

/* Bytes that allocation profiling says were allocated there. */
static unsigned long tagged(const char *where)
{
	FILE *fp = fopen(ALLOCINFO_PATH, "r");
	unsigned long sum = 0;
	char line[512];

	if (!fp)
		ksft_exit_fail_perror(ALLOCINFO_PATH);
	while (fgets(line, sizeof(line), fp))
		if (strstr(line, where))
			sum += strtoul(line, NULL, 10);
	fclose(fp);
	return sum;
}

static unsigned long tagged_faults(void)
{
	return tagged(" mm/memory.c:") + tagged(" mm/huge_memory.c:");
}

TEST_F_TIMEOUT(migrate_counts, allocation_tags, TIMEOUT_S)
{
	unsigned long copies, faults, bytes;
	struct area *area = &self->area;

	if (access(ALLOCINFO_PATH, R_OK) || !read_num(PROFILING_PATH))
		SKIP(return, "no " ALLOCINFO_PATH ", or it is off");
	faults = tagged_faults();
	if (!area_alloc(_metadata, area, 1, NR_LARGE, NR_SMALL))
		return;
	bytes = area->nr_pages * pagesize;
	move_all(_metadata, area, node[0]);
	copies = tagged("func:alloc_migration_target");
	/* Others have faults, too, but not as many. */
	ASSERT_GT(tagged_faults(), faults + bytes / 2);

	faults = tagged_faults();
	move_often(_metadata, area);
	ASSERT_EQ(tagged("func:alloc_migration_target"), copies);
	ASSERT_LT(tagged_faults(), faults + bytes / 2);
	ASSERT_GT(tagged_faults() + bytes / 2, faults);
}

/* Pages that are moved while another thread changes what they are. */

struct race {
	struct area *area;
	char *spare;		/* address space of the same size */
	unsigned int seed;
	unsigned int pause_us;	/* between rounds */
	atomic_bool stop;
	atomic_ulong nr_done;
	atomic_ulong nr_wrong;
	atomic_int err;
	int fd;
	int node;		/* where it runs */
	const char *path;
};

static bool race_is_over(const struct race *race)
{
	if (race->pause_us)
		usleep(race->pause_us);
	return race->err || race->nr_wrong || atomic_load(&race->stop);
}

static void race_start(struct __test_metadata *_metadata, struct race *race,
		       struct area *area, pthread_t *thread,
		       void *(*fn)(void *))
{
	race->area = area;
	race->seed++;
	race->nr_done = 0;
	ASSERT_EQ(racer_start(thread, fn, race, &race->stop), 0);
}

static void race_stop(struct __test_metadata *_metadata, struct race *race,
		      pthread_t thread)
{
	ASSERT_EQ(racer_stop(thread), 0);
	ASSERT_EQ(race->err, 0) {
		TH_LOG("%s", strerror(race->err));
	}
	ASSERT_EQ(race->nr_wrong, 0);
	ASSERT_GT(race->nr_done, 0);
}

/* Until @race has done @nr rounds as well. */
static void move_for(struct __test_metadata *_metadata, struct area *area,
		     struct race *race, unsigned long nr)
{
	unsigned long before = area->moves;
	uint64_t start = now_ns(), now;
	bool moved = false;
	int target;

	do {
		target = node[(area->moves + 1) % 2];
		check_moved(_metadata, move_some(area, target));
		/* They were, and new ones are, on node[0]. */
		if (target == node[1] && !moved)
			moved = nr_on_node(area, target);
		/* Who waits for a page that is always being moved gets it. */
		if (atomic_load(&race->nr_done) < nr)
			usleep(1000);
		now = now_ns() - start;
		if (race->err || race->nr_wrong)
			break;
		ASSERT_LT(now, RACE_MAX_NS);
	} while (now < RACE_NS || area->moves - before < RACE_MOVES ||
		 atomic_load(&race->nr_done) < nr);
	ASSERT_TRUE(moved);
}

/* Adds to the counters of all pages: they may not go away meanwhile. */
static void *count_in_pages(void *arg)
{
	struct race *race = arg;
	unsigned int i;

	do {
		for (i = 0; i < race->area->nr_pages; i++)
			__atomic_fetch_add(page_counter(race->area, i), 1,
					   __ATOMIC_RELAXED);
		race->nr_done++;
	} while (!race_is_over(race));
	return NULL;
}

static void check_counters(struct __test_metadata *_metadata,
			   const struct area *area, unsigned long expected)
{
	unsigned int i;

	for (i = 0; i < area->nr_pages; i++) {
		ASSERT_EQ(*page_counter(area, i), expected) {
			TH_LOG("page %u", i);
		}
	}
}

static unsigned int next_chunk(struct race *race, unsigned int *first)
{
	unsigned int nr = rand_r(&race->seed) % MAX_CHUNK + 1;

	*first = rand_r(&race->seed) % (race->area->nr_pages - nr + 1);
	return nr;
}

static void write_chunk(struct race *race, unsigned int first, unsigned int nr)
{
	unsigned int i;

	for (i = first; i < first + nr; i++)
		write_page(race->area, i);
	race->nr_wrong += nr_wrong(race->area, first, nr);
}

FIXTURE(migrate_races)
{
	struct area area;
	struct race race;
	struct race counting;
	int kmsg_fd;
};

FIXTURE_VARIANT(migrate_races)
{
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_races, off) { };
FIXTURE_VARIANT_ADD(migrate_races, mt) { .mt = true };

FIXTURE_SETUP(migrate_races)
{
	self->kmsg_fd = -1;
	self->race.fd = -1;
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	if (!area_alloc(_metadata, &self->area, 1, NR_LARGE, NR_SMALL))
		return;
	self->race.spare = reserve(self->area.nr_pages * pagesize);
}

/* Also the poisoned pages, which the log tells. */
static unsigned int unpoison_pages(struct __test_metadata *_metadata,
				   int kmsg_fd)
{
	unsigned int nr = 0;
	char line[8192], *found;
	unsigned long pfn;
	uint64_t flags;
	ssize_t len;

	/* EPIPE: some of it has been overwritten. */
	while ((len = read(kmsg_fd, line, sizeof(line) - 1)) > 0 ||
	       (len < 0 && errno == EPIPE)) {
		if (len < 0)
			continue;
		line[len] = '\0';
		found = strstr(line, "Injecting memory failure for pfn ");
		if (!found || sscanf(found + 33, "%lx", &pfn) != 1)
			continue;
		if (pageflags_get(pfn, kpageflags_fd, &flags) ||
		    !(flags & KPF_HWPOISON))
			continue;
		nr++;
		EXPECT_EQ(unpoison_memory(pfn), 0) {
			TH_LOG("page %#lx stays poisoned", pfn);
		}
	}
	return nr;
}

FIXTURE_TEARDOWN(migrate_races)
{
	if (self->race.fd >= 0)
		close(self->race.fd);
	area_free(&self->area);
	if (self->kmsg_fd >= 0) {
		unpoison_pages(_metadata, self->kmsg_fd);
		close(self->kmsg_fd);
	}
	teardown(_metadata);
}

/*
 * Several times, since what was large may soon not be any more. With @counting,
 * there are writes to all pages all the time.
 */
static void run_races(struct __test_metadata *_metadata, struct race *race,
		      struct race *counting, struct area *area,
		      void *(*fn)(void *))
{
	pthread_t thread, counting_thread;
	unsigned int i;

	for (i = 0; i < RACES; i++) {
		if (i) {
			area_free(area);
			if (!area_alloc(_metadata, area, 1, NR_LARGE, NR_SMALL))
				return;
		}
		if (counting)
			race_start(_metadata, counting, area, &counting_thread,
				   count_in_pages);
		race_start(_metadata, race, area, &thread, fn);
		move_for(_metadata, area, race, 2);
		race_stop(_metadata, race, thread);
		check_contents(_metadata, area);
		bounce(_metadata, area);
		if (counting) {
			race_stop(_metadata, counting, counting_thread);
			check_counters(_metadata, area, counting->nr_done);
		}
		check_not_isolated(_metadata);
	}
}

/* A child sees what there was when it was made, however long it looks at it. */
static void *fork_children(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int i;
	pid_t pid;

	while (!race_is_over(race)) {
		int status = -1;

		pid = fork();
		if (!pid) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (i = 0; i < 2; i++)
				if (nr_wrong(area, 0, area->nr_pages))
					_exit(1);
			_exit(0);
		}
		if (pid < 0) {
			race->err = errno;
			break;
		}
		for (i = race->nr_done % 3; i < area->nr_pages; i += 3)
			write_page(area, i);
		if (waitpid(pid, &status, 0) != pid)
			race->err = errno;
		race->nr_wrong += !WIFEXITED(status) || WEXITSTATUS(status);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, fork, TIMEOUT_S)
{
	run_races(_metadata, &self->race, &self->counting, &self->area,
		  fork_children);
}

static void *change_rights(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int i, first, nr;

	while (!race_is_over(race)) {
		nr = next_chunk(race, &first);
		if (mprotect(page_addr(area, first), nr * pagesize, PROT_READ))
			race->err = errno;
		for (i = first; i < first + nr; i++)
			if (try_write(page_addr(area, i)) != SIGSEGV)
				race->nr_wrong++;
		race->nr_wrong += nr_wrong(area, first, nr);
		if (mprotect(page_addr(area, first), nr * pagesize, PROT_NONE))
			race->err = errno;
		race->nr_wrong += try_read(page_addr(area, first)) != SIGSEGV;
		if (mprotect(page_addr(area, first), nr * pagesize,
			     PROT_READ | PROT_WRITE))
			race->err = errno;
		write_chunk(race, first, nr);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, mprotect, TIMEOUT_S)
{
	run_races(_metadata, &self->race, NULL, &self->area, change_rights);
}

/* False if the pages could not be brought there. */
static bool remap(char *from, char *to, size_t len)
{
	return mremap(from, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to;
}

static void *remap_pages(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int i, first, nr;

	while (!race_is_over(race)) {
		size_t offset, len;

		nr = next_chunk(race, &first);
		/* Every now and then by PMD. */
		if (race->nr_done % 8 == 0) {
			first = 0;
			nr = area->nr_pmd;
		}
		offset = first * pagesize;
		len = nr * pagesize;
		if (!remap(area->start + offset, race->spare + offset, len)) {
			race->err = errno;
			break;
		}
		for (i = first; i < first + nr; i++) {
			char *addr = race->spare + i * pagesize;

			race->nr_wrong += !holds(addr, i, area->version[i]);
			fill(addr, i, ++area->version[i]);
		}
		if (!remap(race->spare + offset, area->start + offset, len)) {
			race->err = errno;
			break;
		}
		race->nr_wrong += nr_wrong(area, first, nr);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, mremap, TIMEOUT_S)
{
	run_races(_metadata, &self->race, NULL, &self->area, remap_pages);
}

static void *unmap_pages(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int first, nr;

	while (!race_is_over(race)) {
		char *addr;
		size_t len;

		nr = next_chunk(race, &first);
		addr = page_addr(area, first);
		len = nr * pagesize;
		if (munmap(addr, len) ||
		    mmap(addr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE |
			 MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != addr) {
			race->err = errno;
			break;
		}
		race->nr_wrong += nr_not_zero(area, first, nr);
		write_chunk(race, first, nr);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, munmap, TIMEOUT_S)
{
	run_races(_metadata, &self->race, NULL, &self->area, unmap_pages);
}

static void *discard_pages(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int first, nr;

	while (!race_is_over(race)) {
		nr = next_chunk(race, &first);
		if (madvise(page_addr(area, first), nr * pagesize,
			    MADV_DONTNEED))
			race->err = errno;
		race->nr_wrong += nr_not_zero(area, first, nr);
		write_chunk(race, first, nr);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, madv_dontneed, TIMEOUT_S)
{
	run_races(_metadata, &self->race, NULL, &self->area, discard_pages);
}

/* Split what is large and make it large again. */
static void *split_folios(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	char *end = page_addr(area, first_small(area));
	unsigned int order = 0;
	char request[64];
	int len;

	while (!race_is_over(race)) {
		len = snprintf(request, sizeof(request), "%d,0x%lx,0x%lx,%u",
			       getpid(), (unsigned long)area->start,
			       (unsigned long)end, order);
		if (pwrite(race->fd, request, len, 0) != len) {
			race->err = errno ?: EIO;
			break;
		}
		/* Best effort, as migration is. */
		if (!madvise(area->start, pmdsize, MADV_COLLAPSE)) {
			order = order ? 0 : 4;
			race->nr_done++;
		}
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, split, TIMEOUT_S)
{
	unsigned long split = read_vmstat("thp_split_page ");

	self->race.fd = open(SPLIT_PATH, O_WRONLY);
	if (self->race.fd < 0)
		SKIP(return, "no " SPLIT_PATH);
	run_races(_metadata, &self->race, &self->counting, &self->area,
		  split_folios);
	ASSERT_GE(read_vmstat("thp_split_page "), split + 2);
}

static void *poison_pages(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;

	while (!race_is_over(race)) {
		unsigned int i = rand_r(&race->seed) % area->nr_pages;
		char *addr = page_addr(area, i);
		int err, sig;

		if (race->nr_done == NR_POISONED) {
			usleep(10000);
			continue;
		}
		/* It is gone, or it could not be and is as it was. */
		err = try_poison(addr);
		sig = try_read(addr);
		race->nr_wrong += !err && sig != SIGBUS;
		race->nr_wrong += sig ? sig != SIGBUS : nr_wrong(area, i, 1);
		if (munmap(addr, pagesize) || map_anon(addr, pagesize) != addr)
			race->err = errno;
		write_page(area, i);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, madv_hwpoison, TIMEOUT_S)
{
	struct area *area = &self->area;
	pthread_t thread;
	unsigned int nr;

	if (madvise(NULL, 0, MADV_HWPOISON))
		SKIP(return, "MADV_HWPOISON not supported");
	if (access(UNPOISON_PATH, W_OK))
		SKIP(return, "no " UNPOISON_PATH);
	self->kmsg_fd = open("/dev/kmsg", O_RDONLY | O_NONBLOCK);
	if (self->kmsg_fd < 0)
		SKIP(return, "no /dev/kmsg");
	ASSERT_GE(lseek(self->kmsg_fd, 0, SEEK_END), 0);

	race_start(_metadata, &self->race, area, &thread, poison_pages);
	move_for(_metadata, area, &self->race, NR_POISONED);
	race_stop(_metadata, &self->race, thread);
	check_contents(_metadata, area);
	area_free(area);
	nr = unpoison_pages(_metadata, self->kmsg_fd);
	ASSERT_GT(nr, NR_POISONED / 2);
	check_not_isolated(_metadata);
}

/*
 * What is written after MADV_FREE is there to stay, and that is known from the
 * dirty bits of the page tables alone: reclaim finds out who has lost them.
 */
static void *free_and_rewrite(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int i, first, nr;

	while (!race_is_over(race)) {
		nr = next_chunk(race, &first);
		if (madvise(page_addr(area, first), nr * pagesize, MADV_FREE))
			race->err = errno;
		/* Some pages of a folio at first: each is dirty by itself. */
		for (i = first; i < first + nr; i += 2)
			write_page(area, i);
		if (race->nr_done % 2)
			usleep(1000);
		if (madvise(page_addr(area, first), nr * pagesize,
			    MADV_PAGEOUT))
			race->err = errno;
		for (i = first; i < first + nr; i += 2)
			race->nr_wrong += nr_wrong(area, i, 1);
		for (i = first + 1; i < first + nr; i += 2)
			write_page(area, i);
		race->nr_wrong += nr_wrong(area, first, nr);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, madv_free, TIMEOUT_S)
{
	unsigned int i;

	/* To where it is written when it is found to be dirty. */
	if (!swap_on(_metadata))
		return;
	/* All at once and alone, before others come into it. */
	ASSERT_EQ(madvise(self->area.start, self->area.nr_pages * pagesize,
			  MADV_FREE), 0);
	for (i = 0; i < self->area.nr_pages; i += 3)
		write_page(&self->area, i);
	move_all(_metadata, &self->area, node[1]);
	ASSERT_EQ(madvise(self->area.start, self->area.nr_pages * pagesize,
			  MADV_PAGEOUT), 0);
	for (i = 0; i < self->area.nr_pages; i += 3)
		ASSERT_EQ(nr_wrong(&self->area, i, 1), 0);
	write_pages(&self->area);

	run_races(_metadata, &self->race, NULL, &self->area, free_and_rewrite);
}

/* Most of it, in one go or in a few. */
static void swap_out(struct __test_metadata *_metadata, struct area *area)
{
	unsigned int tries = 0;

	do {
		ASSERT_LT(tries++, MAX_TRIES);
		ASSERT_EQ(madvise(area->start, area->nr_pages * pagesize,
				  MADV_PAGEOUT), 0);
	} while (nr_swapped(area) < area->nr_pages * 3 / 4);
}

/* Swapped out and in again, whole folios and parts of them. */
static void *swap_pages(void *arg)
{
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int first, nr;

	while (!race_is_over(race)) {
		nr = next_chunk(race, &first);
		if (race->nr_done % 8 == 0) {
			first = 0;
			nr = area->nr_pages;
		}
		write_chunk(race, first, nr);
		if (madvise(page_addr(area, first), nr * pagesize,
			    MADV_PAGEOUT))
			race->err = errno;
		race->nr_wrong += nr_wrong(area, first, nr);
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_races, swap, TIMEOUT_S)
{
	unsigned long swapped = read_vmstat("pswpout ");

	if (!swap_on(_metadata))
		return;
	run_races(_metadata, &self->race, NULL, &self->area, swap_pages);
	ASSERT_GT(read_vmstat("pswpout "), swapped);

	/* What zram has made of it can be moved, too. */
	swap_out(_metadata, &self->area);
	write_num(COMPACT_NOW_PATH, 1);
	check_contents(_metadata, &self->area);
}

static unsigned int nr_in_swap_cache(const struct area *area)
{
	unsigned int i, nr = 0;

	for (i = 0; i < area->nr_pages; i++)
		nr += !!(page_flags(page_addr(area, i)) & KPF_SWAPCACHE);
	return nr;
}

/*
 * Swapped out, and then read by the parent alone: pages are in the swap cache
 * as long as the child has not read them, and it has to find them there.
 */
TEST_F_TIMEOUT(migrate_races, swap_cache, TIMEOUT_S)
{
	struct area *area = &self->area;
	unsigned int i, nr;
	int go[2], status;
	pid_t pid;
	char c;

	if (!swap_on(_metadata))
		return;
	swap_out(_metadata, area);
	ASSERT_EQ(pipe(go), 0);
	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (read(go[0], &c, 1) != 1)
			_exit(2);
		_exit(!!nr_wrong(area, 0, area->nr_pages));
	}
	force_read_pages(area->start, area->nr_pages, pagesize);
	nr = nr_in_swap_cache(area);
	ASSERT_GT(nr, area->nr_pages / 2);

	bounce(_metadata, area);
	move_all(_metadata, area, node[1]);
	/* Those that are being moved by others have no flags just now. */
	for (i = 0; nr_in_swap_cache(area) < nr && i < MAX_TRIES; i++)
		usleep(10000);
	ASSERT_LT(i, MAX_TRIES);
	/* Once more from swap, where that is not stale. */
	ASSERT_EQ(madvise(area->start, area->nr_pages * pagesize, MADV_PAGEOUT),
		  0);
	check_contents(_metadata, area);
	move_all(_metadata, area, node[0]);
	write_pages(area);
	check_contents(_metadata, area);

	ASSERT_EQ(write(go[1], "", 1), 1);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_TRUE(WIFEXITED(status));
	ASSERT_EQ(WEXITSTATUS(status), 0);
	bounce(_metadata, area);
	check_not_isolated(_metadata);
}

/* A directory of our own, on a tmpfs, for what has to be mounted. */

static char dir[32];
static bool dir_exists, dir_is_mounted;

static bool dir_mount(struct __test_metadata *_metadata, const char *options)
{
	snprintf(dir, sizeof(dir), "/tmp/migrate_races_XXXXXX");
	if (!mkdtemp(dir))
		SKIP(return false, "no directory in /tmp");
	dir_exists = true;
	if (mount("tmpfs", dir, "tmpfs", 0, options))
		SKIP(return false, "no tmpfs of %s: %s", options,
		     strerror(errno));
	dir_is_mounted = true;
	return true;
}

/* A page, or a device, that was in use a moment ago keeps it busy. */
static bool try_umount(const char *path)
{
	unsigned int tries = 0;

	while (umount(path)) {
		if (errno != EBUSY || ++tries == MAX_TRIES)
			return false;
		usleep(10000);
	}
	return true;
}

static void dir_umount(struct __test_metadata *_metadata)
{
	if (dir_is_mounted)
		EXPECT_TRUE(try_umount(dir));
	if (dir_exists)
		rmdir(dir);
}

static void map_file(struct __test_metadata *_metadata, struct area *area,
		     int fd)
{
	ASSERT_EQ(mmap(area->start, area->nr_pages * pagesize,
		       PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0),
		  area->start);
}

FIXTURE(migrate_tmpfs)
{
	struct area area;
	struct race race;
	int fd;
};

FIXTURE_VARIANT(migrate_tmpfs)
{
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_tmpfs, off) { };
FIXTURE_VARIANT_ADD(migrate_tmpfs, mt) { .mt = true };

FIXTURE_SETUP(migrate_tmpfs)
{
	self->fd = -1;
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	if (pmdsize > TMPFS_BYTES / 4)
		SKIP(return, "a PMD is of %zu bytes", pmdsize);
}

FIXTURE_TEARDOWN(migrate_tmpfs)
{
	area_free(&self->area);
	if (self->fd >= 0)
		close(self->fd);
	dir_umount(_metadata);
	teardown(_metadata);
}

/*
 * A file of huge pages, in a cgroup of our own, with swap. Not a part of the
 * setup: what that leaves when it fails, nobody takes away.
 */
static bool make_shmem(struct __test_metadata *_metadata, struct area *area,
		       int *fd)
{
	char path[64];

	if (!dir_mount(_metadata, "huge=always,size=64M") ||
	    !swap_on(_metadata) || !enter_cgroup(_metadata, "memory"))
		return false;
	snprintf(path, sizeof(path), "%s/file", dir);
	*fd = open(path, O_RDWR | O_CREAT, 0600);
	ASSERT_GE(*fd, 0);
	ASSERT_EQ(ftruncate(*fd, TMPFS_BYTES), 0);
	area_init(area, reserve(TMPFS_BYTES), TMPFS_BYTES / pagesize, 0, 0);
	map_file(_metadata, area, *fd);
	write_pages(area);
	if (!check_huge_shmem(area->start, TMPFS_BYTES, TMPFS_BYTES / pmdsize,
			      pmdsize))
		SKIP(return false, "could not allocate large folios");
	return true;
}

static void set_memory_limit(struct __test_metadata *_metadata,
			     const char *name, size_t limit)
{
	char value[32];

	snprintf(value, sizeof(value), "%zu", limit);
	ASSERT_TRUE(cgroup_write(name, value));
}

static void check_no_oom(struct __test_metadata *_metadata)
{
	ASSERT_EQ(cgroup_stat("memory.events", "oom "), 0);
	ASSERT_EQ(cgroup_stat("memory.events", "oom_kill "), 0);
}

/* At the limit: to move a folio does not take a charge for another one. */
TEST_F_TIMEOUT(migrate_tmpfs, at_limit, TIMEOUT_S)
{
	unsigned int i, n = pmdsize / pagesize;
	struct area *area = &self->area;
	unsigned long shmem;

	if (!make_shmem(_metadata, area, &self->fd))
		return;
	shmem = cgroup_stat("memory.stat", "shmem ");
	ASSERT_GE(shmem, TMPFS_BYTES);
	set_memory_limit(_metadata, "memory.max",
			 cgroup_read("memory.current") + pmdsize / 4);
	for (i = 1; i <= 6; i++) {
		unsigned int k;

		for (k = 0; k < area->nr_pages / n; k++)
			area->pages[k] = page_addr(area, k * n);
		ASSERT_EQ(move_listed(area, k, node[i % 2]), 0);
		ASSERT_EQ(nr_on_node(area, node[i % 2]), area->nr_pages);
		check_contents(_metadata, area);
	}
	ASSERT_TRUE(check_huge_shmem(area->start, TMPFS_BYTES,
				     TMPFS_BYTES / pmdsize, pmdsize));
	ASSERT_EQ(cgroup_stat("memory.stat", "shmem "), shmem);
	check_no_oom(_metadata);
	check_not_isolated(_metadata);
}

static void *write_and_read_file(void *arg)
{
	char *buf = alloc(MAX_CHUNK, pagesize);
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int i, first, nr;

	while (!race_is_over(race)) {
		ssize_t len;

		nr = next_chunk(race, &first);
		len = nr * pagesize;
		for (i = 0; i < nr; i++)
			fill(buf + i * pagesize, first + i,
			     ++area->version[first + i]);
		if (pwrite(race->fd, buf, len, first * pagesize) != len) {
			race->err = ENOSPC;
			break;
		}
		race->nr_wrong += nr_wrong(area, first, nr);
		nr = next_chunk(race, &first);
		len = nr * pagesize;
		if (pread(race->fd, buf, len, first * pagesize) != len) {
			race->err = EIO;
			break;
		}
		for (i = 0; i < nr; i++)
			race->nr_wrong += !holds(buf + i * pagesize, first + i,
						 area->version[first + i]);
		race->nr_done++;
	}
	free(buf);
	return NULL;
}

/*
 * Over the limit: some of the file is always swapped out. What is being moved
 * cannot be reclaimed, so that must not be much. The limit is memory.high, as
 * above memory.max who uses all of his memory all the time may be killed, with
 * or without migration.
 */
TEST_F_TIMEOUT(migrate_tmpfs, over_limit, TIMEOUT_S)
{
	struct area *area = &self->area;
	unsigned long swapped;
	pthread_t thread;
	size_t limit;

	if (!make_shmem(_metadata, area, &self->fd))
		return;
	swapped = read_vmstat("pswpout ");
	area->at_once = pmdsize / pagesize;
	limit = cgroup_read("memory.current") - TMPFS_BYTES / 4;
	set_memory_limit(_metadata, "memory.high", limit);
	ASSERT_GT(read_vmstat("pswpout "), swapped);

	self->race.fd = self->fd;
	race_start(_metadata, &self->race, area, &thread, write_and_read_file);
	move_for(_metadata, area, &self->race, 20);
	race_stop(_metadata, &self->race, thread);
	check_contents(_metadata, area);
	/* It may be exceeded for a moment; to write it makes room. */
	set_memory_limit(_metadata, "memory.high", limit);
	ASSERT_LE(cgroup_read("memory.current"), limit + pmdsize);
	check_no_oom(_metadata);

	set_memory_limit(_metadata, "memory.high", limit + TMPFS_BYTES);
	check_contents(_metadata, area);
	bounce(_metadata, area);
	check_not_isolated(_metadata);
}

/* Files that are written, written back, read and moved, all at once. */

struct disk {
	char dev[64];
	char mnt[64];
	bool is_mounted;
	int fd;			/* of the one file there */
};

FIXTURE(migrate_files)
{
	struct area area;
	struct disk disk;
};

FIXTURE_VARIANT(migrate_files)
{
	const char *fs;
	const char *mkfs;
	const char *fsck;	/* changes nothing */
	bool mt;
};

#define EXT4	.fs = "ext4", .mkfs = "mkfs.ext4 -q", .fsck = "e2fsck -fn"
#define XFS	.fs = "xfs", .mkfs = "mkfs.xfs -q", .fsck = "xfs_repair -n"

FIXTURE_VARIANT_ADD(migrate_files, ext4) { EXT4 };
FIXTURE_VARIANT_ADD(migrate_files, xfs) { XFS };
FIXTURE_VARIANT_ADD(migrate_files, ext4_mt) { EXT4, .mt = true };
FIXTURE_VARIANT_ADD(migrate_files, xfs_mt) { XFS, .mt = true };

static int __printf(1, 2) run(const char *fmt, ...)
{
	char command[256];
	va_list args;

	va_start(args, fmt);
	vsnprintf(command, sizeof(command), fmt, args);
	va_end(args);
	return system(command);
}

static bool has_command(const char *command)
{
	return !run("command -v %.*s >/dev/null", (int)strcspn(command, " "),
		    command);
}

FIXTURE_SETUP(migrate_files)
{
	self->disk.fd = -1;
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	if (run("grep -qw %s /proc/filesystems", variant->fs))
		SKIP(return, "no %s", variant->fs);
	if (!has_command(variant->mkfs) || !has_command(variant->fsck) ||
	    !has_command("losetup"))
		SKIP(return, "no %s", variant->mkfs);
}

FIXTURE_TEARDOWN(migrate_files)
{
	unsigned int tries = 0;

	area_free(&self->area);
	if (self->disk.fd >= 0)
		close(self->disk.fd);
	if (self->disk.is_mounted)
		EXPECT_TRUE(try_umount(self->disk.mnt));
	if (self->disk.dev[0]) {
		while (run("losetup -d %s", self->disk.dev) && tries++ < MAX_TRIES)
			usleep(10000);
		EXPECT_LT(tries, MAX_TRIES);
	}
	dir_umount(_metadata);
	teardown(_metadata);
}

/* An image on a tmpfs, since there are file systems that cannot have it. */
static bool make_disk(struct __test_metadata *_metadata, struct disk *disk,
		      const char *mkfs)
{
	char command[64];
	FILE *fp;

	if (!dir_mount(_metadata, "size=512M"))
		return false;
	/*
	 * "mount -o loop" fails where nobody may write to a mounted device: it
	 * has the device open.
	 */
	ASSERT_EQ(run("truncate -s 320M %s/image", dir), 0);
	snprintf(command, sizeof(command), "losetup -f --show %s/image", dir);
	fp = popen(command, "r");
	ASSERT_NE(fp, NULL);
	if (!fgets(disk->dev, sizeof(disk->dev), fp))
		disk->dev[0] = '\0';
	pclose(fp);
	disk->dev[strcspn(disk->dev, "\n")] = '\0';
	if (!disk->dev[0])
		SKIP(return false, "no loop device");
	ASSERT_EQ(run("%s %s >/dev/null 2>&1", mkfs, disk->dev), 0);
	snprintf(disk->mnt, sizeof(disk->mnt), "%s/mnt", dir);
	ASSERT_EQ(mkdir(disk->mnt, 0700), 0);
	return true;
}

static void open_file(struct __test_metadata *_metadata, struct disk *disk,
		      const char *fs)
{
	char path[80];

	ASSERT_EQ(mount(disk->dev, disk->mnt, fs, 0, NULL), 0) {
		TH_LOG("mounting %s: %s", fs, strerror(errno));
	}
	disk->is_mounted = true;
	snprintf(path, sizeof(path), "%s/file", disk->mnt);
	disk->fd = open(path, O_RDWR | O_CREAT, 0600);
	ASSERT_GE(disk->fd, 0);
}

/*
 * Every eighth page is written by write(2), the others through the mapping: by
 * counters, so that what else is in them can be read meanwhile.
 */
static bool page_is_written(unsigned int i)
{
	return i % 8 == 7;
}

static void *write_file_pages(void *arg)
{
	char *buf = alloc(1, pagesize);
	struct race *race = arg;
	struct area *area = race->area;
	unsigned int i = 0;

	while (!race_is_over(race)) {
		do {
			i = (i + 1) % area->nr_pages;
		} while (!page_is_written(i));
		fill(buf, i, ++area->version[i]);
		if (pwrite(race->fd, buf, pagesize, i * pagesize) != pagesize ||
		    pread(race->fd, buf, pagesize, i * pagesize) != pagesize)
			race->err = EIO;
		race->nr_wrong += !holds(buf, i, area->version[i]);
		race->nr_wrong += nr_wrong(area, i, 1);
		race->nr_done++;
	}
	free(buf);
	return NULL;
}

static void *read_file_pages(void *arg)
{
	char *buf = alloc(MAX_CHUNK, pagesize);
	struct race *race = arg;
	unsigned int i, first, nr;

	while (!race_is_over(race)) {
		nr = next_chunk(race, &first);
		if (pread(race->fd, buf, nr * pagesize, first * pagesize) !=
		    nr * pagesize)
			race->err = EIO;
		for (i = 0; i < nr; i++)
			if (!page_is_written(first + i))
				race->nr_wrong += !holds(buf + i * pagesize,
							 first + i, 1);
		race->nr_done++;
	}
	free(buf);
	return NULL;
}

static void *count_in_file_pages(void *arg)
{
	struct race *race = arg;
	unsigned int i;

	do {
		for (i = 0; i < race->area->nr_pages; i++)
			if (!page_is_written(i))
				__atomic_fetch_add(page_counter(race->area, i),
						   1, __ATOMIC_RELAXED);
		race->nr_done++;
	} while (!race_is_over(race));
	return NULL;
}

static void *write_back(void *arg)
{
	struct race *race = arg;

	while (!race_is_over(race)) {
		if (race->nr_done % 2 ? fsync(race->fd) :
		    sync_file_range(race->fd, 0, 0, SYNC_FILE_RANGE_WRITE))
			race->err = errno;
		race->nr_done++;
	}
	return NULL;
}

static void check_file(struct __test_metadata *_metadata,
		       const struct area *area, unsigned long counter)
{
	unsigned int i;

	check_contents(_metadata, area);
	for (i = 0; i < area->nr_pages; i++) {
		ASSERT_EQ(*page_counter(area, i),
			  page_is_written(i) ? 0 : counter) {
			TH_LOG("page %u", i);
		}
	}
}

TEST_F_TIMEOUT(migrate_files, written_and_read, TIMEOUT_S)
{
	void *(*fn[])(void *) = {
		count_in_file_pages, write_file_pages, read_file_pages,
		write_back,
	};
	struct race race[ARRAY_SIZE(fn)] = {};
	pthread_t thread[ARRAY_SIZE(fn)];
	unsigned int i, t, nr = FILE_BYTES / pagesize;
	struct area *area = &self->area;
	struct disk *disk = &self->disk;
	char *buf = alloc(1, FILE_BYTES);
	size_t pos, len = LARGE_PAGES * pagesize;

	if (!make_disk(_metadata, disk, variant->mkfs))
		return;
	open_file(_metadata, disk, variant->fs);
	area_init(area, reserve(FILE_BYTES), 0, nr, 0);
	for (i = 0; i < nr; i++)
		fill(buf + i * pagesize, i, ++area->version[i]);
	/* The page cache gets folios as large as what is written at a time. */
	for (pos = 0; pos < FILE_BYTES; pos += len)
		ASSERT_EQ(pwrite(disk->fd, buf + pos, len, pos), len);
	map_file(_metadata, area, disk->fd);
	force_read_pages(area->start, nr, pagesize);
	for (i = 0; i < nr; i += LARGE_PAGES)
		if (!is_large(page_addr(area, i)))
			SKIP(return, "%s has no large folios", variant->fs);

	for (t = 0; t < ARRAY_SIZE(fn); t++) {
		race[t].fd = disk->fd;
		race[t].pause_us = 1000;
		race_start(_metadata, &race[t], area, &thread[t], fn[t]);
	}
	move_for(_metadata, area, &race[3], 2);
	for (t = 0; t < ARRAY_SIZE(fn); t++)
		race_stop(_metadata, &race[t], thread[t]);
	check_file(_metadata, area, race[0].nr_done);
	bounce(_metadata, area);
	check_file(_metadata, area, race[0].nr_done);
	check_not_isolated(_metadata);

	/* The same is on the disk, and nothing else is wrong there. */
	ASSERT_EQ(munmap(area->start, FILE_BYTES), 0);
	close(disk->fd);
	disk->fd = -1;
	ASSERT_TRUE(try_umount(disk->mnt));
	disk->is_mounted = false;
	ASSERT_EQ(run("%s %s >/dev/null 2>&1", variant->fsck, disk->dev), 0);
	open_file(_metadata, disk, variant->fs);
	map_file(_metadata, area, disk->fd);
	check_file(_metadata, area, race[0].nr_done);
	free(buf);
}

/* Others that move pages, and CPUs and memory that come and go. */

FIXTURE(migrate_system)
{
	struct area area;
	struct race race;
	char block[64];
};

FIXTURE_VARIANT(migrate_system)
{
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_system, off) { };
FIXTURE_VARIANT_ADD(migrate_system, mt) { .mt = true };

FIXTURE_SETUP(migrate_system)
{
	self->race.fd = -1;
	setup(_metadata, variant->mt);
}

static void interrupt(int sig)
{
}

/* Who takes memory away tries again and again until a signal comes. */
static bool try_offline(const char *path)
{
	struct sigaction sa = { .sa_handler = interrupt }, old;
	bool is_offline;
	int err;

	sigaction(SIGALRM, &sa, &old);
	alarm(OFFLINE_S);
	is_offline = try_write_file(path, "offline");
	err = errno;
	alarm(0);
	sigaction(SIGALRM, &old, NULL);
	errno = err;
	return is_offline;
}

FIXTURE_TEARDOWN(migrate_system)
{
	area_free(&self->area);
	if (self->race.fd >= 0) {
		if (pwrite(self->race.fd, "1", 1, 0) != 1)
			TH_LOG("a CPU stays offline");
		close(self->race.fd);
	}
	/* To the zone that it was in before. */
	if (self->block[0]) {
		try_offline(self->block);
		EXPECT_TRUE(try_write_file(self->block, "online"));
	}
	teardown(_metadata);
}

static void *toggle_cpu(void *arg)
{
	struct race *race = arg;

	while (!race_is_over(race)) {
		if (pwrite(race->fd, "0", 1, 0) != 1 ||
		    pwrite(race->fd, "1", 1, 0) != 1)
			race->err = errno == EBUSY ? 0 : errno;
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_system, cpu_offline, TIMEOUT_S)
{
	char path[64];

	snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%ld/online",
		 sysconf(_SC_NPROCESSORS_CONF) - 1);
	if (!area_alloc(_metadata, &self->area, 1, NR_LARGE, NR_SMALL))
		return;
	self->race.fd = open(path, O_WRONLY);
	if (self->race.fd < 0)
		SKIP(return, "no %s", path);
	run_races(_metadata, &self->race, NULL, &self->area, toggle_cpu);
}

/* A block of memory of node[1] that can be taken away, in self->block. */
static bool find_block(char *path, size_t len)
{
	unsigned int n, tries = 0;

	for (n = 4096; n-- && tries < MAX_BLOCKS;) {
		snprintf(path, len, NODE_DIR "node%d/memory%u/state", node[1],
			 n);
		if (access(path, W_OK))
			continue;
		if (try_offline(path))
			return true;
		tries++;
	}
	path[0] = '\0';
	return false;
}

static void *toggle_block(void *arg)
{
	struct race *race = arg;

	/* It is not busy for long, whoever has a page of it just now. */
	while (!race_is_over(race)) {
		if (!try_write_file(race->path, "offline")) {
			if (errno != EBUSY)
				race->err = errno;
			continue;
		}
		if (!try_write_file(race->path, "online_movable"))
			race->err = errno;
		race->nr_done++;
	}
	return NULL;
}

/* Movable memory is taken first. Who takes the block away has to move that. */
TEST_F_TIMEOUT(migrate_system, memory_offline, TIMEOUT_S)
{
	unsigned long block_pages, first, pfn;
	struct area *area = &self->area;
	unsigned int i, nr = 0, tries = 0;
	char value[32], *end;

	if (!read_file(MEMORY_DIR "block_size_bytes", value, sizeof(value)))
		SKIP(return, "no " MEMORY_DIR);
	block_pages = strtoul(value, NULL, 16) / pagesize;
	if (!find_block(self->block, sizeof(self->block)))
		SKIP(return, "no memory of node %d can be taken away", node[1]);
	ASSERT_TRUE(try_write_file(self->block, "online_movable"));
	first = strtoul(strstr(self->block, "/memory") + 7, &end, 10) *
		block_pages;

	if (!area_alloc(_metadata, area, 1, NR_LARGE, NR_SMALL))
		return;
	move_all(_metadata, area, node[1]);
	for (i = 0; i < area->nr_pages; i++) {
		pfn = pagemap_get_pfn(pagemap_fd, page_addr(area, i));
		nr += pfn - first < block_pages;
	}
	ASSERT_GT(nr, 0);
	while (!try_offline(self->block)) {
		ASSERT_LT(tries++, MAX_BLOCKS) {
			TH_LOG("%s", strerror(errno));
		}
		usleep(10000);
	}
	for (i = 0; i < area->nr_pages; i++) {
		pfn = pagemap_get_pfn(pagemap_fd, page_addr(area, i));
		ASSERT_GE(pfn - first, block_pages);
	}
	check_contents(_metadata, area);
	ASSERT_TRUE(try_write_file(self->block, "online_movable"));

	self->race.path = self->block;
	run_races(_metadata, &self->race, NULL, area, toggle_block);
}

static void *count_on_node(void *arg)
{
	struct race *race = arg;

	/* Where NUMA balancing is to move memory to, and with no policy. */
	if (numa_run_on_node(race->node))
		race->err = errno;
	set_mempolicy(MPOL_DEFAULT, NULL, 0);
	return count_in_pages(arg);
}

TEST_F_TIMEOUT(migrate_system, numa_balancing, TIMEOUT_S)
{
	int to = node_has_cpu(node[1]) ? node[1] : node[0];
	int from = to == node[1] ? node[0] : node[1];
	struct race counting = { .node = to };
	struct area *area = &self->area;
	uint64_t start = now_ns();
	unsigned int nr = 0;
	unsigned long moved;
	pthread_t thread;

	if (!change_setting(BALANCING_PATH, "1"))
		SKIP(return, "no NUMA balancing");
	/* In any order: the minimum may not be larger than the maximum. */
	if (!change_setting(BALANCING_DIR "scan_delay_ms", "10") ||
	    !change_setting(BALANCING_DIR "scan_period_min_ms", "100") ||
	    !change_setting(BALANCING_DIR "scan_period_max_ms", "200"))
		SKIP(return, "no " BALANCING_DIR);
	if (!area_alloc(_metadata, area, 1, NR_LARGE, NR_SMALL))
		return;
	move_all(_metadata, area, from);
	moved = read_vmstat("numa_pages_migrated ");

	race_start(_metadata, &counting, area, &thread, count_on_node);
	while (nr < area->nr_pages / 2 && now_ns() - start < RACE_MAX_NS) {
		usleep(10000);
		ASSERT_EQ(nr_wrong(area, 0, area->nr_pages), 0);
		nr = nr_on_node(area, to);
	}
	race_stop(_metadata, &counting, thread);
	ASSERT_GE(nr, area->nr_pages / 2);
	ASSERT_GT(read_vmstat("numa_pages_migrated "), moved);
	check_counters(_metadata, area, counting.nr_done);
	check_contents(_metadata, area);
	bounce(_metadata, area);
	check_not_isolated(_metadata);
}

/* Is there memory that is slower than that of the CPUs? */
static bool has_tiers(void)
{
	glob_t tiers;
	bool several;

	if (glob(TIER_DIR "memory_tier*", 0, NULL, &tiers))
		return false;
	several = tiers.gl_pathc > 1;
	globfree(&tiers);
	return several;
}

static unsigned long nr_demoted(void)
{
	return read_vmstat("pgdemote_kswapd ") +
	       read_vmstat("pgdemote_direct ") +
	       read_vmstat("pgdemote_khugepaged ") +
	       read_vmstat("pgdemote_proactive ");
}

TEST_F_TIMEOUT(migrate_system, demotion, TIMEOUT_S)
{
	/* Not always hot, so that it can be found to be cold. */
	struct race counting = { .pause_us = 50000 };
	struct area *area = &self->area;
	int from = node_has_cpu(node[1]) ? node[1] : node[0];
	int to = from == node[1] ? node[0] : node[1];
	unsigned int nr, tries = 0;
	unsigned long demoted;
	pthread_t thread;
	char value[32];

	if (node_has_cpu(to) || !has_tiers())
		SKIP(return, "no slower node without CPUs");
	if (!change_setting(DEMOTION_PATH, "true"))
		SKIP(return, "no " DEMOTION_PATH);
	if (!enter_cgroup(_metadata, "memory") ||
	    !area_alloc(_metadata, area, 1, NR_LARGE, NR_SMALL))
		return;
	move_all(_metadata, area, from);
	demoted = nr_demoted();
	snprintf(value, sizeof(value), "%zu", area->nr_pages * pagesize);

	race_start(_metadata, &counting, area, &thread, count_in_pages);
	do {
		ASSERT_LT(tries++, MAX_TRIES);
		cgroup_write("memory.reclaim", value);
		usleep(10000);
		ASSERT_EQ(nr_wrong(area, 0, area->nr_pages), 0);
		nr = nr_on_node(area, to);
	} while (nr < area->nr_pages / 2);
	race_stop(_metadata, &counting, thread);
	ASSERT_GT(nr_demoted(), demoted);
	check_counters(_metadata, area, counting.nr_done);
	check_contents(_metadata, area);
	bounce(_metadata, area);
	check_not_isolated(_metadata);
}

TEST_HARNESS_MAIN
