// SPDX-License-Identifier: GPL-2.0
/*
 * Tests of the copying that page migration does: that it moves every byte, of
 * all kinds of memory, whoever reads or writes it meanwhile, and that a folio
 * whose copy fails stays what and where it was while all others are moved.
 *
 * Every page of the memory under test holds words that occur nowhere else, so
 * that a page in the wrong place, or an older version of it, is noticed.
 *
 * A list of folios is copied in batches of 512 pages, so lists are longer here.
 */

#include "kselftest_harness.h"

#include <fcntl.h>
#include <numa.h>
#include <numaif.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <linux/aio_abi.h>
#include <linux/udmabuf.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "hugepage_settings.h"
#include "migrate_util.h"
#include "vm_util.h"

#define KPF_LOCKED		BIT_ULL(0)
#define KPF_UNEVICTABLE		BIT_ULL(18)
#define KPF_MLOCKED		BIT_ULL(33)

#define ORDER_OF_PMD		100
#define MAX_PARTS		8
#define MAX_TRIES		10

/* Emulators are slow, and may share a machine. */
#define TIMEOUT_S		180

#define RACE_NS			400000000ULL
#define RACE_MOVES		2
#define NR_HOLDS		16
#define NR_WRITERS		2
#define CHUNK_PAGES		16
#define LEAK_BYTES		(12UL << 20)
#define LEAK_TOLERANCE		(6UL << 20)
#define LEAK_TRIES		5
#define DIO_CHUNKS		4
#define DIO_FIRST_ID		0x100000U
#define AIO_EVENTS		8
#define AIO_TIMEOUT_S		10
#define UDMABUF_PAGES		512
#define UDMABUF_NS		3000000000ULL

/* A batch is as many times longer as there are CPUs to copy it. */
#define MT_CPUS			4
#define MT_TRIES		50

#define KNOB_DIR		"/sys/kernel/mm/migrate/"
#define EVENT_DIR		"events/migrate/mm_copy_pages_mt/"
#define FAULT_DIR		"/sys/kernel/debug/fail_page_copy/"
#define FAULT_ANY_PFN		(~0UL)
#define XFS_PATH_ENV		"MIGRATE_COPY_XFS_PATH"

static int kpagecount_fd;

/* What memory is. */
enum kind {
	NOTHING,
	ANON,
	SHMEM,
	HUGETLB,
	FILE_WRITTEN,		/* in the current directory */
	FILE_READ,		/* the same, read again: without buffer heads */
	XFS_WRITTEN,
};

/* A mapping, of folios of one kind. */
struct part {
	enum kind kind;
	unsigned int order;	/* or ORDER_OF_PMD */
	unsigned int nr_folios;

	char *start;
	size_t len;
	unsigned int first;	/* page in struct mem */
	unsigned int nr_pages;
	int fd;
};

struct page_state {
	char *addr;
	unsigned int id;	/* these two tell its content */
	unsigned int version;
};

struct folio {
	unsigned int first;
	unsigned int nr_pages;
	bool hugetlb;
};

/* What backs a page. */
struct backing {
	unsigned long pfn;
	uint64_t flags;		/* as in /proc/kpageflags */
	uint64_t count;		/* as in /proc/kpagecount */
};

/* The memory under test, and its folios in the order that they are moved. */
struct mem {
	struct part part[MAX_PARTS];
	unsigned int nr_parts;
	struct page_state *page;
	unsigned int nr_pages;
	struct folio *folio;
	unsigned int nr_folios;
};

/* Copying with several CPUs: /sys/kernel/mm/migrate/. */

enum knob {
	COPY_CPUS,
	COPY_MIN_BYTES,
	COPY_NODE,
	NR_KNOBS
};

static const char * const knob_paths[] = {
	[COPY_CPUS]		= KNOB_DIR "copy_cpus",
	[COPY_MIN_BYTES]	= KNOB_DIR "copy_min_bytes",
	[COPY_NODE]		= KNOB_DIR "copy_node",
};

static char saved_knobs[NR_KNOBS][64];

static void read_knob(enum knob knob, char *value, size_t len)
{
	if (!read_file(knob_paths[knob], value, len))
		ksft_exit_fail_perror(knob_paths[knob]);
	value[strcspn(value, "\n")] = '\0';
}

/* Return the error, 0 if there is none. */
static int write_knob(enum knob knob, const char *value)
{
	int fd = open(knob_paths[knob], O_WRONLY);
	ssize_t len = strlen(value);
	int err = 0;

	if (fd < 0 || write(fd, value, len) != len)
		err = errno ?: EIO;
	if (fd >= 0)
		close(fd);
	return err;
}

static void write_knob_num(enum knob knob, unsigned long value)
{
	write_num(knob_paths[knob], value);
}

static void restore_knobs(void)
{
	if (!saved_knobs[COPY_CPUS][0])
		return;
	write_knob(COPY_CPUS, saved_knobs[COPY_CPUS]);
	write_knob(COPY_MIN_BYTES, saved_knobs[COPY_MIN_BYTES]);
	write_knob(COPY_NODE, strstr(saved_knobs[COPY_NODE], "[source]") ?
			      "source" : "destination");
}

static void save_knobs(void)
{
	enum knob knob;

	if (access(KNOB_DIR, F_OK))
		return;
	for (knob = 0; knob < NR_KNOBS; knob++)
		read_knob(knob, saved_knobs[knob], sizeof(saved_knobs[knob]));
	atexit(restore_knobs);
}

static unsigned long max_copy_cpus(void)
{
	unsigned long nr = sysconf(_SC_NPROCESSORS_CONF);

	return nr < MT_CPUS ? nr : MT_CPUS;
}

static void setup_knobs(struct __test_metadata *_metadata, bool mt)
{
	if (access(KNOB_DIR, F_OK)) {
		if (mt)
			SKIP(return, "no " KNOB_DIR);
		return;
	}
	if (mt && max_copy_cpus() == 1)
		SKIP(return, "there is only one CPU");
	write_knob_num(COPY_CPUS, mt ? max_copy_cpus() : 1);
	write_knob_num(COPY_MIN_BYTES, getpagesize());
}

static void __attribute__((constructor)) save_settings(void)
{
	hugepage_save_settings(true, true);
	save_knobs();
}

/* Contents. */

static uint64_t page_word(unsigned int id, unsigned int version, unsigned int w)
{
	/* An odd factor: different before it is different after it. */
	return ((uint64_t)id << 40 | (uint64_t)version << 16 | w) *
	       0x9e3779b97f4a7c15ULL;
}

static void fill(void *to, unsigned int id, unsigned int version)
{
	uint64_t *word = to;
	unsigned int w;

	for (w = 0; w < pagesize / sizeof(*word); w++)
		word[w] = page_word(id, version, w);
}

static bool holds(const void *from, unsigned int id, unsigned int version)
{
	const uint64_t *word = from;
	unsigned int w;

	for (w = 0; w < pagesize / sizeof(*word); w++)
		if (word[w] != page_word(id, version, w))
			return false;
	return true;
}

static void write_page(struct page_state *page)
{
	fill(page->addr, page->id, ++page->version);
}

static void write_pages(struct mem *mem)
{
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++)
		write_page(&mem->page[i]);
}

static unsigned int nr_wrong_pages(struct mem *mem)
{
	unsigned int i, wrong = 0;

	for (i = 0; i < mem->nr_pages; i++) {
		struct page_state *page = &mem->page[i];

		wrong += !holds(page->addr, page->id, page->version);
	}
	return wrong;
}

static void check_contents(struct __test_metadata *_metadata, struct mem *mem)
{
	ASSERT_EQ(nr_wrong_pages(mem), 0);
}

/* What backs the pages. */

static void read_u64s(int fd, uint64_t *buf, unsigned int nr, unsigned long pos)
{
	if (pread(fd, buf, nr * sizeof(*buf), pos * sizeof(*buf)) !=
	    nr * sizeof(*buf))
		ksft_exit_fail_perror("reading pagemap or kpage* failed");
}

static struct backing *get_backing(struct mem *mem)
{
	struct backing *backing = alloc(mem->nr_pages, sizeof(*backing));
	uint64_t *buf = alloc(mem->nr_pages, sizeof(*buf));
	unsigned int i, j, nr;

	for (i = 0; i < mem->nr_pages; i += nr) {
		char *addr = mem->page[i].addr;

		nr = 1;
		while (i + nr < mem->nr_pages &&
		       mem->page[i + nr].addr == addr + nr * pagesize)
			nr++;
		read_u64s(pagemap_fd, buf, nr, (uintptr_t)addr / pagesize);
		for (j = 0; j < nr; j++)
			backing[i + j].pfn = buf[j] & PM_PRESENT ?
					     PAGEMAP_PFN(buf[j]) : -1UL;
	}

	for (i = 0; i < mem->nr_pages; i += nr) {
		nr = 1;
		if (backing[i].pfn == -1UL)
			continue;
		while (i + nr < mem->nr_pages &&
		       backing[i + nr].pfn == backing[i].pfn + nr)
			nr++;
		read_u64s(kpageflags_fd, buf, nr, backing[i].pfn);
		for (j = 0; j < nr; j++)
			backing[i + j].flags = buf[j];
		read_u64s(kpagecount_fd, buf, nr, backing[i].pfn);
		for (j = 0; j < nr; j++)
			backing[i + j].count = buf[j];
	}
	free(buf);
	return backing;
}

/* The number of pages of the folio that page @i of @backing starts. */
static unsigned int folio_pages(const struct backing *backing, unsigned int i,
				unsigned int end)
{
	unsigned int nr = 1;

	if (!(backing[i].flags & KPF_COMPOUND_HEAD))
		return 1;
	while (i + nr < end && backing[i + nr].flags & KPF_COMPOUND_TAIL &&
	       backing[i + nr].pfn == backing[i].pfn + nr)
		nr++;
	return nr;
}

/* False if one is missing, or of the wrong size. */
static bool find_folios(struct mem *mem, struct part *part,
			const struct backing *backing)
{
	unsigned int i, nr, end = part->first + part->nr_pages;

	for (i = part->first; i < end; i += nr) {
		if (backing[i].pfn == -1UL ||
		    backing[i].flags & KPF_COMPOUND_TAIL)
			return false;
		nr = folio_pages(backing, i, end);
		if (part->kind != FILE_READ && nr != 1U << part->order)
			return false;
		mem->folio[mem->nr_folios++] = (struct folio) {
			.first = i,
			.nr_pages = nr,
			.hugetlb = part->kind == HUGETLB,
		};
	}
	return true;
}

/* Let folios of all parts be neighbours, in the same order each time. */
static void shuffle_folios(struct mem *mem)
{
	unsigned int i, j, seed = 1;

	for (i = mem->nr_folios - 1; i > 0; i--) {
		struct folio folio = mem->folio[i];

		seed = seed * 1103515245 + 12345;
		j = (seed >> 8) % (i + 1);
		mem->folio[i] = mem->folio[j];
		mem->folio[j] = folio;
	}
}

/* The folio that page @i is in. */
static unsigned int find_folio(struct mem *mem, unsigned int i)
{
	unsigned int k = 0;

	while (i - mem->folio[k].first >= mem->folio[k].nr_pages)
		k++;
	return k;
}

/* Memory. */

static bool is_file(const struct part *part)
{
	return part->kind >= FILE_WRITTEN;
}

static bool is_shared(const struct part *part)
{
	return part->kind == SHMEM || is_file(part);
}

static void set_thp(const char *name, const struct part *part,
		    const char *value)
{
	char path[64];

	if (!part->order)
		return;
	snprintf(path, sizeof(path), "hugepages-%zukB/%s",
		 (pagesize << part->order) >> 10, name);
	thp_write_string(path, value);
}

static void map_part(struct __test_metadata *_metadata, struct part *part,
		     int flags)
{
	ASSERT_EQ(mmap(part->start, part->len, PROT_READ | PROT_WRITE,
		       flags | MAP_FIXED, part->fd, 0), part->start);
}

static bool alloc_anon(struct __test_metadata *_metadata, struct mem *mem,
		       struct part *part)
{
	unsigned int i;

	if (part->order && !(thp_supported_orders() & (1UL << part->order)))
		SKIP(return false, "no anonymous folios of order %u",
		     part->order);
	map_part(_metadata, part, MAP_PRIVATE | MAP_ANONYMOUS);
	if (part->order)
		ASSERT_EQ(madvise(part->start, part->len, MADV_HUGEPAGE), 0);

	/* Only while we allocate: khugepaged must not collapse anything. */
	set_thp("enabled", part, "madvise");
	for (i = 0; i < part->nr_pages; i++)
		write_page(&mem->page[part->first + i]);
	set_thp("enabled", part, "never");
	return true;
}

static bool alloc_shmem(struct __test_metadata *_metadata, struct mem *mem,
			struct part *part)
{
	unsigned int i;

	if (part->order &&
	    !(thp_shmem_supported_orders() & (1UL << part->order)))
		SKIP(return false, "no shmem folios of order %u", part->order);
	part->fd = memfd_create("migrate_copy", 0);
	ASSERT_GE(part->fd, 0);
	ASSERT_EQ(ftruncate(part->fd, part->len), 0);
	map_part(_metadata, part, MAP_SHARED);

	set_thp("shmem_enabled", part, "always");
	for (i = 0; i < part->nr_pages; i++)
		write_page(&mem->page[part->first + i]);
	set_thp("shmem_enabled", part, "never");
	return true;
}

static bool alloc_hugetlb(struct __test_metadata *_metadata, struct mem *mem,
			  struct part *part)
{
	unsigned int i;

	if (default_huge_page_size() != pmdsize)
		SKIP(return false, "no hugetlb folios of the size of a PMD");
	/* On both nodes, and enough to copy one on write. */
	if (!hugetlb_setup_default(4 * part->nr_folios))
		SKIP(return false, "could not allocate hugetlb folios");
	map_part(_metadata, part, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB);
	for (i = 0; i < part->nr_pages; i++)
		write_page(&mem->page[part->first + i]);
	return true;
}

static bool alloc_file(struct __test_metadata *_metadata, struct mem *mem,
		       struct part *part)
{
	const char *dir = part->kind == XFS_WRITTEN ? getenv(XFS_PATH_ENV) : ".";
	size_t pos, len = pagesize << part->order;
	char *buf;
	unsigned int i;

	if (!dir)
		SKIP(return false, "no XFS: " XFS_PATH_ENV " is not set");
	part->fd = open(dir, O_TMPFILE | O_RDWR, 0600);
	if (part->fd < 0)
		SKIP(return false, "no temporary file in %s: %s", dir,
		     strerror(errno));

	/* The page cache gets folios as large as what is written at a time. */
	buf = alloc(1, part->len);
	for (i = 0; i < part->nr_pages; i++) {
		struct page_state *page = &mem->page[part->first + i];

		fill(buf + i * pagesize, page->id, ++page->version);
	}
	for (pos = 0; pos < part->len; pos += len)
		ASSERT_EQ(pwrite(part->fd, buf + pos, len, pos), len);
	ASSERT_EQ(fsync(part->fd), 0);

	if (part->kind == FILE_READ) {
		ASSERT_EQ(posix_fadvise(part->fd, 0, 0, POSIX_FADV_DONTNEED), 0);
		for (pos = 0; pos < part->len; pos += len)
			ASSERT_EQ(pread(part->fd, buf, len, pos), len);
	}
	free(buf);

	map_part(_metadata, part, MAP_SHARED);
	force_read_pages(part->start, part->nr_pages, pagesize);
	return true;
}

static bool alloc_part(struct __test_metadata *_metadata, struct mem *mem,
		       struct part *part)
{
	switch (part->kind) {
	case ANON:
		return alloc_anon(_metadata, mem, part);
	case SHMEM:
		return alloc_shmem(_metadata, mem, part);
	case HUGETLB:
		return alloc_hugetlb(_metadata, mem, part);
	default:
		return alloc_file(_metadata, mem, part);
	}
}

/* The nodes of all pages, or errors. */
static int *get_nodes(struct mem *mem)
{
	int *status = alloc(mem->nr_pages, sizeof(*status));
	void **pages = alloc(mem->nr_pages, sizeof(*pages));
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++)
		pages[i] = mem->page[i].addr;
	if (move_pages(0, mem->nr_pages, pages, NULL, status, 0))
		ksft_exit_fail_perror("move_pages() failed");
	free(pages);
	return status;
}

/* False, with the reason reported, if there are no such folios for us. */
static bool mem_alloc(struct __test_metadata *_metadata, struct mem *mem,
		      const struct part *parts)
{
	struct backing *backing;
	struct part *part;
	unsigned int i;
	int *nodes;

	memset(mem, 0, sizeof(*mem));
	for (; mem->nr_parts < MAX_PARTS && parts->kind; parts++) {
		part = &mem->part[mem->nr_parts++];
		*part = *parts;
		if (part->order == ORDER_OF_PMD)
			part->order = sz2ord(pmdsize, pagesize);
		part->fd = -1;
		part->first = mem->nr_pages;
		part->nr_pages = part->nr_folios << part->order;
		part->len = part->nr_pages * pagesize;
		part->start = reserve(part->len);
		mem->nr_pages += part->nr_pages;
	}

	mem->page = alloc(mem->nr_pages, sizeof(*mem->page));
	mem->folio = alloc(mem->nr_pages, sizeof(*mem->folio));
	for (part = mem->part; part < mem->part + mem->nr_parts; part++) {
		for (i = 0; i < part->nr_pages; i++) {
			struct page_state *page = &mem->page[part->first + i];

			page->addr = part->start + i * pagesize;
			page->id = part->first + i;
		}
		if (!alloc_part(_metadata, mem, part))
			return false;
	}

	backing = get_backing(mem);
	for (part = mem->part; part < mem->part + mem->nr_parts; part++)
		if (!find_folios(mem, part, backing))
			SKIP(return false,
			     "could not allocate folios of order %u",
			     part->order);
	free(backing);
	if (mem->nr_parts > 1)
		shuffle_folios(mem);

	nodes = get_nodes(mem);
	for (i = 0; i < mem->nr_pages; i++)
		if (nodes[i] != node[0])
			SKIP(return false, "could not allocate on node %d",
			     node[0]);
	free(nodes);
	return true;
}

static void mem_free(struct mem *mem)
{
	struct part *part;

	racers_stop();
	for (part = mem->part; part < mem->part + mem->nr_parts; part++) {
		munmap(part->start, part->len);
		if (part->fd >= 0)
			close(part->fd);
	}
	free(mem->page);
	free(mem->folio);
	memset(mem, 0, sizeof(*mem));
}

/* Moving. */

/* Ask for one page of each of the first folios. */
static long move_some(struct mem *mem, unsigned int nr, int target, int *status)
{
	void **pages = alloc(nr, sizeof(*pages));
	int *nodes = alloc(nr, sizeof(*nodes));
	unsigned int k;
	long ret;

	for (k = 0; k < nr; k++) {
		pages[k] = mem->page[mem->folio[k].first].addr;
		nodes[k] = target;
		status[k] = -1;
	}
	ret = move_pages(0, nr, pages, nodes, status, MPOL_MF_MOVE_ALL);
	free(nodes);
	free(pages);
	return ret;
}

/* The first @nr folios are on @target, the others are not. */
static void check_nodes(struct __test_metadata *_metadata, struct mem *mem,
			unsigned int nr, int target)
{
	int *nodes = get_nodes(mem);
	unsigned int k, i;

	for (k = 0; k < mem->nr_folios; k++) {
		struct folio *folio = &mem->folio[k];

		for (i = folio->first; i < folio->first + folio->nr_pages; i++) {
			ASSERT_EQ(nodes[i] == target, k < nr) {
				TH_LOG("folio %u page %u", k, i);
			}
		}
	}
	free(nodes);
}

static void move_to(struct __test_metadata *_metadata, struct mem *mem,
		    unsigned int nr, int target)
{
	int *status = alloc(nr, sizeof(*status));
	unsigned int k, tries = 0;
	long ret;

	/* Migration is best effort: a page can be busy for a moment. */
	do {
		ret = move_some(mem, nr, target, status);
		ASSERT_GE(ret, 0);
	} while (ret && ++tries < MAX_TRIES);

	ASSERT_EQ(ret, 0);
	for (k = 0; k < nr; k++)
		ASSERT_EQ(status[k], target);
	free(status);
}

static void bounce(struct __test_metadata *_metadata, struct mem *mem,
		   unsigned int nr)
{
	move_to(_metadata, mem, nr, node[1]);
	check_nodes(_metadata, mem, nr, node[1]);
	check_contents(_metadata, mem);
	move_to(_metadata, mem, nr, node[0]);
	check_nodes(_metadata, mem, mem->nr_folios, node[0]);
	check_contents(_metadata, mem);
}

/* Failures on demand: CONFIG_FAIL_PAGE_COPY. */

static bool fault_supported(struct __test_metadata *_metadata)
{
	if (access(FAULT_DIR "pfn", W_OK))
		SKIP(return false, "no " FAULT_DIR);
	return true;
}

static void fault_off(void)
{
	if (!access(FAULT_DIR "pfn", W_OK))
		write_num(FAULT_DIR "probability", 0);
}

/* Every @interval-th copy fails, if it is one of page @pfn. */
static void fault_on(unsigned long pfn, unsigned int interval)
{
	write_num(FAULT_DIR "verbose", 0);
	write_num(FAULT_DIR "space", 0);
	write_file(FAULT_DIR "task-filter", "N", sizeof("N"));
	write_file(FAULT_DIR "times", "-1", sizeof("-1"));
	write_num(FAULT_DIR "interval", interval);
	write_num(FAULT_DIR "pfn", pfn);
	write_num(FAULT_DIR "probability", 100);
}

static void fault_on_folio(struct mem *mem, unsigned int k)
{
	char *addr = mem->page[mem->folio[k].first].addr;

	fault_on(pagemap_get_pfn(pagemap_fd, addr), 1);
}

/* The system. */

/*
 * Memory that is free, also in the lists of the CPUs, which hold megabytes, or
 * in the caches of others.
 */
static unsigned long node_not_lost(int nid)
{
	static const char * const kinds[] = {
		" pages free %lu",
		" count: %lu",
		" nr_file_pages %lu",
		" nr_slab_reclaimable %lu",
		" nr_slab_unreclaimable %lu",
	};
	FILE *fp = fopen("/proc/zoneinfo", "r");
	unsigned long nr, nr_pages = 0;
	unsigned int i;
	char line[128];
	int here = -1;

	if (!fp)
		ksft_exit_fail_perror("/proc/zoneinfo");
	while (fgets(line, sizeof(line), fp)) {
		if (sscanf(line, "Node %d,", &here) == 1 || here != nid)
			continue;
		for (i = 0; i < ARRAY_SIZE(kinds); i++)
			if (sscanf(line, kinds[i], &nr) == 1)
				nr_pages += nr;
	}
	fclose(fp);
	return nr_pages * pagesize;
}

/* Compaction and writeback may be at it: give them a second. */
static void check_settled(struct __test_metadata *_metadata, struct mem *mem)
{
	struct backing *backing;
	unsigned int i, tries = 0, nr_locked;
	unsigned long isolated;

	do {
		if (tries)
			usleep(10000);
		nr_locked = 0;
		backing = get_backing(mem);
		for (i = 0; i < mem->nr_pages; i++)
			nr_locked += !!(backing[i].flags & KPF_LOCKED);
		free(backing);
		isolated = nr_isolated();
	} while ((nr_locked || isolated) && tries++ < 100);

	ASSERT_EQ(nr_locked, 0);
	ASSERT_EQ(isolated, 0);
}

static void setup(struct __test_metadata *_metadata, bool mt)
{
	const char *reason = migrate_setup();

	if (reason)
		SKIP(return, "%s", reason);
	kpagecount_fd = open("/proc/kpagecount", O_RDONLY);
	if (kpagecount_fd < 0)
		SKIP(return, "no /proc/kpagecount");
	setup_knobs(_metadata, mt);
	fault_off();
}

static void teardown(void)
{
	racers_stop();
	fault_off();
	hugetlb_restore_settings();
}

/* Everything that can be moved. */

FIXTURE(migrate_copy)
{
	struct mem mem;
};

FIXTURE_VARIANT(migrate_copy)
{
	struct part part[MAX_PARTS];
	bool mt;
};

#define PART_ANON_4K	{ ANON, 0, 540 }
#define PART_ANON_64K	{ ANON, 4, 40 }
#define PART_ANON_PMD	{ ANON, ORDER_OF_PMD, 3 }
#define PART_ANON_64K_MT	{ ANON, 4, 140 }
#define PART_ANON_PMD_MT	{ ANON, ORDER_OF_PMD, 5 }
#define PART_HUGETLB	{ HUGETLB, ORDER_OF_PMD, 3 }
#define PART_SHMEM_4K	{ SHMEM, 0, 540 }
#define PART_SHMEM_64K	{ SHMEM, 4, 40 }
#define PART_SHMEM_PMD	{ SHMEM, ORDER_OF_PMD, 3 }
#define PART_FILE_4K	{ FILE_WRITTEN, 0, 540 }
#define PART_FILE_64K	{ FILE_WRITTEN, 4, 40 }
#define PART_FILE_READ	{ FILE_READ, 0, 540 }
#define PART_XFS_4K	{ XFS_WRITTEN, 0, 540 }
#define PART_XFS_64K	{ XFS_WRITTEN, 4, 40 }

/* In an order that lets the folios of all of them be neighbours. */
#define PARTS_MIXED {						\
	{ ANON, 0, 300 }, { ANON, 4, 20 }, { ANON, 8, 1 },	\
	{ ANON, ORDER_OF_PMD, 1 }, { HUGETLB, ORDER_OF_PMD, 1 },	\
	{ SHMEM, 0, 100 }, { SHMEM, ORDER_OF_PMD, 1 },		\
	{ FILE_WRITTEN, 0, 50 },				\
}

FIXTURE_VARIANT_ADD(migrate_copy, anon_4k) { { PART_ANON_4K } };
FIXTURE_VARIANT_ADD(migrate_copy, anon_64k) { { PART_ANON_64K } };
FIXTURE_VARIANT_ADD(migrate_copy, anon_pmd) { { PART_ANON_PMD } };
FIXTURE_VARIANT_ADD(migrate_copy, hugetlb) { { PART_HUGETLB } };
FIXTURE_VARIANT_ADD(migrate_copy, shmem_4k) { { PART_SHMEM_4K } };
FIXTURE_VARIANT_ADD(migrate_copy, shmem_pmd) { { PART_SHMEM_PMD } };
FIXTURE_VARIANT_ADD(migrate_copy, file_4k) { { PART_FILE_4K } };
FIXTURE_VARIANT_ADD(migrate_copy, file_64k) { { PART_FILE_64K } };
FIXTURE_VARIANT_ADD(migrate_copy, file_read) { { PART_FILE_READ } };
FIXTURE_VARIANT_ADD(migrate_copy, xfs_64k) { { PART_XFS_64K } };
FIXTURE_VARIANT_ADD(migrate_copy, mixed) { PARTS_MIXED };

FIXTURE_VARIANT_ADD(migrate_copy, anon_4k_mt) {
	{ PART_ANON_4K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy, anon_64k_mt) {
	{ PART_ANON_64K_MT }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy, anon_pmd_mt) {
	{ PART_ANON_PMD_MT }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy, hugetlb_mt) {
	{ PART_HUGETLB }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy, shmem_4k_mt) {
	{ PART_SHMEM_4K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy, xfs_64k_mt) {
	{ PART_XFS_64K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy, mixed_mt) {
	PARTS_MIXED, .mt = true,
};

FIXTURE_SETUP(migrate_copy)
{
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	mem_alloc(_metadata, &self->mem, variant->part);
}

FIXTURE_TEARDOWN(migrate_copy)
{
	mem_free(&self->mem);
	teardown();
}

TEST_F_TIMEOUT(migrate_copy, lists, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	unsigned int nr, cpus;

	for (nr = 1; nr <= 3; nr++)
		bounce(_metadata, mem, nr);
	write_pages(mem);
	bounce(_metadata, mem, mem->nr_folios);
	if (!variant->mt)
		return;

	/* Fewer folios than CPUs, and CPUs that they cannot be divided by. */
	for (cpus = 2; cpus < max_copy_cpus(); cpus++) {
		write_knob_num(COPY_CPUS, cpus);
		for (nr = 1; nr <= 2; nr++)
			bounce(_metadata, mem, nr);
		bounce(_metadata, mem, mem->nr_folios);
	}
}

static const char * const counter_names[] = {
	"pgmigrate_success ",
	"pgmigrate_fail ",
	"thp_migration_success ",
	"thp_migration_fail ",
	"thp_migration_split ",
};

#define NR_COUNTERS ARRAY_SIZE(counter_names)

static void count_folio(const struct folio *folio, bool failed,
			unsigned long *counters)
{
	counters[0 + failed] += folio->nr_pages;
	if (!folio->hugetlb)
		counters[2 + failed] += folio->nr_pages * pagesize == pmdsize;
}

/* Move all, and say whether everything was counted as it should be. */
static bool counted(struct __test_metadata *_metadata, struct mem *mem,
		    int target, unsigned int failing)
{
	unsigned long expected[NR_COUNTERS] = {}, before[NR_COUNTERS];
	int *status = alloc(mem->nr_folios, sizeof(*status));
	bool right = true;
	unsigned int i, k;

	for (k = 0; k < mem->nr_folios; k++)
		count_folio(&mem->folio[k], k == failing, expected);
	for (i = 0; i < NR_COUNTERS; i++)
		before[i] = read_vmstat(counter_names[i]);
	move_some(mem, mem->nr_folios, target, status);
	for (i = 0; i < NR_COUNTERS; i++) {
		unsigned long delta = read_vmstat(counter_names[i]) - before[i];

		if (delta == expected[i])
			continue;
		TH_LOG("%s%lu, not %lu", counter_names[i], delta, expected[i]);
		right = false;
	}
	free(status);
	return right;
}

/* The counters are those of the system: others may be migrating. */
static void check_counted(struct __test_metadata *_metadata, struct mem *mem,
			  int target, unsigned int failing)
{
	unsigned int tries = 0;

	for (;;) {
		if (failing != -1U)
			fault_on_folio(mem, failing);
		if (counted(_metadata, mem, target, failing))
			break;
		fault_off();
		ASSERT_LT(++tries, MAX_TRIES);
		move_to(_metadata, mem, mem->nr_folios,
			target == node[0] ? node[1] : node[0]);
	}
	fault_off();
}

TEST_F_TIMEOUT(migrate_copy, counters, TIMEOUT_S)
{
	check_counted(_metadata, &self->mem, node[1], -1U);
}

TEST_F_TIMEOUT(migrate_copy, fail_counters, TIMEOUT_S)
{
	if (fault_supported(_metadata))
		check_counted(_metadata, &self->mem, node[1],
			      self->mem.nr_folios / 2);
}

/* Those that stay are as they were, and the others are on @target. */
static void check_stayed(struct __test_metadata *_metadata, struct mem *mem,
			 int target, const struct backing *before,
			 const bool *stays)
{
	struct backing *after = get_backing(mem);
	int *nodes = get_nodes(mem);
	unsigned int i, k;

	for (k = 0; k < mem->nr_folios; k++) {
		struct folio *folio = &mem->folio[k];

		ASSERT_EQ(folio_pages(after, folio->first, mem->nr_pages),
			  folio->nr_pages) {
			TH_LOG("folio %u was split", k);
		}
		for (i = folio->first; i < folio->first + folio->nr_pages; i++) {
			ASSERT_EQ(nodes[i] != target, stays[k]) {
				TH_LOG("folio %u page %u", k, i);
			}
			ASSERT_EQ(after[i].pfn == before[i].pfn, stays[k]);
			ASSERT_EQ(after[i].count, before[i].count);
		}
	}
	free(nodes);
	free(after);
	check_contents(_metadata, mem);
	check_settled(_metadata, mem);
}

/* Move all to @target, while the copy of page @i of folio @k fails. */
static void move_all_but_one(struct __test_metadata *_metadata,
			     struct mem *mem, int target, unsigned int k,
			     unsigned int i)
{
	int *status = alloc(mem->nr_folios, sizeof(*status));
	bool *stays = alloc(mem->nr_folios, sizeof(*stays));
	struct backing *before = get_backing(mem);
	unsigned int j;

	stays[k] = true;
	fault_on(before[mem->folio[k].first + i].pfn, 1);
	ASSERT_EQ(move_some(mem, mem->nr_folios, target, status), 1);
	fault_off();

	/* Who is told that some were not moved is not told which. */
	for (j = 0; j < mem->nr_folios; j++)
		ASSERT_EQ(status[j], -1);
	check_stayed(_metadata, mem, target, before, stays);
	free(before);
	free(stays);
	free(status);
}

/* Only one cannot be copied: wherever it is in the list. Later it can be. */
static void fail_one(struct __test_metadata *_metadata, struct mem *mem,
		     int target, unsigned int k, unsigned int i)
{
	move_all_but_one(_metadata, mem, target, k, i);
	write_pages(mem);
	move_to(_metadata, mem, mem->nr_folios, target);
	check_contents(_metadata, mem);
}

TEST_F_TIMEOUT(migrate_copy, fail_one, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	unsigned int last = mem->nr_folios - 1;
	unsigned int p, k;

	if (!fault_supported(_metadata))
		return;
	fail_one(_metadata, mem, node[1], 0, 0);
	fail_one(_metadata, mem, node[0], last, mem->folio[last].nr_pages - 1);
	for (p = 0; p < mem->nr_parts; p++) {
		struct part *part = &mem->part[p];

		k = find_folio(mem, part->first + part->nr_pages / 2);
		fail_one(_metadata, mem, node[!(p % 2)], k,
			 mem->folio[k].nr_pages / 2);
	}
}

static void fail_all(struct __test_metadata *_metadata, struct mem *mem)
{
	int *status = alloc(mem->nr_folios, sizeof(*status));

	fault_on(FAULT_ANY_PFN, 1);
	ASSERT_EQ(move_some(mem, mem->nr_folios, node[1], status),
		  mem->nr_folios);
	fault_off();
	free(status);
}

TEST_F_TIMEOUT(migrate_copy, fail_all, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	bool *stays = alloc(mem->nr_folios, sizeof(*stays));
	struct backing *before = get_backing(mem);
	struct part *part;
	unsigned int i;

	if (!fault_supported(_metadata))
		return;
	memset(stays, true, mem->nr_folios);
	fail_all(_metadata, mem);
	check_stayed(_metadata, mem, node[1], before, stays);
	write_pages(mem);

	/* What may not be written to is not writable after that either. */
	for (part = mem->part; part < mem->part + mem->nr_parts; part++)
		ASSERT_EQ(mprotect(part->start, part->len, PROT_READ), 0);
	fail_all(_metadata, mem);
	check_contents(_metadata, mem);
	for (i = 0; i < mem->nr_pages; i++)
		ASSERT_EQ(try_write(mem->page[i].addr), SIGSEGV);
	for (part = mem->part; part < mem->part + mem->nr_parts; part++)
		ASSERT_EQ(mprotect(part->start, part->len,
				   PROT_READ | PROT_WRITE), 0);
	write_pages(mem);

	/* All of them can be moved. */
	bounce(_metadata, mem, mem->nr_folios);
	free(before);
	free(stays);
}

/* Those that have failed are tried again, so it is not known which will stay. */
TEST_F_TIMEOUT(migrate_copy, fail_every_second, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	int *status = alloc(mem->nr_folios, sizeof(*status));
	bool *stays = alloc(mem->nr_folios, sizeof(*stays));
	struct backing *before = get_backing(mem);
	unsigned int k, nr_stay = 0;
	int *nodes;
	long ret;

	if (!fault_supported(_metadata))
		return;
	fault_on(FAULT_ANY_PFN, 2);
	ret = move_some(mem, mem->nr_folios, node[1], status);
	fault_off();

	nodes = get_nodes(mem);
	for (k = 0; k < mem->nr_folios; k++) {
		stays[k] = nodes[mem->folio[k].first] == node[0];
		nr_stay += stays[k];
	}
	ASSERT_EQ(ret, nr_stay);
	check_stayed(_metadata, mem, node[1], before, stays);
	write_pages(mem);
	move_to(_metadata, mem, mem->nr_folios, node[1]);
	bounce(_metadata, mem, mem->nr_folios);
	free(nodes);
	free(before);
	free(stays);
	free(status);
}

/* What is private stays private: the child sees none of our writes. */
static unsigned int nr_private_wrong(struct mem *mem)
{
	unsigned int i, wrong = 0;
	struct part *part;

	for (part = mem->part; part < mem->part + mem->nr_parts; part++) {
		if (is_shared(part))
			continue;
		for (i = part->first; i < part->first + part->nr_pages; i++)
			wrong += !holds(mem->page[i].addr, mem->page[i].id,
					mem->page[i].version);
	}
	return wrong;
}

TEST_F_TIMEOUT(migrate_copy, fail_shared, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	int request[2], reply[2], status;
	unsigned int wrong;
	char c = 0;
	pid_t pid;

	if (!fault_supported(_metadata))
		return;
	ASSERT_EQ(pipe(request), 0);
	ASSERT_EQ(pipe(reply), 0);
	pid = fork();
	ASSERT_GE(pid, 0);
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		wrong = nr_private_wrong(mem);
		if (write(reply[1], &c, 1) != 1 || read(request[0], &c, 1) != 1)
			_exit(255);
		wrong += nr_private_wrong(mem);
		_exit(wrong < 254 ? wrong : 254);
	}
	ASSERT_EQ(read(reply[0], &c, 1), 1);

	fail_all(_metadata, mem);
	check_contents(_metadata, mem);
	write_pages(mem);
	ASSERT_EQ(write(request[1], &c, 1), 1);
	ASSERT_EQ(waitpid(pid, &status, 0), pid);
	ASSERT_TRUE(WIFEXITED(status));
	ASSERT_EQ(WEXITSTATUS(status), 0);
	check_contents(_metadata, mem);
}

/* On another path: what could not be moved is an error of mbind(2). */
TEST_F_TIMEOUT(migrate_copy, fail_mbind, TIMEOUT_S)
{
	unsigned long mask = 1UL << node[1];
	struct mem *mem = &self->mem;
	unsigned int p, k, failing = mem->nr_folios / 2;
	unsigned int first = mem->folio[failing].first;
	bool *stays = alloc(mem->nr_folios, sizeof(*stays));
	struct backing *before = get_backing(mem);

	if (!fault_supported(_metadata))
		return;
	if (node[1] >= 8 * sizeof(mask) - 1)
		SKIP(return, "node %d does not fit in a word", node[1]);

	for (k = 0; k < mem->nr_folios; k++)
		stays[k] = k == failing;
	fault_on(before[first].pfn, 1);
	for (p = 0; p < mem->nr_parts; p++) {
		struct part *part = &mem->part[p];
		bool fails = first - part->first < part->nr_pages;
		int ret = mbind(part->start, part->len, MPOL_BIND, &mask,
				8 * sizeof(mask),
				MPOL_MF_MOVE_ALL | MPOL_MF_STRICT);

		ASSERT_EQ(ret, fails ? -1 : 0);
		if (fails)
			ASSERT_EQ(errno, EIO);
	}
	fault_off();
	check_stayed(_metadata, mem, node[1], before, stays);
	free(before);
	free(stays);
}

TEST_F_TIMEOUT(migrate_copy, fail_mlocked, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	unsigned long mlocked, unevictable;
	struct backing *backing;
	struct part *part;
	unsigned int k;

	if (!fault_supported(_metadata))
		return;
	for (part = mem->part; part < mem->part + mem->nr_parts; part++)
		ASSERT_EQ(mlock(part->start, part->len), 0);
	drain_lru_caches();
	check_settled(_metadata, mem);
	mlocked = read_stat("/proc/meminfo", "Mlocked:");
	unevictable = read_stat("/proc/meminfo", "Unevictable:");

	fail_all(_metadata, mem);
	move_all_but_one(_metadata, mem, node[1], mem->nr_folios / 2, 0);

	drain_lru_caches();
	check_settled(_metadata, mem);
	ASSERT_EQ(read_stat("/proc/meminfo", "Mlocked:"), mlocked);
	ASSERT_EQ(read_stat("/proc/meminfo", "Unevictable:"), unevictable);
	backing = get_backing(mem);
	for (k = 0; k < mem->nr_folios; k++) {
		uint64_t flags = backing[mem->folio[k].first].flags;

		if (mem->folio[k].hugetlb)
			continue;
		ASSERT_TRUE(flags & KPF_MLOCKED);
		ASSERT_TRUE(flags & KPF_UNEVICTABLE);
	}
	free(backing);
}

FIXTURE(migrate_copy_leaks)
{
	struct mem mem;
};

FIXTURE_VARIANT(migrate_copy_leaks)
{
	struct part part[MAX_PARTS];
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_copy_leaks, anon_64k) { { PART_ANON_64K } };
FIXTURE_VARIANT_ADD(migrate_copy_leaks, anon_pmd) { { PART_ANON_PMD } };
FIXTURE_VARIANT_ADD(migrate_copy_leaks, hugetlb) { { PART_HUGETLB } };
FIXTURE_VARIANT_ADD(migrate_copy_leaks, shmem_4k) { { PART_SHMEM_4K } };
FIXTURE_VARIANT_ADD(migrate_copy_leaks, file_64k) { { PART_FILE_64K } };
FIXTURE_VARIANT_ADD(migrate_copy_leaks, xfs_64k) { { PART_XFS_64K } };

FIXTURE_VARIANT_ADD(migrate_copy_leaks, anon_4k_mt) {
	{ PART_ANON_4K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_leaks, anon_pmd_mt) {
	{ PART_ANON_PMD_MT }, .mt = true,
};

FIXTURE_SETUP(migrate_copy_leaks)
{
	setup(_metadata, variant->mt);
}

FIXTURE_TEARDOWN(migrate_copy_leaks)
{
	cgroup_leave();
	mem_free(&self->mem);
	teardown();
}

/* Others take memory too, but not each time. What we leak, we leak each time. */
static bool lost_memory(struct __test_metadata *_metadata,
			unsigned long *not_lost)
{
	unsigned long before = *not_lost;

	*not_lost = node_not_lost(node[1]);
	if (*not_lost + LEAK_TOLERANCE > before)
		return false;
	TH_LOG("node %d has lost %lu bytes", node[1], before - *not_lost);
	return true;
}

/*
 * Let all fail so often that it shows in counters that are not exact when
 * either folio, or the charge, is leaked each time.
 */
TEST_F_TIMEOUT(migrate_copy_leaks, fail_all, TIMEOUT_S)
{
	unsigned long charge, not_lost, hugetlb, bytes, round;
	struct mem *mem = &self->mem;
	unsigned int tries = 0;
	const char *reason;

	if (!fault_supported(_metadata))
		return;
	/* To see what is charged to it. */
	reason = cgroup_enter("memory");
	if (reason)
		SKIP(return, "memory: %s", reason);
	charge = cgroup_read("memory.current");
	if (!mem_alloc(_metadata, mem, variant->part))
		return;
	hugetlb = hugetlb_free_pages(default_huge_page_size());

	fail_all(_metadata, mem);
	not_lost = node_not_lost(node[1]);
	bytes = mem->nr_pages * pagesize;
	do {
		ASSERT_LT(tries++, LEAK_TRIES);
		for (round = 0; round * bytes < LEAK_BYTES; round++)
			fail_all(_metadata, mem);
	} while (lost_memory(_metadata, &not_lost));
	ASSERT_EQ(hugetlb_free_pages(default_huge_page_size()), hugetlb);

	/* Nobody has kept a reference. */
	bounce(_metadata, mem, mem->nr_folios);
	check_settled(_metadata, mem);
	ASSERT_EQ(hugetlb_free_pages(default_huge_page_size()), hugetlb);

	tries = 0;
	not_lost = node_not_lost(node[1]);
	do {
		ASSERT_LT(tries++, LEAK_TRIES);
		for (round = 0; round * bytes < LEAK_BYTES; round++) {
			fail_all(_metadata, mem);
			mem_free(mem);
			if (!mem_alloc(_metadata, mem, variant->part))
				return;
		}
	} while (lost_memory(_metadata, &not_lost));
	mem_free(mem);
	drain_lru_caches();
	ASSERT_LT(cgroup_read("memory.current"), charge + LEAK_TOLERANCE);
}

/* Migration while the memory is used. */

struct race {
	struct mem *mem;
	atomic_bool stop;
	unsigned int nr;	/* which one of those who do the same */
	unsigned long nr_done;
	unsigned long nr_wrong;
	int err;
	int fd;
};

/* Move all folios there and back again: a few times at least. */
static unsigned long move_for(struct __test_metadata *_metadata,
			      struct mem *mem, uint64_t ns)
{
	int *status = alloc(mem->nr_folios, sizeof(*status));
	unsigned long moves = 0, nr_moved = 0;
	uint64_t start = now_ns();
	long ret;

	do {
		ret = move_some(mem, mem->nr_folios, node[++moves % 2], status);
		ASSERT_GE(ret, 0);
		nr_moved += mem->nr_folios - ret;
	} while (now_ns() - start < ns || moves < RACE_MOVES);
	free(status);
	return nr_moved;
}

static void race_start(struct __test_metadata *_metadata, struct race *race,
		       struct mem *mem, unsigned int nr, int fd,
		       pthread_t *thread, void *(*fn)(void *))
{
	*race = (struct race) { .mem = mem, .nr = nr, .fd = fd };
	ASSERT_EQ(racer_start(thread, fn, race, &race->stop), 0);
}

static void race_stop(struct __test_metadata *_metadata, struct race *race,
		      pthread_t thread)
{
	ASSERT_EQ(racer_stop(thread), 0);
	ASSERT_EQ(race->err, 0);
	ASSERT_EQ(race->nr_wrong, 0);
	ASSERT_GT(race->nr_done, 0);
}

/* Each writer has a counter in each page. */
static unsigned int counter_word(unsigned int i, unsigned int writer)
{
	unsigned int nr_words = pagesize / sizeof(uint64_t) / NR_WRITERS;

	return i * 61 % nr_words + writer * nr_words;
}

static void *write_counters(void *arg)
{
	struct race *race = arg;
	struct mem *mem = race->mem;
	unsigned int i;

	do {
		for (i = 0; i < mem->nr_pages; i++) {
			uint64_t *word = (uint64_t *)mem->page[i].addr +
					 counter_word(i, race->nr);

			__atomic_fetch_add(word, 1, __ATOMIC_RELAXED);
		}
		race->nr_done++;
	} while (!atomic_load(&race->stop));
	return NULL;
}

static void check_counters(struct __test_metadata *_metadata, struct mem *mem,
			   const struct race *races)
{
	unsigned int i, t;

	for (i = 0; i < mem->nr_pages; i++) {
		uint64_t *word = (uint64_t *)mem->page[i].addr;

		for (t = 0; t < NR_WRITERS; t++)
			word[counter_word(i, t)] -= races[t].nr_done;
	}
	check_contents(_metadata, mem);
}

/* No write is lost. */
static void race_with_writers(struct __test_metadata *_metadata,
			      struct mem *mem)
{
	struct race race[NR_WRITERS];
	pthread_t thread[NR_WRITERS];
	unsigned int t;

	for (t = 0; t < NR_WRITERS; t++)
		race_start(_metadata, &race[t], mem, t, -1, &thread[t],
			   write_counters);
	ASSERT_GT(move_for(_metadata, mem, RACE_NS), 0);
	for (t = 0; t < NR_WRITERS; t++)
		race_stop(_metadata, &race[t], thread[t]);
	check_counters(_metadata, mem, race);
	bounce(_metadata, mem, mem->nr_folios);
}

FIXTURE(migrate_copy_race)
{
	struct mem mem;
};

FIXTURE_VARIANT(migrate_copy_race)
{
	struct part part[MAX_PARTS];
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_copy_race, anon_4k) { { PART_ANON_4K } };
FIXTURE_VARIANT_ADD(migrate_copy_race, anon_pmd) { { PART_ANON_PMD } };
FIXTURE_VARIANT_ADD(migrate_copy_race, hugetlb) { { PART_HUGETLB } };
FIXTURE_VARIANT_ADD(migrate_copy_race, shmem_4k) { { PART_SHMEM_4K } };
FIXTURE_VARIANT_ADD(migrate_copy_race, mixed) { PARTS_MIXED };

FIXTURE_VARIANT_ADD(migrate_copy_race, anon_4k_mt) {
	{ PART_ANON_4K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_race, anon_pmd_mt) {
	{ PART_ANON_PMD_MT }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_race, shmem_4k_mt) {
	{ PART_SHMEM_4K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_race, mixed_mt) {
	PARTS_MIXED, .mt = true,
};

FIXTURE_SETUP(migrate_copy_race)
{
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	mem_alloc(_metadata, &self->mem, variant->part);
}

FIXTURE_TEARDOWN(migrate_copy_race)
{
	mem_free(&self->mem);
	teardown();
}

TEST_F_TIMEOUT(migrate_copy_race, writers, TIMEOUT_S)
{
	race_with_writers(_metadata, &self->mem);
}

/*
 * Writers that hold references to pages instead of mapping them: some of the
 * memory is written by process_vm_writev(2) and /proc/self/mem, some by direct
 * I/O. A file is not: not all filesystems can stand that.
 */
static struct page_state *next_chunk(struct mem *mem, unsigned int writer,
				     unsigned int *chunk)
{
	const unsigned int nr_chunks = mem->nr_pages / CHUNK_PAGES;
	const struct part *part;
	unsigned int i;

	do {
		*chunk = (*chunk + 1) % nr_chunks;
		i = *chunk * CHUNK_PAGES;
		part = mem->part;
		while (i - part->first >= part->nr_pages)
			part++;
	} while (*chunk % 3 != writer || is_file(part) ||
		 i + CHUNK_PAGES > part->first + part->nr_pages);
	return &mem->page[i];
}

static unsigned int nr_wrong_in_chunk(const struct page_state *page)
{
	unsigned int j, wrong = 0;

	for (j = 0; j < CHUNK_PAGES; j++)
		wrong += !holds(page[j].addr, page[j].id, page[j].version);
	return wrong;
}

static void *write_by_vm(void *arg)
{
	const size_t len = CHUNK_PAGES * pagesize;
	char *buf = alloc(1, len);
	struct race *race = arg;
	struct page_state *page;
	unsigned int j, chunk = 0;
	ssize_t ret;

	while (!race->err && !atomic_load(&race->stop)) {
		struct iovec local = { buf, len }, remote = { NULL, len };

		page = next_chunk(race->mem, race->nr, &chunk);
		for (j = 0; j < CHUNK_PAGES; j++)
			fill(buf + j * pagesize, page[j].id, ++page[j].version);
		remote.iov_base = page->addr;
		ret = -1;
		if (race->nr_done % 2)
			ret = process_vm_writev(getpid(), &local, 1, &remote, 1,
						0);
		if (ret < 0)
			ret = pwrite(race->fd, buf, len, (uintptr_t)page->addr);
		if (ret != len)
			race->err = errno ?: EIO;
		race->nr_wrong += nr_wrong_in_chunk(page);
		race->nr_done++;
	}
	free(buf);
	return NULL;
}

/* All at once, so that they have pages pinned for most of the time. */
static void *write_by_direct_io(void *arg)
{
	const size_t len = CHUNK_PAGES * pagesize;
	struct page_state *page[DIO_CHUNKS];
	struct iovec iov[DIO_CHUNKS];
	struct race *race = arg;
	unsigned int c, j, chunk = 0;

	while (!race->err && !atomic_load(&race->stop)) {
		/* Each chunk of the file has contents of its own. */
		unsigned int first = race->nr_done % DIO_CHUNKS;

		for (c = 0; c < DIO_CHUNKS; c++) {
			page[c] = next_chunk(race->mem, race->nr, &chunk);
			iov[c] = (struct iovec) { page[c]->addr, len };
			for (j = 0; j < CHUNK_PAGES; j++) {
				page[c][j].id = DIO_FIRST_ID +
						(first + c) * CHUNK_PAGES + j;
				page[c][j].version = 0;
			}
		}
		if (preadv(race->fd, iov, DIO_CHUNKS, first * len) !=
		    DIO_CHUNKS * len)
			race->err = errno ?: EIO;
		for (c = 0; c < DIO_CHUNKS; c++)
			race->nr_wrong += nr_wrong_in_chunk(page[c]);
		race->nr_done++;
	}
	return NULL;
}

static int open_direct(struct __test_metadata *_metadata)
{
	const unsigned int nr = 2 * DIO_CHUNKS * CHUNK_PAGES;
	int fd = open(".", O_TMPFILE | O_RDWR, 0600);
	char *buf = alloc(nr, pagesize);
	unsigned int i;

	if (fd < 0)
		return -1;
	for (i = 0; i < nr; i++)
		fill(buf + i * pagesize, DIO_FIRST_ID + i, 0);
	ASSERT_EQ(write(fd, buf, nr * pagesize), nr * pagesize);
	ASSERT_EQ(fsync(fd), 0);
	free(buf);
	if (fcntl(fd, F_SETFL, O_DIRECT)) {
		close(fd);
		return -1;
	}
	return fd;
}

TEST_F_TIMEOUT(migrate_copy_race, references, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	struct race vm, direct;
	pthread_t vm_thread, direct_thread;
	int mem_fd, fd = open_direct(_metadata);

	if (fd < 0)
		SKIP(return, "no direct I/O in the current directory");
	mem_fd = open("/proc/self/mem", O_RDWR);
	ASSERT_GE(mem_fd, 0);

	race_start(_metadata, &vm, mem, 0, mem_fd, &vm_thread, write_by_vm);
	race_start(_metadata, &direct, mem, 1, fd, &direct_thread,
		   write_by_direct_io);
	ASSERT_GT(move_for(_metadata, mem, 2 * RACE_NS), 0);
	race_stop(_metadata, &vm, vm_thread);
	race_stop(_metadata, &direct, direct_thread);
	close(mem_fd);
	close(fd);
	check_contents(_metadata, mem);
	bounce(_metadata, mem, mem->nr_folios);
}

/*
 * A reference that is held for as long as we like: process_vm_writev(2) has got
 * the page to write to, and has to wait for the page that it copies from, which
 * is missing. It gets that while the former is being moved.
 */
struct hold {
	struct page_state *page;	/* to be written to */
	char *missing;
	char *buf;			/* what is missing */
	int uffd;
	atomic_bool go;
	uint64_t delay_ns;
	int err;
};

static void *write_from_missing(void *arg)
{
	struct hold *hold = arg;
	struct iovec local = { hold->missing, pagesize };
	struct iovec remote = { hold->page->addr, pagesize };

	if (process_vm_writev(getpid(), &local, 1, &remote, 1, 0) != pagesize)
		hold->err = errno ?: EIO;
	return NULL;
}

static void *supply_missing(void *arg)
{
	struct hold *hold = arg;
	struct uffdio_copy copy = {
		.src = (uintptr_t)hold->buf,
		.dst = (uintptr_t)hold->missing,
		.len = pagesize,
	};
	uint64_t start;

	while (!atomic_load(&hold->go))
		;
	start = now_ns();
	while (now_ns() - start < hold->delay_ns)
		;
	if (ioctl(hold->uffd, UFFDIO_COPY, &copy))
		ksft_exit_fail_perror("UFFDIO_COPY failed");
	return NULL;
}

static int open_uffd(struct __test_metadata *_metadata)
{
	struct uffdio_api api = { .api = UFFD_API };
	int uffd = syscall(__NR_userfaultfd, O_CLOEXEC);

	if (uffd < 0)
		SKIP(return -1, "no userfaultfd: %s", strerror(errno));
	ASSERT_EQ(ioctl(uffd, UFFDIO_API, &api), 0);
	return uffd;
}

/* Return how long the move took. */
static uint64_t move_while_held(struct __test_metadata *_metadata,
				struct mem *mem, struct hold *hold, int target)
{
	int *status = alloc(mem->nr_folios, sizeof(*status));
	pthread_t writer, supplier;
	struct uffd_msg msg;
	uint64_t start, took;

	fill(hold->buf, hold->page->id, ++hold->page->version);
	ASSERT_EQ(pthread_create(&writer, NULL, write_from_missing, hold), 0);
	ASSERT_EQ(read(hold->uffd, &msg, sizeof(msg)), sizeof(msg));
	ASSERT_EQ(msg.arg.pagefault.address, (uintptr_t)hold->missing);
	ASSERT_EQ(pthread_create(&supplier, NULL, supply_missing, hold), 0);

	start = now_ns();
	atomic_store(&hold->go, true);
	ASSERT_GE(move_some(mem, mem->nr_folios, target, status), 0);
	took = now_ns() - start;
	ASSERT_EQ(pthread_join(supplier, NULL), 0);
	ASSERT_EQ(pthread_join(writer, NULL), 0);
	ASSERT_EQ(hold->err, 0);
	check_contents(_metadata, mem);
	free(status);
	return took;
}

FIXTURE(migrate_copy_hold)
{
	struct mem mem;
};

FIXTURE_VARIANT(migrate_copy_hold)
{
	struct part part[MAX_PARTS];
	bool mt;
};

/* Not of anonymous memory alone: a pinned page of that is not even unmapped. */
FIXTURE_VARIANT_ADD(migrate_copy_hold, shmem_4k) { { PART_SHMEM_4K } };
FIXTURE_VARIANT_ADD(migrate_copy_hold, shmem_64k) { { PART_SHMEM_64K } };

FIXTURE_VARIANT_ADD(migrate_copy_hold, shmem_4k_mt) {
	{ PART_SHMEM_4K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_hold, shmem_64k_mt) {
	{ PART_SHMEM_64K }, .mt = true,
};

FIXTURE_SETUP(migrate_copy_hold)
{
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	mem_alloc(_metadata, &self->mem, variant->part);
}

FIXTURE_TEARDOWN(migrate_copy_hold)
{
	mem_free(&self->mem);
	teardown();
}

TEST_F_TIMEOUT(migrate_copy_hold, write_late, TIMEOUT_S)
{
	const size_t len = NR_HOLDS * pagesize;
	struct mem *mem = &self->mem;
	struct part *part = mem->part;
	char *buf = alloc(1, pagesize);
	uint64_t took = 0;
	unsigned int n;
	char *missing;
	int uffd;

	if (process_vm_writev(getpid(), NULL, 0, NULL, 0, 0))
		SKIP(return, "no process_vm_writev(): %s", strerror(errno));
	uffd = open_uffd(_metadata);
	if (uffd < 0)
		return;
	missing = mmap(NULL, len, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(missing, MAP_FAILED);
	ASSERT_EQ(uffd_register(uffd, missing, len, true, false, false), 0);

	for (n = 0; n < NR_HOLDS; n++) {
		unsigned int i = part->first + n * 61 % part->nr_pages;
		struct hold hold = {
			.page = &mem->page[i],
			.missing = missing + n * pagesize,
			.buf = buf,
			.uffd = uffd,
			.delay_ns = took * (n % 8) / 8,
		};

		took = move_while_held(_metadata, mem, &hold, node[!(n % 2)]);
	}
	close(uffd);
	munmap(missing, len);
	free(buf);
	bounce(_metadata, mem, mem->nr_folios);
}

/*
 * Reading and writing a file takes no page table, and reading does not even
 * take the lock of the folio: whatever the page cache points to is read.
 */

FIXTURE(migrate_copy_file)
{
	struct mem mem;
};

FIXTURE_VARIANT(migrate_copy_file)
{
	struct part part[MAX_PARTS];
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_copy_file, shmem_4k) { { PART_SHMEM_4K } };
FIXTURE_VARIANT_ADD(migrate_copy_file, shmem_pmd) { { PART_SHMEM_PMD } };
FIXTURE_VARIANT_ADD(migrate_copy_file, file_4k) { { PART_FILE_4K } };
FIXTURE_VARIANT_ADD(migrate_copy_file, file_64k) { { PART_FILE_64K } };
FIXTURE_VARIANT_ADD(migrate_copy_file, file_read) { { PART_FILE_READ } };
FIXTURE_VARIANT_ADD(migrate_copy_file, xfs_4k) { { PART_XFS_4K } };
FIXTURE_VARIANT_ADD(migrate_copy_file, xfs_64k) { { PART_XFS_64K } };

FIXTURE_VARIANT_ADD(migrate_copy_file, shmem_pmd_mt) {
	{ PART_SHMEM_PMD }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_file, file_64k_mt) {
	{ PART_FILE_64K }, .mt = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_file, xfs_64k_mt) {
	{ PART_XFS_64K }, .mt = true,
};

FIXTURE_SETUP(migrate_copy_file)
{
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	mem_alloc(_metadata, &self->mem, variant->part);
}

FIXTURE_TEARDOWN(migrate_copy_file)
{
	mem_free(&self->mem);
	teardown();
}

/* Every eighth page is written to. */
static bool page_is_written(unsigned int i)
{
	return i % 8 == 7;
}

static void *read_file_pages(void *arg)
{
	char *buf = alloc(CHUNK_PAGES, pagesize);
	struct race *race = arg;
	struct mem *mem = race->mem;
	unsigned int i, j, seed = race->nr;

	while (!race->err && !atomic_load(&race->stop)) {
		i = rand_r(&seed) % (mem->nr_pages - CHUNK_PAGES);
		if (pread(race->fd, buf, CHUNK_PAGES * pagesize,
			  i * pagesize) != CHUNK_PAGES * pagesize)
			race->err = errno ?: EIO;
		for (j = 0; j < CHUNK_PAGES; j++, i++)
			if (!page_is_written(i))
				race->nr_wrong +=
					!holds(buf + j * pagesize, i, 1);
		race->nr_done++;
	}
	free(buf);
	return NULL;
}

static void *write_file_pages(void *arg)
{
	char *buf = alloc(1, pagesize);
	struct race *race = arg;
	struct mem *mem = race->mem;
	unsigned int i = 0;

	while (!race->err && !atomic_load(&race->stop)) {
		struct page_state *page;

		do {
			i = (i + 1) % mem->nr_pages;
		} while (!page_is_written(i));
		page = &mem->page[i];
		fill(buf, page->id, ++page->version);
		if (pwrite(race->fd, buf, pagesize, i * pagesize) != pagesize ||
		    pread(race->fd, buf, pagesize, i * pagesize) != pagesize)
			race->err = errno ?: EIO;
		race->nr_wrong += !holds(buf, page->id, page->version);
		race->nr_done++;
	}
	free(buf);
	return NULL;
}

TEST_F_TIMEOUT(migrate_copy_file, readers, TIMEOUT_S)
{
	void *(*fn[])(void *) = {
		read_file_pages, read_file_pages, write_file_pages,
	};
	struct race race[ARRAY_SIZE(fn)];
	pthread_t thread[ARRAY_SIZE(fn)];
	struct mem *mem = &self->mem;
	unsigned int t;

	for (t = 0; t < ARRAY_SIZE(fn); t++)
		race_start(_metadata, &race[t], mem, t, mem->part[0].fd,
			   &thread[t], fn[t]);
	ASSERT_GT(move_for(_metadata, mem, 2 * RACE_NS), 0);
	for (t = 0; t < ARRAY_SIZE(fn); t++)
		race_stop(_metadata, &race[t], thread[t]);
	check_contents(_metadata, mem);
	bounce(_metadata, mem, mem->nr_folios);
}

TEST_F_TIMEOUT(migrate_copy_file, writers, TIMEOUT_S)
{
	race_with_writers(_metadata, &self->mem);
}

/*
 * The ring of an AIO context is migrated by a callback of its own. Events are
 * written to it all the time, and none may be lost.
 */

struct aio_ring_head {
	unsigned int id;
	unsigned int nr;
	unsigned int head;
	unsigned int tail;
	unsigned int magic;
	unsigned int compat_features;
	unsigned int incompat_features;
	unsigned int header_length;
};

#define AIO_RING_MAGIC	0xa10a10a1

FIXTURE(migrate_copy_aio)
{
	aio_context_t ctx;
};

FIXTURE_VARIANT(migrate_copy_aio)
{
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_copy_aio, off) { };
FIXTURE_VARIANT_ADD(migrate_copy_aio, mt) { .mt = true };

FIXTURE_SETUP(migrate_copy_aio)
{
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	if (syscall(__NR_io_setup, 1000, &self->ctx))
		SKIP(return, "no AIO: %s", strerror(errno));
}

FIXTURE_TEARDOWN(migrate_copy_aio)
{
	syscall(__NR_io_destroy, self->ctx);
	teardown();
}

struct aio_race {
	struct race race;	/* fd: what is read */
	aio_context_t ctx;
};

static void *read_by_aio(void *arg)
{
	const size_t len = CHUNK_PAGES * pagesize;
	struct timespec timeout = { .tv_sec = AIO_TIMEOUT_S };
	struct aio_race *aio = arg;
	struct race *race = &aio->race;
	struct io_event events[AIO_EVENTS];
	struct iocb iocb[AIO_EVENTS], *iocbs[AIO_EVENTS];
	char *buf = mmap(NULL, AIO_EVENTS * len, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned int i, n;

	while (!race->err && !race->nr_wrong && !atomic_load(&race->stop)) {
		unsigned int seen = 0;

		for (i = 0; i < AIO_EVENTS; i++) {
			iocbs[i] = &iocb[i];
			iocb[i] = (struct iocb) {
				.aio_data = race->nr_done * AIO_EVENTS + i,
				.aio_lio_opcode = IOCB_CMD_PREAD,
				.aio_fildes = race->fd,
				.aio_buf = (uintptr_t)buf + i * len,
				.aio_nbytes = len,
				.aio_offset = i * len,
			};
		}
		if (syscall(__NR_io_submit, aio->ctx, AIO_EVENTS, iocbs) !=
		    AIO_EVENTS) {
			race->err = errno ?: EIO;
			break;
		}
		/* All of them, once each. */
		if (syscall(__NR_io_getevents, aio->ctx, AIO_EVENTS, AIO_EVENTS,
			    events, &timeout) != AIO_EVENTS) {
			race->err = ETIMEDOUT;
			break;
		}
		for (i = 0; i < AIO_EVENTS; i++) {
			n = events[i].data - race->nr_done * AIO_EVENTS;
			race->nr_wrong += n >= AIO_EVENTS || seen & 1U << n ||
					  events[i].res != len;
			if (n < AIO_EVENTS)
				seen |= 1U << n;
		}
		race->nr_done++;
	}
	munmap(buf, AIO_EVENTS * len);
	return NULL;
}

/* Return the number of pages moved. */
static unsigned int move_range(struct __test_metadata *_metadata, char *start,
			       unsigned int nr, int target)
{
	void **pages = alloc(nr, sizeof(*pages));
	int *nodes = alloc(nr, sizeof(*nodes));
	int *status = alloc(nr, sizeof(*status));
	unsigned int i, nr_moved = 0;

	for (i = 0; i < nr; i++) {
		pages[i] = start + i * pagesize;
		nodes[i] = target;
	}
	ASSERT_GE(move_pages(0, nr, pages, nodes, status, MPOL_MF_MOVE), 0);
	ASSERT_EQ(move_pages(0, nr, pages, NULL, status, 0), 0);
	for (i = 0; i < nr; i++)
		nr_moved += status[i] == target;
	free(status);
	free(nodes);
	free(pages);
	return nr_moved;
}

TEST_F_TIMEOUT(migrate_copy_aio, ring, TIMEOUT_S)
{
	struct aio_ring_head *head = (void *)self->ctx;
	char *ring = (char *)self->ctx;
	unsigned long moves = 0, nr_moved = 0, from, to;
	unsigned int nr = (sizeof(*head) + head->nr * sizeof(struct io_event)) /
			  pagesize;
	uint64_t start = now_ns();
	struct aio_race aio = { .ctx = self->ctx };
	pthread_t thread;

	ASSERT_EQ(head->magic, AIO_RING_MAGIC);
	ASSERT_GT(nr, 1);
	aio.race.fd = open_direct(_metadata);
	if (aio.race.fd < 0)
		SKIP(return, "no direct I/O in the current directory");
	force_read_pages(ring, nr, pagesize);
	ASSERT_EQ(racer_start(&thread, read_by_aio, &aio, &aio.race.stop), 0);

	do {
		nr_moved += move_range(_metadata, ring, nr, node[++moves % 2]);
	} while (now_ns() - start < RACE_NS);
	ASSERT_GT(nr_moved, 0);

	/* All that we have goes along. */
	for (start = now_ns(); now_ns() - start < RACE_NS; moves++) {
		from = 1UL << node[moves % 2];
		to = 1UL << node[!(moves % 2)];
		ASSERT_GE(migrate_pages(0, 8 * sizeof(from), &from, &to), 0);
	}
	race_stop(_metadata, &aio.race, thread);
	ASSERT_EQ(head->magic, AIO_RING_MAGIC);
	close(aio.race.fd);
}

/*
 * Who pins pages of a memfd finds them in the page cache, and need not hold on to
 * them for long. A write must not be lost when that happens between the copy and
 * the end of the migration.
 */

FIXTURE(migrate_copy_udmabuf)
{
	int dev;
	int memfd;
	char *start;
};

FIXTURE_VARIANT(migrate_copy_udmabuf)
{
	bool mt;
};

FIXTURE_VARIANT_ADD(migrate_copy_udmabuf, off) { };
FIXTURE_VARIANT_ADD(migrate_copy_udmabuf, mt) { .mt = true };

FIXTURE_SETUP(migrate_copy_udmabuf)
{
	unsigned int i;
	size_t len;

	self->memfd = -1;
	self->start = MAP_FAILED;
	self->dev = open("/dev/udmabuf", O_RDWR);
	setup(_metadata, variant->mt);
	if (_metadata->exit_code)
		return;
	if (self->dev < 0)
		SKIP(return, "no /dev/udmabuf");
	len = UDMABUF_PAGES * pagesize;
	self->memfd = memfd_create("udmabuf", MFD_ALLOW_SEALING);
	ASSERT_GE(self->memfd, 0);
	ASSERT_EQ(ftruncate(self->memfd, len), 0);
	ASSERT_EQ(fcntl(self->memfd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	self->start = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED,
			   self->memfd, 0);
	ASSERT_NE(self->start, MAP_FAILED);
	for (i = 0; i < UDMABUF_PAGES; i++)
		self->start[i * pagesize] = 0;
}

FIXTURE_TEARDOWN(migrate_copy_udmabuf)
{
	if (self->start != MAP_FAILED)
		munmap(self->start, UDMABUF_PAGES * pagesize);
	close(self->memfd);
	close(self->dev);
	teardown();
}

struct udmabuf_race {
	struct race race;	/* fd: /dev/udmabuf */
	int memfd;
	char *start;
};

static void *write_by_udmabuf(void *arg)
{
	struct udmabuf_race *udmabuf = arg;
	struct race *race = &udmabuf->race;

	while (!race->err && !race->nr_wrong && !atomic_load(&race->stop)) {
		const size_t offset = race->nr_done * 61 % UDMABUF_PAGES *
				      pagesize;
		const uint64_t value = ++race->nr_done;
		struct udmabuf_create create = {
			.memfd = udmabuf->memfd,
			.offset = offset,
			.size = pagesize,
		};
		uint64_t *mapped = (uint64_t *)(udmabuf->start + offset);
		uint64_t *word = MAP_FAILED;
		int fd = ioctl(race->fd, UDMABUF_CREATE, &create);

		if (fd >= 0)
			word = mmap(NULL, pagesize, PROT_READ | PROT_WRITE,
				    MAP_SHARED, fd, 0);
		if (word == MAP_FAILED) {
			race->err = errno;
			break;
		}
		__atomic_store_n(word, value, __ATOMIC_RELAXED);
		munmap(word, pagesize);
		close(fd);
		race->nr_wrong += value !=
				  __atomic_load_n(mapped, __ATOMIC_RELAXED);
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_copy_udmabuf, short_pins, TIMEOUT_S)
{
	struct udmabuf_race udmabuf = {
		.race.fd = self->dev,
		.memfd = self->memfd,
		.start = self->start,
	};
	unsigned long moves = 0, nr_moved = 0;
	uint64_t start = now_ns();
	pthread_t thread;

	ASSERT_EQ(racer_start(&thread, write_by_udmabuf, &udmabuf,
			      &udmabuf.race.stop), 0);
	do {
		nr_moved += move_range(_metadata, self->start, UDMABUF_PAGES,
				       node[++moves % 2]);
	} while (now_ns() - start < UDMABUF_NS);
	ASSERT_GT(nr_moved, 0);
	race_stop(_metadata, &udmabuf.race, thread);
}

/* Copying with several CPUs. */

FIXTURE(migrate_copy_mt)
{
	struct mem mem;
	int cpu_fd;
};

FIXTURE_VARIANT(migrate_copy_mt)
{
	struct part part[MAX_PARTS];
	bool memory_only;	/* node[0] has no CPU */
	bool pull;
};

FIXTURE_VARIANT_ADD(migrate_copy_mt, push) { { PART_ANON_PMD } };
FIXTURE_VARIANT_ADD(migrate_copy_mt, pull) {
	{ PART_ANON_PMD }, .pull = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_mt, memory_only_push) {
	{ PART_ANON_PMD }, .memory_only = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_mt, memory_only_pull) {
	{ PART_ANON_PMD }, .memory_only = true, .pull = true,
};

FIXTURE_VARIANT_ADD(migrate_copy_mt, mixed) { PARTS_MIXED };

static bool use_memory_only_node(struct __test_metadata *_metadata)
{
	int n;

	for (n = 0; n <= numa_max_node(); n++)
		if (numa_bitmask_isbitset(numa_all_nodes_ptr, n) &&
		    !node_has_cpu(n))
			break;
	if (n > numa_max_node())
		SKIP(return false, "no node with memory and without CPUs");
	if (node[0] != n)
		node[1] = node[0];
	node[0] = n;
	numa_set_preferred(n);
	return true;
}

FIXTURE_SETUP(migrate_copy_mt)
{
	self->cpu_fd = -1;
	setup(_metadata, true);
	if (_metadata->exit_code)
		return;
	if (variant->memory_only && !use_memory_only_node(_metadata))
		return;
	ASSERT_EQ(write_knob(COPY_NODE, variant->pull ? "destination" :
						       "source"), 0);
	mem_alloc(_metadata, &self->mem, variant->part);
}

FIXTURE_TEARDOWN(migrate_copy_mt)
{
	mem_free(&self->mem);
	if (self->cpu_fd >= 0 && write(self->cpu_fd, "1", 1) != 1)
		TH_LOG("a CPU stays offline");
	teardown();
}

/* Only CPUs that are idle help, so try a few times. */
TEST_F_TIMEOUT(migrate_copy_mt, helpers, TIMEOUT_S)
{
	unsigned long mt = read_vmstat("pgmigrate_copy_mt ");
	unsigned long helper = read_vmstat("pgmigrate_copy_helper ");
	struct mem *mem = &self->mem;
	unsigned int tries = 0;

	do {
		ASSERT_LT(tries++, MT_TRIES);
		bounce(_metadata, mem, mem->nr_folios);
	} while (read_vmstat("pgmigrate_copy_helper ") == helper);

	mt = read_vmstat("pgmigrate_copy_mt ") - mt;
	helper = read_vmstat("pgmigrate_copy_helper ") - helper;
	ASSERT_LE(mt, 2UL * tries * mem->nr_pages);
	ASSERT_LE(helper, mt);

	write_knob_num(COPY_CPUS, 1);
	mt = read_vmstat("pgmigrate_copy_mt ");
	bounce(_metadata, mem, mem->nr_folios);
	ASSERT_EQ(read_vmstat("pgmigrate_copy_mt "), mt);

	write_knob_num(COPY_CPUS, max_copy_cpus());
	write_knob_num(COPY_MIN_BYTES, mem->nr_pages * pagesize + 1);
	bounce(_metadata, mem, mem->nr_folios);
	ASSERT_EQ(read_vmstat("pgmigrate_copy_mt "), mt);
}

static void trace_path(char *path, size_t len, const char *name)
{
	const char *dir = "/sys/kernel/tracing";

	if (access("/sys/kernel/tracing/events", F_OK))
		dir = "/sys/kernel/debug/tracing";
	snprintf(path, len, "%s/%s", dir, name);
}

/* Return how many events there were. */
static unsigned int nr_trace_events(void)
{
	unsigned int nr = 0;
	char line[512];
	FILE *fp;

	trace_path(line, sizeof(line), "trace");
	fp = fopen(line, "r");
	if (!fp)
		ksft_exit_fail_perror("trace");
	while (fgets(line, sizeof(line), fp))
		nr += !!strstr(line, "mm_copy_pages_mt: ");
	fclose(fp);
	return nr;
}

TEST_F_TIMEOUT(migrate_copy_mt, tracepoint, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	unsigned int nr, tries = 0;
	char path[128];

	trace_path(path, sizeof(path), EVENT_DIR "enable");
	if (access(path, W_OK))
		SKIP(return, "no %s", path);
	write_num(path, 1);
	do {
		bounce(_metadata, mem, mem->nr_folios);
		nr = nr_trace_events();
	} while (!nr && ++tries < MT_TRIES);
	write_num(path, 0);
	ASSERT_GT(nr, 0);
}

/* To switch it off or on patches code, which not all emulators get right. */
#define SWITCH_INTERVAL	64

static void *change_knobs(void *arg)
{
	static const char * const cpus[] = { "2", "3", "4" };
	static const char * const bytes[] = { "4096", "1048576", "65536" };
	static const char * const nodes[] = { "source", "destination" };
	struct race *race = arg;
	unsigned long i;

	while (!race->err && !atomic_load(&race->stop)) {
		i = race->nr_done++;
		race->err = write_knob(COPY_CPUS, i % SWITCH_INTERVAL ?
						  cpus[i % 3] : "1");
		/* There may be fewer CPUs, or larger pages. */
		if (race->err == EINVAL)
			race->err = 0;
		write_knob(COPY_MIN_BYTES, bytes[i % 3]);
		write_knob(COPY_NODE, nodes[i % 2]);
		usleep(1000);
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_copy_mt, knobs_changed, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	struct race knobs, writer[NR_WRITERS];
	pthread_t knobs_thread, thread;

	memset(writer, 0, sizeof(writer));
	race_start(_metadata, &knobs, mem, 0, -1, &knobs_thread, change_knobs);
	race_start(_metadata, &writer[0], mem, 0, -1, &thread, write_counters);
	ASSERT_GT(move_for(_metadata, mem, 2 * RACE_NS), 0);
	race_stop(_metadata, &writer[0], thread);
	race_stop(_metadata, &knobs, knobs_thread);
	check_counters(_metadata, mem, writer);
}

static void *toggle_cpu(void *arg)
{
	struct race *race = arg;

	while (!race->err && !atomic_load(&race->stop)) {
		if (pwrite(race->fd, "0", 1, 0) != 1 ||
		    pwrite(race->fd, "1", 1, 0) != 1)
			race->err = errno;
		if (race->err == EBUSY)
			race->err = 0;
		race->nr_done++;
	}
	return NULL;
}

TEST_F_TIMEOUT(migrate_copy_mt, cpu_offline, TIMEOUT_S)
{
	struct mem *mem = &self->mem;
	pthread_t thread;
	struct race race;
	char path[64];

	snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%ld/online",
		 sysconf(_SC_NPROCESSORS_CONF) - 1);
	self->cpu_fd = open(path, O_WRONLY);
	if (self->cpu_fd < 0)
		SKIP(return, "no %s", path);
	race_start(_metadata, &race, mem, 0, self->cpu_fd, &thread, toggle_cpu);
	ASSERT_GT(move_for(_metadata, mem, 2 * RACE_NS), 0);
	race_stop(_metadata, &race, thread);
	check_contents(_metadata, mem);
}

FIXTURE(migrate_copy_knobs)
{
};

FIXTURE_SETUP(migrate_copy_knobs)
{
	if (geteuid())
		SKIP(return, "not root");
	if (access(KNOB_DIR, F_OK))
		SKIP(return, "no " KNOB_DIR);
}

FIXTURE_TEARDOWN(migrate_copy_knobs)
{
	restore_knobs();
}

static void check_good(struct __test_metadata *_metadata, enum knob knob,
		       const char *value, const char *shown)
{
	char now[64];

	ASSERT_EQ(write_knob(knob, value), 0);
	read_knob(knob, now, sizeof(now));
	ASSERT_STREQ(now, shown);
}

static void check_bad(struct __test_metadata *_metadata, enum knob knob,
		      const char *value)
{
	char before[64], after[64];

	read_knob(knob, before, sizeof(before));
	ASSERT_EQ(write_knob(knob, value), EINVAL) {
		TH_LOG("%s: \"%s\"", knob_paths[knob], value);
	}
	read_knob(knob, after, sizeof(after));
	ASSERT_STREQ(after, before);
}

static const char * const bad_numbers[] = {
	"0", "-1", "-4096", "four", "x", " ", "\n", "4 4", "4,4", "4x", "4096x",
	"4\n4", "4.5", "1e9", "99999999999999999999", "18446744073709551616",
	"18446744073709551615", "-18446744073709551612", "0x", "--4", "4-",
};

TEST_F(migrate_copy_knobs, copy_cpus)
{
	unsigned long nr = sysconf(_SC_NPROCESSORS_CONF);
	unsigned int i;
	char value[32];

	check_good(_metadata, COPY_CPUS, "1", "1");
	for (i = 0; i < ARRAY_SIZE(bad_numbers); i++)
		check_bad(_metadata, COPY_CPUS, bad_numbers[i]);
	check_bad(_metadata, COPY_CPUS, "1048576");
	check_bad(_metadata, COPY_CPUS, "4294967297");

	snprintf(value, sizeof(value), "%lu", nr);
	check_good(_metadata, COPY_CPUS, value, value);
	for (i = 0; i < ARRAY_SIZE(bad_numbers); i++)
		check_bad(_metadata, COPY_CPUS, bad_numbers[i]);
	check_good(_metadata, COPY_CPUS, "1\n", "1");
}

TEST_F(migrate_copy_knobs, copy_min_bytes)
{
	unsigned long size = getpagesize();
	unsigned long total = sysconf(_SC_PHYS_PAGES) * size;
	char value[32];
	unsigned int i;

	snprintf(value, sizeof(value), "%lu", size);
	check_good(_metadata, COPY_MIN_BYTES, value, value);
	for (i = 0; i < ARRAY_SIZE(bad_numbers); i++)
		check_bad(_metadata, COPY_MIN_BYTES, bad_numbers[i]);
	snprintf(value, sizeof(value), "%lu", size - 1);
	check_bad(_metadata, COPY_MIN_BYTES, value);
	snprintf(value, sizeof(value), "%lu", 4 * total);
	check_bad(_metadata, COPY_MIN_BYTES, value);

	check_good(_metadata, COPY_MIN_BYTES, "1048576\n", "1048576");
	snprintf(value, sizeof(value), "%lu", total / 2);
	check_good(_metadata, COPY_MIN_BYTES, value, value);
}

TEST_F(migrate_copy_knobs, copy_node)
{
	static const char * const bad[] = {
		"\n", " ", "0", "1", "-1", "x", "sour", "sources", "Source",
		"source destination", "[source] destination", "[source]",
		"source\ndestination", "destinatio", "destination1", "sourcex",
	};
	unsigned int i, n;

	for (n = 0; n < 2; n++) {
		if (n)
			check_good(_metadata, COPY_NODE, "source\n",
				   "[source] destination");
		else
			check_good(_metadata, COPY_NODE, "destination",
				   "source [destination]");
		for (i = 0; i < ARRAY_SIZE(bad); i++)
			check_bad(_metadata, COPY_NODE, bad[i]);
	}
	check_good(_metadata, COPY_NODE, "source", "[source] destination");
}

/* Neither an empty write nor an empty string changes anything. */
TEST_F(migrate_copy_knobs, empty)
{
	char before[64], after[64];
	enum knob knob;
	int fd;

	for (knob = 0; knob < NR_KNOBS; knob++) {
		read_knob(knob, before, sizeof(before));
		fd = open(knob_paths[knob], O_WRONLY | O_TRUNC);
		ASSERT_GE(fd, 0);
		ASSERT_LE(write(fd, "", 0), 0);
		ASSERT_EQ(write(fd, "", 1), -1);
		ASSERT_EQ(errno, EINVAL);
		close(fd);
		read_knob(knob, after, sizeof(after));
		ASSERT_STREQ(after, before);
	}
}

TEST_HARNESS_MAIN
