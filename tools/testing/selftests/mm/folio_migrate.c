// SPDX-License-Identifier: GPL-2.0
/*
 * Tests that a large folio is the same after it was moved to another node:
 * its contents, what each of its pages may be used for, and its size.
 *
 * Every page of the memory under test holds words that occur nowhere else, so
 * that a page in the wrong place, or an older version of it, is noticed.
 *
 * The tests whose names start with whole_ move folios again and again and
 * require that no folio is split, or taken for partially mapped, because it was
 * moved. The others require the rest, which holds also where folios get split.
 */

#include "kselftest_harness.h"

#include <fcntl.h>
#include <numa.h>
#include <numaif.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <linux/userfaultfd.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "../../../../mm/gup_test.h"
#include "hugepage_settings.h"
#include "migrate_util.h"
#include "vm_util.h"

#define KPF_UNEVICTABLE		BIT_ULL(18)
#define KPF_MLOCKED		BIT_ULL(33)

#define MAX_FOLIOS		64
#define MAX_TRIES		10
#define RACE_ROUNDS		8
#define RACE_BYTES		(1024UL * 1024)

#define GUP_TEST_PATH		"/sys/kernel/debug/gup_test"
#define UNPOISON_PATH		"/sys/kernel/debug/hwpoison/unpoison-pfn"
#define KSM_RUN_PATH		"/sys/kernel/mm/ksm/run"

static const char * const counter_names[] = {
	"nr_anon",
	"nr_anon_partially_mapped",
	"split_deferred",
	"split",
};

enum counter {
	NR_ANON,
	NR_ANON_PARTIALLY_MAPPED,
	SPLIT_DEFERRED,
	SPLIT,
	NR_COUNTERS
};

struct page_state {
	char *addr;		/* where it is mapped, NULL once it is not */
	unsigned int version;	/* of its content */
	bool trapped;		/* reading it raises a signal */
};

/* The memory under test: nr_folios folios of one order, page by page. */
struct mem {
	char *start;
	size_t len;
	unsigned int order;
	unsigned int nr_folios;
	unsigned int folio_pages;
	unsigned int nr_pages;
	struct page_state *page;
	unsigned long counters[NR_COUNTERS];
};

static void __attribute__((constructor)) save_settings(void)
{
	thp_save_settings();
}

/* Contents. */

static uint64_t page_word(unsigned int i, unsigned int version, unsigned int w)
{
	/* An odd factor: different before it is different after it. */
	return ((uint64_t)i << 40 | (uint64_t)version << 24 | w) *
	       0x9e3779b97f4a7c15ULL;
}

static void write_page_version(struct mem *mem, unsigned int i,
			       unsigned int version)
{
	uint64_t *word = (uint64_t *)mem->page[i].addr;
	unsigned int w;

	mem->page[i].version = version;
	for (w = 0; w < pagesize / sizeof(*word); w++)
		word[w] = page_word(i, version, w);
}

static void write_page(struct mem *mem, unsigned int i)
{
	write_page_version(mem, i, mem->page[i].version + 1);
}

static void write_pages(struct mem *mem)
{
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++)
		if (mem->page[i].addr)
			write_page(mem, i);
}

static bool is_version(const uint64_t *word, unsigned int i,
		       unsigned int version)
{
	unsigned int w;

	for (w = 0; w < pagesize / sizeof(*word); w++)
		if (word[w] != page_word(i, version, w))
			return false;
	return true;
}

static unsigned int nr_wrong_pages(struct mem *mem)
{
	unsigned int i, wrong = 0;

	for (i = 0; i < mem->nr_pages; i++) {
		struct page_state *page = &mem->page[i];

		if (!page->addr || page->trapped)
			continue;
		if (!is_version((uint64_t *)page->addr, i, page->version))
			wrong++;
	}
	return wrong;
}

static void check_contents(struct __test_metadata *_metadata, struct mem *mem)
{
	ASSERT_EQ(nr_wrong_pages(mem), 0);
}

/* What backs the pages. */

struct backing {
	unsigned long pfn;	/* -1UL: the page is not mapped */
	uint64_t flags;		/* as in /proc/kpageflags */
};

static void read_u64s(int fd, uint64_t *buf, unsigned int nr, unsigned long pos)
{
	if (pread(fd, buf, nr * sizeof(*buf), pos * sizeof(*buf)) !=
	    nr * sizeof(*buf))
		ksft_exit_fail_perror("reading pagemap or kpageflags failed");
}

/* As few system calls as possible: this is done for all pages all the time. */
static struct backing *get_backing(struct mem *mem)
{
	struct backing *backing = alloc(mem->nr_pages, sizeof(*backing));
	uint64_t *buf = alloc(mem->nr_pages, sizeof(*buf));
	unsigned int i, j, nr;

	for (i = 0; i < mem->nr_pages; i += nr) {
		char *addr = mem->page[i].addr;

		nr = 1;
		backing[i].pfn = -1UL;
		if (!addr)
			continue;
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
	}
	free(buf);
	return backing;
}

static unsigned long page_pfn(struct mem *mem, unsigned int i)
{
	if (!mem->page[i].addr)
		return -1UL;
	return pagemap_get_pfn(pagemap_fd, mem->page[i].addr);
}

static uint64_t pfn_flags(unsigned long pfn)
{
	uint64_t flags;

	/* There may be nothing after the last page of a folio. */
	return pageflags_get(pfn, kpageflags_fd, &flags) ? 0 : flags;
}

/* No folio here is larger than @order, and all are aligned to their size. */
static unsigned long pfn_head(unsigned long pfn, unsigned int order)
{
	unsigned int o;

	for (o = 0; o <= order; o++) {
		unsigned long head = pfn & ~((1UL << o) - 1);

		if (!(pfn_flags(head) & KPF_COMPOUND_TAIL))
			return head;
	}
	ksft_exit_fail_msg("page %#lx is in no folio\n", pfn);
}

/* Is page @i still in a folio as large as the one it was allocated in? */
static bool page_is_large(struct mem *mem, unsigned int i)
{
	unsigned long pfn = page_pfn(mem, i);
	unsigned long head = pfn & ~(mem->folio_pages - 1UL);

	/* The last page: the first one heads a smaller folio as well. */
	return pfn != -1UL && pfn_head(head + mem->folio_pages - 1,
				       mem->order) == head;
}

/* Is the folio at @backing whole, and mapped whole and in order? */
static bool folio_is_whole(struct mem *mem, struct backing *backing)
{
	unsigned long pfn = backing[0].pfn;
	unsigned int i;

	if (!(backing[0].flags & KPF_COMPOUND_HEAD))
		return false;
	for (i = 1; i < mem->folio_pages; i++)
		if (backing[i].pfn != pfn + i ||
		    !(backing[i].flags & KPF_COMPOUND_TAIL))
			return false;
	return !(pfn_flags(pfn + i) & KPF_COMPOUND_TAIL);
}

static unsigned int nr_whole_folios(struct mem *mem)
{
	struct backing *backing = get_backing(mem);
	unsigned int i, nr = 0;

	for (i = 0; i < mem->nr_pages; i += mem->folio_pages)
		nr += folio_is_whole(mem, backing + i);
	free(backing);
	return nr;
}

static unsigned long read_counter(struct mem *mem, enum counter counter)
{
	char name[128];

	snprintf(name, sizeof(name), "hugepages-%zukB/stats/%s",
		 (pagesize << mem->order) >> 10, counter_names[counter]);
	return thp_read_num(name);
}

/*
 * The counters are those of the system. Nobody else gets folios of these sizes
 * while a test runs, but folios of the one before may wait in a per-CPU batch:
 * drain_lru_caches() first.
 */
static void read_counters(struct mem *mem)
{
	int i;

	for (i = 0; i < NR_COUNTERS; i++)
		mem->counters[i] = read_counter(mem, i);
}

static void check_whole(struct __test_metadata *_metadata, struct mem *mem)
{
	int i;

	for (i = 0; i < NR_COUNTERS; i++) {
		ASSERT_EQ(read_counter(mem, i), mem->counters[i]) {
			TH_LOG("%s changed", counter_names[i]);
		}
	}
	ASSERT_EQ(nr_whole_folios(mem), mem->nr_folios);
}

/*
 * Each folio lacks a mapping since read_counters(): it is either known to be
 * partially mapped, or no more.
 */
static void check_partially_mapped(struct __test_metadata *_metadata,
				   struct mem *mem)
{
	unsigned int k, nr_large = 0;

	for (k = 0; k < mem->nr_folios; k++)
		nr_large += page_is_large(mem, k * mem->folio_pages);
	ASSERT_EQ(read_counter(mem, NR_ANON_PARTIALLY_MAPPED),
		  mem->counters[NR_ANON_PARTIALLY_MAPPED] + nr_large);
}

/* Memory. */

static void mem_init(struct mem *mem, char *start, unsigned int order,
		     unsigned int nr_folios)
{
	unsigned int i;

	mem->start = start;
	mem->order = order;
	mem->nr_folios = nr_folios;
	mem->folio_pages = 1U << order;
	mem->nr_pages = nr_folios << order;
	mem->len = mem->nr_pages * pagesize;
	mem->page = alloc(mem->nr_pages, sizeof(*mem->page));
	for (i = 0; i < mem->nr_pages; i++)
		mem->page[i].addr = start + i * pagesize;
}

static void mem_free(struct mem *mem)
{
	munmap(mem->start, mem->len);
	free(mem->page);
	mem->page = NULL;
}

/* The node of page @i, or the error. */
static int page_node(struct mem *mem, unsigned int i)
{
	void *page = mem->page[i].addr;
	int status = -1;

	if (move_pages(0, 1, &page, NULL, &status, 0))
		return -errno;
	return status;
}

/* False, with the reason reported, if the kernel has no such folios for us. */
static bool mem_alloc(struct __test_metadata *_metadata, struct mem *mem,
		      unsigned int order, unsigned int nr_folios,
		      bool pmd_mapped)
{
	char name[64];
	unsigned int i;

	if (!(thp_supported_orders() & (1UL << order)))
		SKIP(return false, "no anonymous folios of order %u", order);

	mem_init(mem, reserve(nr_folios * (pagesize << order)), order,
		 nr_folios);
	ASSERT_EQ(mprotect(mem->start, mem->len, PROT_READ | PROT_WRITE), 0);
	ASSERT_EQ(madvise(mem->start, mem->len, MADV_HUGEPAGE), 0);

	/* Only while we allocate: khugepaged must not collapse anything. */
	snprintf(name, sizeof(name), "hugepages-%zukB/enabled",
		 (pagesize << order) >> 10);
	thp_write_string(name, "madvise");
	for (i = 0; i < mem->nr_pages; i += mem->folio_pages)
		*mem->page[i].addr = 1;
	thp_write_string(name, "never");

	if (nr_whole_folios(mem) != nr_folios)
		SKIP(return false, "could not allocate folios of order %u",
		     order);
	for (i = 0; i < mem->nr_pages; i += mem->folio_pages)
		if (page_node(mem, i) != node[0])
			SKIP(return false, "could not allocate on node %d",
			     node[0]);

	if (order == sz2ord(pmdsize, pagesize) && !pmd_mapped) {
		/* Changing the rights of one page remaps all of them by PTE. */
		for (i = 0; i < mem->nr_pages; i += mem->folio_pages) {
			ASSERT_EQ(mprotect(mem->page[i].addr, pagesize,
					   PROT_READ), 0);
			ASSERT_EQ(mprotect(mem->page[i].addr, pagesize,
					   PROT_READ | PROT_WRITE), 0);
		}
		ASSERT_TRUE(check_huge_anon(mem->start, mem->len, 0, pmdsize));
	}

	write_pages(mem);
	drain_lru_caches();
	read_counters(mem);
	return true;
}

/* Let all of the memory, or one half of each folio, be mapped elsewhere. */
static void remap(struct mem *mem, unsigned int i, unsigned int nr, char *to)
{
	size_t len = nr * pagesize;

	if (mremap(mem->page[i].addr, len, len, MREMAP_MAYMOVE | MREMAP_FIXED,
		   to) != to)
		ksft_exit_fail_perror("mremap() failed");
	for (; nr--; i++, to += pagesize)
		mem->page[i].addr = to;
}

static void remap_halves(struct mem *mem, bool second)
{
	unsigned int i, half = mem->folio_pages / 2;
	char *to = reserve(mem->len);

	for (i = second ? half : 0; i < mem->nr_pages; i += mem->folio_pages)
		remap(mem, i, half, to + i * pagesize);
}

static void remap_across_page_table(struct mem *mem)
{
	size_t half = mem->folio_pages * pagesize / 2;

	remap(mem, 0, mem->nr_pages, reserve(mem->len) + pmdsize - half);
}

/* Moving. */

/*
 * Ask for one page of each folio: a folio that is isolated already is busy.
 * Returns how many pages were asked for.
 */
static unsigned int list_folios(struct mem *mem, void **pages)
{
	struct backing *backing = get_backing(mem);
	unsigned long *head = alloc(mem->nr_pages, sizeof(*head));
	unsigned int i, j, nr = 0;

	for (i = 0; i < mem->nr_pages; i++) {
		unsigned long pfn = backing[i].pfn;

		if (pfn == -1UL)
			continue;
		/* In the same folio as the page before? */
		if (i && backing[i].flags & KPF_COMPOUND_TAIL &&
		    backing[i - 1].pfn == pfn - 1)
			continue;
		head[nr] = pfn_head(pfn, mem->order);
		for (j = nr; j > 0 && head[j - 1] != head[nr]; j--)
			;
		if (!j)
			pages[nr++] = mem->page[i].addr;
	}
	free(head);
	free(backing);
	return nr;
}

static long move_folios(struct mem *mem, int target, int *status,
			unsigned int *nr)
{
	void **pages = alloc(mem->nr_pages, sizeof(*pages));
	int *nodes = alloc(mem->nr_pages, sizeof(*nodes));
	unsigned int i;
	long ret;

	*nr = list_folios(mem, pages);
	for (i = 0; i < *nr; i++) {
		nodes[i] = target;
		status[i] = -1;
	}
	ret = move_pages(0, *nr, pages, nodes, status, MPOL_MF_MOVE_ALL);
	free(nodes);
	free(pages);
	return ret;
}

static void check_node(struct __test_metadata *_metadata, struct mem *mem,
		       unsigned int first, unsigned int nr, int expected)
{
	void **pages = alloc(nr, sizeof(*pages));
	int *status = alloc(nr, sizeof(*status));
	unsigned int i, n = 0;

	for (i = first; i < first + nr; i++)
		if (mem->page[i].addr)
			pages[n++] = mem->page[i].addr;
	ASSERT_EQ(move_pages(0, n, pages, NULL, status, 0), 0);
	for (i = 0; i < n; i++) {
		ASSERT_EQ(status[i], expected) {
			TH_LOG("page %p", pages[i]);
		}
	}
	free(status);
	free(pages);
}

static void move_to(struct __test_metadata *_metadata, struct mem *mem,
		    int target)
{
	int *status = alloc(mem->nr_pages, sizeof(*status));
	unsigned int i, nr, tries = 0;
	long ret;

	/* Migration is best effort: a page can be busy for a moment. */
	do {
		ret = move_folios(mem, target, status, &nr);
		ASSERT_GE(ret, 0);
	} while (ret && ++tries < MAX_TRIES);

	ASSERT_EQ(ret, 0);
	for (i = 0; i < nr; i++)
		ASSERT_EQ(status[i], target);
	free(status);
	check_node(_metadata, mem, 0, mem->nr_pages, target);
}

/* There and back. */
static void bounce(struct __test_metadata *_metadata, struct mem *mem)
{
	move_to(_metadata, mem, node[1]);
	check_contents(_metadata, mem);
	move_to(_metadata, mem, node[0]);
	check_contents(_metadata, mem);
}

static void bounce_whole(struct __test_metadata *_metadata, struct mem *mem)
{
	int i;

	drain_lru_caches();
	read_counters(mem);
	check_whole(_metadata, mem);
	for (i = 1; i <= 10; i++) {
		move_to(_metadata, mem, node[i % 2]);
		check_whole(_metadata, mem);
	}
	check_contents(_metadata, mem);
}

/* Folio 0 cannot be moved, the others can. */
static void move_all_but_first(struct __test_metadata *_metadata,
			       struct mem *mem, int target)
{
	unsigned int i, nr, n = mem->folio_pages;
	int *status = alloc(mem->nr_pages, sizeof(*status));
	unsigned long *pfn = alloc(n, sizeof(*pfn));
	int from = page_node(mem, 0);

	for (i = 0; i < n; i++)
		pfn[i] = page_pfn(mem, i);

	/*
	 * Returns how many were not moved. Folios that were asked for together
	 * with one of these are moved, but get no status.
	 */
	ASSERT_EQ(move_folios(mem, target, status, &nr), 1);
	for (i = 0; i < nr; i++)
		ASSERT_EQ(status[i], -1);

	for (i = 0; i < n; i++)
		ASSERT_EQ(page_pfn(mem, i), pfn[i]);
	check_node(_metadata, mem, 0, n, from);
	check_node(_metadata, mem, n, mem->nr_pages - n, target);
	check_contents(_metadata, mem);
	free(status);
	free(pfn);
}

/* Another process that maps the same folios, and does what it is told. */

enum request {
	REQ_CHECK,		/* replies how many pages are wrong */
	REQ_WRITE_ODD,
	REQ_WRITE_EVEN,
	REQ_REMAP_FIRST_HALVES,
	REQ_MAP_BY_PTE,
};

struct child {
	pid_t pid;
	int request;
	int reply;
};

static void child_write(struct mem *mem, unsigned int first)
{
	unsigned int i;

	/* Not a version that the parent has or will have. */
	for (i = first; i < mem->nr_pages; i += 2)
		if (mem->page[i].addr)
			write_page_version(mem, i, 1000);
}

static unsigned char child_serve(struct mem *mem, unsigned char request)
{
	unsigned int wrong = 0;

	switch (request) {
	case REQ_CHECK:
		wrong = nr_wrong_pages(mem);
		break;
	case REQ_WRITE_ODD:
		child_write(mem, 1);
		break;
	case REQ_WRITE_EVEN:
		child_write(mem, 0);
		break;
	case REQ_REMAP_FIRST_HALVES:
		remap_halves(mem, false);
		break;
	case REQ_MAP_BY_PTE:
		if (mprotect(mem->page[1].addr, pagesize, PROT_READ))
			wrong = 255;
		break;
	}
	return wrong < 255 ? wrong : 255;
}

static void child_start(struct __test_metadata *_metadata, struct mem *mem,
			struct child *child)
{
	int request[2], reply[2];
	unsigned char c;

	ASSERT_EQ(pipe(request), 0);
	ASSERT_EQ(pipe(reply), 0);
	child->pid = fork();
	ASSERT_GE(child->pid, 0);
	if (!child->pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(request[1]);
		close(reply[0]);
		while (read(request[0], &c, 1) == 1) {
			c = child_serve(mem, c);
			if (write(reply[1], &c, 1) != 1)
				break;
		}
		_exit(0);
	}
	close(request[0]);
	close(reply[1]);
	child->request = request[1];
	child->reply = reply[0];
}

/* Return the reply, -1 if there is none. */
static int child_ask(struct child *child, enum request request)
{
	unsigned char c = request;

	if (write(child->request, &c, 1) != 1)
		return -1;
	if (read(child->reply, &c, 1) != 1)
		return -1;
	return c;
}

static void child_stop(struct __test_metadata *_metadata, struct child *child)
{
	int status;

	close(child->request);
	close(child->reply);
	ASSERT_EQ(waitpid(child->pid, &status, 0), child->pid);
	ASSERT_TRUE(WIFEXITED(status));
	ASSERT_EQ(WEXITSTATUS(status), 0);
}

/*
 * Of each folio, leave every other page from page @first on to us alone, and
 * share the rest with a child. The former are exclusive and writable, the
 * latter are neither, and all are in one VMA again in the end.
 */
static bool is_shared(struct mem *mem, unsigned int i, unsigned int first)
{
	i %= mem->folio_pages;
	return i < first || i % 2;
}

static void share_with_child(struct __test_metadata *_metadata,
			     struct mem *mem, unsigned int first,
			     struct child *child)
{
	struct page_state *all = mem->page;
	struct page_state *shared = alloc(mem->nr_pages, sizeof(*shared));
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++) {
		if (is_shared(mem, i, first)) {
			shared[i] = all[i];
			continue;
		}
		ASSERT_EQ(madvise(all[i].addr, pagesize, MADV_DONTFORK), 0);
	}
	mem->page = shared;
	child_start(_metadata, mem, child);
	mem->page = all;
	free(shared);
	ASSERT_EQ(madvise(mem->start, mem->len, MADV_DOFORK), 0);
}

/*
 * Write to every page. The child must not see it, and an exclusive page must
 * not be copied for it.
 */
static void check_sharing(struct __test_metadata *_metadata, struct mem *mem,
			  unsigned int first, struct child *child)
{
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++) {
		unsigned long pfn = page_pfn(mem, i);

		write_page(mem, i);
		ASSERT_EQ(page_pfn(mem, i) != pfn, is_shared(mem, i, first)) {
			TH_LOG("page %u", i);
		}
	}
	check_contents(_metadata, mem);
	ASSERT_EQ(child_ask(child, REQ_CHECK), 0);
}

/* userfaultfd */

/* An access that faults raises SIGBUS, so nobody has to handle it. */
static int uffd_open_feature(uint64_t feature)
{
	struct uffdio_api api = { .api = UFFD_API };
	int uffd = syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (uffd < 0)
		return -1;
	if (ioctl(uffd, UFFDIO_API, &api) < 0)
		api.features = 0;
	close(uffd);

	feature |= UFFD_FEATURE_SIGBUS;
	if ((api.features & feature) != feature)
		return -1;

	uffd = syscall(__NR_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	api.features = feature;
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) < 0)
		ksft_exit_fail_perror("UFFDIO_API failed");
	return uffd;
}

static bool uffd_protect_odd(struct __test_metadata *_metadata,
			     struct mem *mem)
{
	int uffd = uffd_open_feature(UFFD_FEATURE_PAGEFAULT_FLAG_WP);
	unsigned int i;

	if (uffd < 0)
		SKIP(return false, "uffd-wp not supported");
	ASSERT_EQ(uffd_register(uffd, mem->start, mem->len, false, true,
				false), 0);
	for (i = 1; i < mem->nr_pages; i += 2) {
		struct uffdio_writeprotect wp = {
			.range.start = (uintptr_t)mem->page[i].addr,
			.range.len = pagesize,
			.mode = UFFDIO_WRITEPROTECT_MODE_WP,
		};

		ASSERT_EQ(ioctl(uffd, UFFDIO_WRITEPROTECT, &wp), 0);
	}
	return true;
}

static void check_uffd_bits(struct __test_metadata *_metadata,
			    struct mem *mem)
{
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++) {
		uint64_t entry = pagemap_get_entry(pagemap_fd,
						   mem->page[i].addr);

		ASSERT_EQ(!!(entry & PM_UFFD_WP), i % 2) {
			TH_LOG("page %u", i);
		}
	}
}

/* A write to an odd page raises @sig, one to an even page does not. */
static void check_odd_protected(struct __test_metadata *_metadata,
				struct mem *mem, int sig)
{
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++) {
		ASSERT_EQ(try_write(mem->page[i].addr), i % 2 ? sig : 0) {
			TH_LOG("page %u", i);
		}
	}
	for (i = 0; i < mem->nr_pages; i += 2)
		write_page(mem, i);
	check_contents(_metadata, mem);
}

#ifdef UFFDIO_RWPROTECT
static void uffd_rwprotect(struct __test_metadata *_metadata, int uffd,
			   char *addr, size_t len, bool protect)
{
	struct uffdio_rwprotect rwp = {
		.range.start = (uintptr_t)addr,
		.range.len = len,
		.mode = protect ? UFFDIO_RWPROTECT_MODE_RWP : 0,
	};

	ASSERT_EQ(ioctl(uffd, UFFDIO_RWPROTECT, &rwp), 0);
}
#endif

/* Pins. */

static bool pin_page(struct __test_metadata *_metadata, struct mem *mem,
		     unsigned int i, int *fd)
{
	struct pin_longterm_test args = {
		.addr = (uintptr_t)mem->page[i].addr,
		.size = pagesize,
		.flags = PIN_LONGTERM_TEST_FLAG_USE_WRITE,
	};

	*fd = open(GUP_TEST_PATH, O_RDWR);
	if (*fd < 0)
		SKIP(return false, "no " GUP_TEST_PATH);
	ASSERT_EQ(ioctl(*fd, PIN_LONGTERM_TEST_START, &args), 0);
	return true;
}

static void check_pin(struct __test_metadata *_metadata, struct mem *mem,
		      unsigned int i, int fd)
{
	uint64_t *seen = malloc(pagesize);
	__u64 addr = (uintptr_t)seen;

	ASSERT_NE(seen, NULL);
	ASSERT_EQ(ioctl(fd, PIN_LONGTERM_TEST_READ, &addr), 0);
	ASSERT_TRUE(is_version(seen, i, mem->page[i].version));
	free(seen);
}

static void unpin_page(struct __test_metadata *_metadata, int fd)
{
	ASSERT_EQ(ioctl(fd, PIN_LONGTERM_TEST_STOP), 0);
	close(fd);
}

/* A pipe holds a reference to the page, which is no pin. */
static void splice_page(struct __test_metadata *_metadata, struct mem *mem,
			unsigned int i, int fds[2])
{
	struct iovec iov = {
		.iov_base = mem->page[i].addr,
		.iov_len = pagesize,
	};

	ASSERT_EQ(pipe(fds), 0);
	ASSERT_EQ(vmsplice(fds[1], &iov, 1, 0), pagesize);
}

static void check_pipe(struct __test_metadata *_metadata, struct mem *mem,
		       unsigned int i, int fds[2])
{
	uint64_t *seen = malloc(pagesize);

	ASSERT_NE(seen, NULL);
	ASSERT_EQ(read(fds[0], seen, pagesize), pagesize);
	ASSERT_TRUE(is_version(seen, i, mem->page[i].version));
	free(seen);
	close(fds[0]);
	close(fds[1]);
}

static void setup(struct __test_metadata *_metadata)
{
	const char *reason = migrate_setup();

	if (reason)
		SKIP(return, "%s", reason);
}

FIXTURE(folio_migrate)
{
	struct mem mem;
};

FIXTURE_VARIANT(folio_migrate)
{
	unsigned int order;	/* 0: of a PMD */
	bool pmd_mapped;
};

FIXTURE_VARIANT_ADD(folio_migrate, order_2) { .order = 2 };
FIXTURE_VARIANT_ADD(folio_migrate, order_3) { .order = 3 };
FIXTURE_VARIANT_ADD(folio_migrate, order_4) { .order = 4 };
FIXTURE_VARIANT_ADD(folio_migrate, order_5) { .order = 5 };
FIXTURE_VARIANT_ADD(folio_migrate, order_6) { .order = 6 };
FIXTURE_VARIANT_ADD(folio_migrate, order_7) { .order = 7 };
FIXTURE_VARIANT_ADD(folio_migrate, order_8) { .order = 8 };
FIXTURE_VARIANT_ADD(folio_migrate, pte_mapped_pmd_order) { };
FIXTURE_VARIANT_ADD(folio_migrate, pmd_mapped) { .pmd_mapped = true };

FIXTURE_SETUP(folio_migrate)
{
	unsigned int order, pmd_order;

	setup(_metadata);
	if (_metadata->exit_code)
		return;

	pmd_order = sz2ord(pmdsize, pagesize);
	if (variant->order >= pmd_order)
		SKIP(return, "a PMD is of order %u", pmd_order);
	order = variant->order ?: pmd_order;
	mem_alloc(_metadata, &self->mem, order, order > 6 ? 2 : 4,
		  variant->pmd_mapped);
}

FIXTURE_TEARDOWN(folio_migrate)
{
}

TEST_F(folio_migrate, plain)
{
	struct mem *mem = &self->mem;

	bounce(_metadata, mem);
	write_pages(mem);
	bounce(_metadata, mem);
}

TEST_F(folio_migrate, whole_plain)
{
	bounce_whole(_metadata, &self->mem);
}

/* Memory tags move along with what they are of. */
#ifdef __aarch64__

#ifndef PROT_MTE
#define PROT_MTE		0x20
#endif
#ifndef HWCAP2_MTE
#define HWCAP2_MTE		BIT_ULL(18)
#endif

#define MTE_GRANULE		16

/* Neither two granules in a row nor two pages in a row are tagged alike. */
static unsigned long mte_tag(unsigned int page, unsigned int granule,
			     unsigned int version)
{
	return (3 * page + 5 * granule + version) % 16;
}

static void mte_store_tags(struct mem *mem, unsigned int version)
{
	unsigned int i, g;

	for (i = 0; i < mem->nr_pages; i++)
		for (g = 0; g < pagesize / MTE_GRANULE; g++) {
			unsigned long tag = mte_tag(i, g, version);

			asm volatile(".arch armv8.5-a+memtag\n\tstg %0, [%0]" ::
				     "r" ((unsigned long)mem->page[i].addr +
					  g * MTE_GRANULE + (tag << 56)) :
				     "memory");
		}
}

static void mte_check_tags(struct __test_metadata *_metadata, struct mem *mem,
			   unsigned int version)
{
	unsigned int i, g;

	for (i = 0; i < mem->nr_pages; i++)
		for (g = 0; g < pagesize / MTE_GRANULE; g++) {
			unsigned long addr = (unsigned long)mem->page[i].addr +
					     g * MTE_GRANULE;

			asm volatile(".arch armv8.5-a+memtag\n\tldg %0, [%0]" :
				     "+r" (addr) :: "memory");
			ASSERT_EQ(addr >> 56 & 15, mte_tag(i, g, version));
		}
}

TEST_F(folio_migrate, mte_tags)
{
	struct mem *mem = &self->mem;
	unsigned int version;

	if (!(getauxval(AT_HWCAP2) & HWCAP2_MTE))
		SKIP(return, "no MTE");

	ASSERT_EQ(mprotect(mem->start, mem->len,
			   PROT_READ | PROT_WRITE | PROT_MTE), 0);
	for (version = 0; version < 2; version++) {
		mte_store_tags(mem, version);
		move_to(_metadata, mem, node[1]);
		mte_check_tags(_metadata, mem, version);
		move_to(_metadata, mem, node[0]);
		mte_check_tags(_metadata, mem, version);
		check_contents(_metadata, mem);
		write_pages(mem);
	}
}

TEST_F(folio_migrate, whole_mte_tags)
{
	struct mem *mem = &self->mem;

	if (!(getauxval(AT_HWCAP2) & HWCAP2_MTE))
		SKIP(return, "no MTE");

	ASSERT_EQ(mprotect(mem->start, mem->len,
			   PROT_READ | PROT_WRITE | PROT_MTE), 0);
	mte_store_tags(mem, 0);
	bounce_whole(_metadata, mem);
	mte_check_tags(_metadata, mem, 0);
}

#endif /* __aarch64__ */

/* migrate_pages(2) and mbind(2) get there on paths of their own. */
TEST_F(folio_migrate, whole_syscalls)
{
	unsigned long from = 1UL << node[0], to = 1UL << node[1];
	unsigned long maxnode = 8 * sizeof(from);
	struct mem *mem = &self->mem;

	if (node[1] >= maxnode - 1)
		SKIP(return, "node %d does not fit in a word", node[1]);

	ASSERT_GE(migrate_pages(0, maxnode, &from, &to), 0);
	check_node(_metadata, mem, 0, mem->nr_pages, node[1]);
	check_contents(_metadata, mem);
	check_whole(_metadata, mem);

	ASSERT_EQ(mbind(mem->start, mem->len, MPOL_BIND, &from, maxnode,
			MPOL_MF_MOVE | MPOL_MF_STRICT), 0);
	check_node(_metadata, mem, 0, mem->nr_pages, node[0]);
	check_contents(_metadata, mem);
	check_whole(_metadata, mem);
}

/* Every other page in a read-only VMA of its own. */
static void mprotect_odd(struct __test_metadata *_metadata, struct mem *mem)
{
	unsigned int i;

	for (i = 1; i < mem->nr_pages; i += 2)
		ASSERT_EQ(mprotect(mem->page[i].addr, pagesize, PROT_READ), 0);
}

TEST_F(folio_migrate, mprotect)
{
	struct mem *mem = &self->mem;

	mprotect_odd(_metadata, mem);
	bounce(_metadata, mem);
	check_odd_protected(_metadata, mem, SIGSEGV);
}

TEST_F(folio_migrate, whole_mprotect)
{
	mprotect_odd(_metadata, &self->mem);
	bounce_whole(_metadata, &self->mem);
}

TEST_F(folio_migrate, uffd_wp)
{
	struct mem *mem = &self->mem;

	if (!uffd_protect_odd(_metadata, mem))
		return;
	check_uffd_bits(_metadata, mem);
	bounce(_metadata, mem);
	check_uffd_bits(_metadata, mem);
	check_odd_protected(_metadata, mem, SIGBUS);
	check_uffd_bits(_metadata, mem);
}

TEST_F(folio_migrate, whole_uffd_wp)
{
	if (!uffd_protect_odd(_metadata, &self->mem))
		return;
	bounce_whole(_metadata, &self->mem);
	check_uffd_bits(_metadata, &self->mem);
}

/* Neither to be read nor to be written, every other page. */
TEST_F(folio_migrate, uffd_rwp)
{
#ifdef UFFDIO_RWPROTECT
	struct mem *mem = &self->mem;
	struct uffdio_register reg = {
		.range.start = (uintptr_t)mem->start,
		.range.len = mem->len,
		.mode = UFFDIO_REGISTER_MODE_RWP,
	};
	int uffd = uffd_open_feature(UFFD_FEATURE_RWP);
	unsigned int i;

	if (uffd < 0)
		SKIP(return, "uffd-rwp not supported");
	ASSERT_EQ(ioctl(uffd, UFFDIO_REGISTER, &reg), 0);
	for (i = 1; i < mem->nr_pages; i += 2) {
		uffd_rwprotect(_metadata, uffd, mem->page[i].addr, pagesize,
			       true);
		mem->page[i].trapped = true;
	}

	bounce(_metadata, mem);
	check_uffd_bits(_metadata, mem);
	for (i = 0; i < mem->nr_pages; i++) {
		ASSERT_EQ(try_read(mem->page[i].addr), i % 2 ? SIGBUS : 0);
		ASSERT_EQ(try_write(mem->page[i].addr), i % 2 ? SIGBUS : 0);
		mem->page[i].trapped = false;
	}

	uffd_rwprotect(_metadata, uffd, mem->start, mem->len, false);
	check_contents(_metadata, mem);
	write_pages(mem);
	check_contents(_metadata, mem);
#else
	SKIP(return, "built without uffd-rwp");
#endif
}

TEST_F(folio_migrate, page_table)
{
	remap_across_page_table(&self->mem);
	bounce(_metadata, &self->mem);
	write_pages(&self->mem);
	bounce(_metadata, &self->mem);
}

TEST_F(folio_migrate, whole_page_table)
{
	remap_across_page_table(&self->mem);
	bounce_whole(_metadata, &self->mem);
}

/* A VMA that ends in the middle of each folio: one mapping after the other. */
TEST_F(folio_migrate, vma_boundary)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	unsigned int i;

	for (i = half; i < mem->nr_pages; i += mem->folio_pages)
		ASSERT_EQ(mprotect(mem->page[i].addr, half * pagesize,
				   PROT_READ), 0);
	bounce(_metadata, mem);
	for (i = 0; i < mem->nr_pages; i++)
		ASSERT_EQ(try_write(mem->page[i].addr),
			  i % mem->folio_pages < half ? 0 : SIGSEGV);
	check_contents(_metadata, mem);
}

TEST_F(folio_migrate, whole_vma_boundary)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	unsigned int i;

	for (i = half; i < mem->nr_pages; i += mem->folio_pages)
		ASSERT_EQ(mprotect(mem->page[i].addr, half * pagesize,
				   PROT_READ), 0);
	bounce_whole(_metadata, mem);
}

/* And one half far away from the other. */
TEST_F(folio_migrate, mremap)
{
	remap_halves(&self->mem, true);
	bounce(_metadata, &self->mem);
	write_pages(&self->mem);
	bounce(_metadata, &self->mem);
}

TEST_F(folio_migrate, whole_mremap)
{
	remap_halves(&self->mem, true);
	bounce_whole(_metadata, &self->mem);
}

static void check_soft_dirty(struct __test_metadata *_metadata,
			     struct mem *mem, const bool *dirty)
{
	unsigned int i;

	for (i = 0; i < mem->nr_pages; i++) {
		ASSERT_EQ(pagemap_is_softdirty(pagemap_fd, mem->page[i].addr),
			  dirty[i]) {
			TH_LOG("page %u", i);
		}
	}
}

TEST_F(folio_migrate, soft_dirty)
{
	struct mem *mem = &self->mem;
	bool *dirty = alloc(mem->nr_pages, sizeof(*dirty));
	unsigned int i;

	if (!softdirty_supported())
		SKIP(return, "soft-dirty not supported");

	clear_softdirty();
	for (i = 0; i < mem->nr_pages; i += 2)
		write_page(mem, i);
	for (i = 0; i < mem->nr_pages; i++) {
		dirty[i] = pagemap_is_softdirty(pagemap_fd, mem->page[i].addr);
		/* A PMD has one bit for all of its pages. */
		if (!variant->pmd_mapped)
			ASSERT_EQ(dirty[i], !(i % 2));
	}

	bounce(_metadata, mem);
	check_soft_dirty(_metadata, mem, dirty);

	/* A clean page cannot be written to either. Let no page be writable. */
	ASSERT_EQ(mprotect(mem->start, mem->len, PROT_READ), 0);
	check_soft_dirty(_metadata, mem, dirty);
	bounce(_metadata, mem);
	check_soft_dirty(_metadata, mem, dirty);
	ASSERT_EQ(mprotect(mem->start, mem->len, PROT_READ | PROT_WRITE), 0);

	/* The first write to a clean page is still noticed. */
	for (i = 0; i < mem->nr_pages; i++) {
		write_page(mem, i);
		ASSERT_TRUE(pagemap_is_softdirty(pagemap_fd,
						 mem->page[i].addr));
	}
	check_contents(_metadata, mem);
	free(dirty);
}

TEST_F(folio_migrate, exclusive)
{
	struct mem *mem = &self->mem;
	struct child child;

	share_with_child(_metadata, mem, 0, &child);
	bounce(_metadata, mem);
	check_sharing(_metadata, mem, 0, &child);
	child_stop(_metadata, &child);
}

/* The same where no page may be written to: they differ in nothing else then. */
static void move_read_only(struct __test_metadata *_metadata, struct mem *mem,
			   unsigned int first)
{
	struct child child;

	share_with_child(_metadata, mem, first, &child);
	ASSERT_EQ(mprotect(mem->start, mem->len, PROT_READ), 0);
	bounce(_metadata, mem);
	ASSERT_EQ(mprotect(mem->start, mem->len, PROT_READ | PROT_WRITE), 0);
	check_sharing(_metadata, mem, first, &child);
	child_stop(_metadata, &child);
}

/* The first page of each folio is exclusive, */
TEST_F(folio_migrate, exclusive_read_only)
{
	move_read_only(_metadata, &self->mem, 0);
}

/* or it is shared. */
TEST_F(folio_migrate, shared_read_only)
{
	move_read_only(_metadata, &self->mem, 1);
}

/* The child that shared the pages is gone, and half of them are ours again. */
TEST_F(folio_migrate, exclusive_again)
{
	struct mem *mem = &self->mem;
	struct child child;
	unsigned int i;

	child_start(_metadata, mem, &child);
	child_stop(_metadata, &child);
	for (i = 0; i < mem->nr_pages; i += 2)
		write_page(mem, i);
	ASSERT_EQ(mprotect(mem->start, mem->len, PROT_READ), 0);
	bounce(_metadata, mem);
	ASSERT_EQ(mprotect(mem->start, mem->len, PROT_READ | PROT_WRITE), 0);

	/* And then shared with another one. */
	child_start(_metadata, mem, &child);
	write_pages(mem);
	check_contents(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	bounce(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

TEST_F(folio_migrate, whole_exclusive)
{
	struct child child;

	share_with_child(_metadata, &self->mem, 0, &child);
	bounce_whole(_metadata, &self->mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

/* The child has copies of every other page, and shares the others with us. */
TEST_F(folio_migrate, cow)
{
	struct mem *mem = &self->mem;
	struct child child;

	child_start(_metadata, mem, &child);
	ASSERT_EQ(child_ask(&child, REQ_WRITE_ODD), 0);
	bounce(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);

	write_pages(mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	ASSERT_EQ(child_ask(&child, REQ_WRITE_EVEN), 0);
	check_contents(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

TEST_F(folio_migrate, whole_cow)
{
	struct child child;

	child_start(_metadata, &self->mem, &child);
	ASSERT_EQ(child_ask(&child, REQ_WRITE_ODD), 0);
	bounce_whole(_metadata, &self->mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

/* Two processes, each with another half of the folio somewhere else. */
TEST_F(folio_migrate, fork)
{
	struct mem *mem = &self->mem;
	struct child child;

	child_start(_metadata, mem, &child);
	ASSERT_EQ(child_ask(&child, REQ_REMAP_FIRST_HALVES), 0);
	remap_halves(mem, true);
	bounce(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);

	write_pages(mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	ASSERT_EQ(child_ask(&child, REQ_WRITE_EVEN), 0);
	check_contents(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

TEST_F(folio_migrate, whole_fork)
{
	struct mem *mem = &self->mem;
	struct child child;

	child_start(_metadata, mem, &child);
	ASSERT_EQ(child_ask(&child, REQ_REMAP_FIRST_HALVES), 0);
	remap_halves(mem, true);
	bounce_whole(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

/*
 * Pages up to the middle are shared and can be unmapped; the first exclusive
 * page then cannot, since the folio is pinned. All must be as it was.
 */
TEST_F(folio_migrate, pinned)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	struct child child;
	int fd;

	share_with_child(_metadata, mem, half, &child);
	if (!pin_page(_metadata, mem, half, &fd))
		return;

	move_all_but_first(_metadata, mem, node[1]);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	check_sharing(_metadata, mem, half, &child);
	check_pin(_metadata, mem, half, fd);

	unpin_page(_metadata, fd);
	bounce(_metadata, mem);
	child_stop(_metadata, &child);
}

TEST_F(folio_migrate, pinned_uffd_wp)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	int fd;

	if (!uffd_protect_odd(_metadata, mem))
		return;
	if (!pin_page(_metadata, mem, half, &fd))
		return;

	move_all_but_first(_metadata, mem, node[1]);
	check_uffd_bits(_metadata, mem);
	check_odd_protected(_metadata, mem, SIGBUS);
	check_pin(_metadata, mem, half, fd);

	unpin_page(_metadata, fd);
	bounce(_metadata, mem);
}

TEST_F(folio_migrate, whole_pinned)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	struct child child;
	int fd, i, target = node[1], status = -1;
	void *page = mem->page[0].addr;

	share_with_child(_metadata, mem, half, &child);
	if (!pin_page(_metadata, mem, half, &fd))
		return;

	move_all_but_first(_metadata, mem, target);
	check_whole(_metadata, mem);
	for (i = 0; i < 3; i++) {
		ASSERT_EQ(move_pages(0, 1, &page, &target, &status,
				     MPOL_MF_MOVE_ALL), 1);
		ASSERT_EQ(status, -1);
		check_whole(_metadata, mem);
	}

	unpin_page(_metadata, fd);
	bounce_whole(_metadata, mem);
	child_stop(_metadata, &child);
}

/* With a mere reference all pages are unmapped before that is noticed. */
TEST_F(folio_migrate, referenced)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	struct child child;
	int fds[2];

	share_with_child(_metadata, mem, 0, &child);
	splice_page(_metadata, mem, half, fds);

	move_all_but_first(_metadata, mem, node[1]);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	check_sharing(_metadata, mem, 0, &child);
	check_pipe(_metadata, mem, half, fds);

	bounce(_metadata, mem);
	child_stop(_metadata, &child);
}

TEST_F(folio_migrate, whole_referenced)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	int fds[2];

	splice_page(_metadata, mem, half, fds);
	move_all_but_first(_metadata, mem, node[1]);
	check_whole(_metadata, mem);
	check_pipe(_metadata, mem, half, fds);
	move_to(_metadata, mem, node[0]);
	bounce_whole(_metadata, mem);
}

TEST_F(folio_migrate, mlocked)
{
	struct mem *mem = &self->mem;
	unsigned long mlocked, unevictable;
	unsigned int i, k;

	ASSERT_EQ(mlock(mem->start, mem->len), 0);
	drain_lru_caches();
	/*
	 * mlock() leaves a folio to others that it does not find mapped in one
	 * batch, which may be due to bits of the PTEs that we cannot see.
	 */
	if (!(pfn_flags(page_pfn(mem, 0)) & KPF_MLOCKED))
		bounce(_metadata, mem);
	drain_lru_caches();
	write_num(STAT_REFRESH_PATH, 1);
	mlocked = read_stat("/proc/meminfo", "Mlocked:");
	unevictable = read_stat("/proc/meminfo", "Unevictable:");

	for (i = 1; i <= 4; i++) {
		move_to(_metadata, mem, node[i % 2]);
		check_contents(_metadata, mem);

		drain_lru_caches();
		write_num(STAT_REFRESH_PATH, 1);
		ASSERT_EQ(read_stat("/proc/meminfo", "Mlocked:"), mlocked);
		ASSERT_EQ(read_stat("/proc/meminfo", "Unevictable:"), unevictable);
		for (k = 0; k < mem->nr_pages; k += mem->folio_pages) {
			uint64_t flags = pfn_flags(page_pfn(mem, k));

			ASSERT_TRUE(flags & KPF_MLOCKED);
			ASSERT_TRUE(flags & KPF_UNEVICTABLE);
		}
	}
}

TEST_F(folio_migrate, whole_mlocked)
{
	ASSERT_EQ(mlock(self->mem.start, self->mem.len), 0);
	bounce_whole(_metadata, &self->mem);
}

/* A folio that is partially mapped is not forgotten when it is moved, */
TEST_F(folio_migrate, partially_mapped)
{
	struct mem *mem = &self->mem;
	unsigned int i;

	for (i = mem->folio_pages / 2; i < mem->nr_pages;
	     i += mem->folio_pages) {
		ASSERT_EQ(munmap(mem->page[i].addr, pagesize), 0);
		mem->page[i].addr = NULL;
	}
	ASSERT_EQ(read_counter(mem, NR_ANON_PARTIALLY_MAPPED),
		  mem->counters[NR_ANON_PARTIALLY_MAPPED] + mem->nr_folios);
	check_partially_mapped(_metadata, mem);
	move_to(_metadata, mem, node[1]);
	check_partially_mapped(_metadata, mem);
	check_contents(_metadata, mem);
}

/* nor when that fails. */
TEST_F(folio_migrate, partially_mapped_referenced)
{
	struct mem *mem = &self->mem;
	unsigned int half = mem->folio_pages / 2;
	int fds[2];

	splice_page(_metadata, mem, half - 1, fds);
	ASSERT_EQ(munmap(mem->page[half].addr, pagesize), 0);
	mem->page[half].addr = NULL;
	ASSERT_EQ(read_counter(mem, NR_ANON_PARTIALLY_MAPPED),
		  mem->counters[NR_ANON_PARTIALLY_MAPPED] + 1);

	move_all_but_first(_metadata, mem, node[1]);
	ASSERT_TRUE(page_is_large(mem, 0));
	ASSERT_GE(read_counter(mem, NR_ANON_PARTIALLY_MAPPED),
		  mem->counters[NR_ANON_PARTIALLY_MAPPED] + 1);
	check_pipe(_metadata, mem, half - 1, fds);
}

/* A folio that loses a mapping while it is moved is partially mapped then. */

struct race {
	struct mem *mem;
	atomic_bool go;
	atomic_bool moved;
	uint64_t delay_ns;
	unsigned int nr_during;		/* unmapped before the move had ended */
	int err;
};

static void *unmap_pages(void *arg)
{
	struct race *race = arg;
	struct mem *mem = race->mem;
	uint64_t start;
	unsigned int k;

	while (!atomic_load(&race->go))
		;
	start = now_ns();
	while (now_ns() - start < race->delay_ns)
		;
	for (k = mem->nr_folios; k--;) {
		/* Never the first page: it tells what became of the folio. */
		unsigned int i = k * mem->folio_pages + 1 +
				 k % (mem->folio_pages - 1);
		char *addr = mem->page[i].addr;

		if (k % 2 ? munmap(addr, pagesize) :
			    madvise(addr, pagesize, MADV_DONTNEED))
			race->err = errno;
		mem->page[i].addr = NULL;
		race->nr_during += !atomic_load(&race->moved);
	}
	return NULL;
}

/* Return how long the move took. */
static uint64_t race_round(struct __test_metadata *_metadata,
			   struct race *race, unsigned int nr_folios)
{
	struct mem *mem = race->mem;
	void *pages[MAX_FOLIOS];
	int nodes[MAX_FOLIOS], status[MAX_FOLIOS];
	pthread_t thread;
	uint64_t start, took;
	unsigned int k;

	for (k = 0; k < nr_folios; k++) {
		pages[k] = mem->page[k * mem->folio_pages].addr;
		nodes[k] = node[1];
		status[k] = -1;
	}
	atomic_store(&race->go, false);
	atomic_store(&race->moved, false);
	ASSERT_EQ(pthread_create(&thread, NULL, unmap_pages, race), 0);

	atomic_store(&race->go, true);
	start = now_ns();
	ASSERT_GE(move_pages(0, nr_folios, pages, nodes, status,
			     MPOL_MF_MOVE_ALL), 0);
	took = now_ns() - start;
	atomic_store(&race->moved, true);
	ASSERT_EQ(pthread_join(thread, NULL), 0);
	ASSERT_EQ(race->err, 0);

	/* Left alone, moved, or busy: anything else is wrong. */
	for (k = 0; k < nr_folios; k++)
		ASSERT_TRUE(status[k] == -1 || status[k] == node[1] ||
			    status[k] == -EBUSY);
	drain_lru_caches();
	check_partially_mapped(_metadata, mem);
	check_contents(_metadata, mem);
	return took;
}

TEST_F(folio_migrate, unmapped_meanwhile)
{
	unsigned int order = self->mem.order;
	unsigned int nr_folios = RACE_BYTES / (pagesize << order);
	unsigned int round, nr_during = 0;
	uint64_t took = 0;
	struct mem mem;

	mem_free(&self->mem);
	if (nr_folios > MAX_FOLIOS)
		nr_folios = MAX_FOLIOS;
	if (nr_folios < 2)
		nr_folios = 2;

	for (round = 0; round < RACE_ROUNDS; round++) {
		struct race race = {
			.mem = &mem,
			.delay_ns = took * round / RACE_ROUNDS,
		};

		if (!mem_alloc(_metadata, &mem, order, nr_folios,
			       variant->pmd_mapped))
			return;
		took = race_round(_metadata, &race, nr_folios);
		nr_during += race.nr_during;
		mem_free(&mem);
	}
	TH_LOG("%u of %u pages were unmapped before the move had ended",
	       nr_during, RACE_ROUNDS * nr_folios);
}

/*
 * A file in memory: mapped once as it comes, once more where it straddles a
 * page table, and once privately, with every other page copied.
 */
TEST_F(folio_migrate, shmem)
{
	unsigned int order = self->mem.order;
	unsigned int i, nr_folios = self->mem.nr_folios;
	struct mem shared, private;
	char name[64], *other;
	unsigned long split;
	size_t len;
	int fd;

	if (!(thp_shmem_supported_orders() & (1UL << order)))
		SKIP(return, "no shmem folios of order %u", order);

	fd = memfd_create("folio_migrate", 0);
	ASSERT_GE(fd, 0);
	mem_init(&shared, reserve(self->mem.len), order, nr_folios);
	mem_init(&private, reserve(self->mem.len), order, nr_folios);
	len = shared.len;
	ASSERT_EQ(ftruncate(fd, len), 0);
	ASSERT_EQ(mmap(shared.start, len, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_FIXED, fd, 0), shared.start);

	snprintf(name, sizeof(name), "hugepages-%zukB/shmem_enabled",
		 (pagesize << order) >> 10);
	thp_write_string(name, "always");
	for (i = 0; i < shared.nr_pages; i++)
		*shared.page[i].addr = 1;
	thp_write_string(name, "never");
	if (nr_whole_folios(&shared) != nr_folios)
		SKIP(return, "could not allocate shmem folios of order %u",
		     order);
	if (page_node(&shared, 0) != node[0])
		SKIP(return, "could not allocate on node %d", node[0]);
	write_pages(&shared);

	other = reserve(len) + pmdsize - (pagesize << order) / 2;
	ASSERT_EQ(mmap(other, len, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0),
		  other);
	ASSERT_EQ(mmap(private.start, len, PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_FIXED, fd, 0), private.start);
	for (i = 0; i < shared.nr_pages; i++) {
		FORCE_READ(other[i * pagesize]);
		FORCE_READ(*private.page[i].addr);
		private.page[i].version = shared.page[i].version;
		if (i % 2)
			write_page_version(&private, i, 1000);
	}

	drain_lru_caches();
	split = read_counter(&shared, SPLIT);
	bounce(_metadata, &shared);
	bounce(_metadata, &shared);
	move_to(_metadata, &shared, node[1]);
	ASSERT_EQ(read_counter(&shared, SPLIT), split);
	ASSERT_EQ(nr_whole_folios(&shared), nr_folios);

	for (i = 0; i < shared.nr_pages; i++) {
		unsigned long pfn = page_pfn(&shared, i);

		ASSERT_EQ(try_write(other + i * pagesize), SIGSEGV);
		ASSERT_EQ(pagemap_get_pfn(pagemap_fd, other + i * pagesize),
			  pfn);
		FORCE_READ(*private.page[i].addr);
		ASSERT_EQ(page_pfn(&private, i) != pfn, i % 2);
	}
	check_contents(_metadata, &private);

	write_pages(&shared);
	for (i = 0; i < shared.nr_pages; i++) {
		ASSERT_TRUE(is_version((uint64_t *)(other + i * pagesize), i,
				       shared.page[i].version));
		if (!(i % 2))
			private.page[i].version = shared.page[i].version;
	}
	check_contents(_metadata, &private);
	for (i = 0; i < shared.nr_pages; i += 2)
		write_page_version(&private, i, 2000);
	check_contents(_metadata, &shared);
	check_contents(_metadata, &private);
}

/* Memory failure. */

static bool poison_supported(struct __test_metadata *_metadata)
{
	if (madvise(NULL, 0, MADV_HWPOISON))
		SKIP(return false, "MADV_HWPOISON not supported");
	if (access(UNPOISON_PATH, W_OK))
		SKIP(return false, "no " UNPOISON_PATH);
	return true;
}

/* The folio is split, and the pages that are left of it can be moved. */
TEST_F(folio_migrate, poisoned)
{
	struct mem *mem = &self->mem;
	unsigned int i = mem->folio_pages / 2;
	unsigned long pfn = page_pfn(mem, i);
	int status = 0, target = node[1];
	void *addr = mem->page[i].addr;

	if (!poison_supported(_metadata))
		return;
	ASSERT_EQ(try_poison(mem->page[i].addr), 0);
	ASSERT_TRUE(pfn_flags(pfn) & KPF_HWPOISON);
	ASSERT_EQ(try_read(addr), SIGBUS);
	mem->page[i].addr = NULL;

	bounce(_metadata, mem);
	write_pages(mem);
	bounce(_metadata, mem);

	ASSERT_EQ(move_pages(0, 1, &addr, &target, &status, MPOL_MF_MOVE_ALL),
		  0);
	ASSERT_LT(status, 0);
	ASSERT_EQ(try_read(addr), SIGBUS);
	ASSERT_EQ(try_write(addr), SIGBUS);

	ASSERT_EQ(munmap(addr, pagesize), 0);
	ASSERT_EQ(unpoison_memory(pfn), 0);
}

/*
 * The folio could not be split at the time, and has its poisoned page still. It
 * is moved without that page or not at all, but that page is never copied.
 */
TEST_F(folio_migrate, poisoned_unsplit)
{
	struct mem *mem = &self->mem;
	unsigned int n = mem->folio_pages, i = n / 2;
	int *status = alloc(mem->nr_pages, sizeof(*status));
	unsigned long pfn = page_pfn(mem, i);
	void *addr = mem->page[i].addr;
	unsigned int nr;
	int fds[2], ret;

	if (!poison_supported(_metadata))
		return;
	splice_page(_metadata, mem, i - 1, fds);
	ret = try_poison(mem->page[i].addr);
	check_pipe(_metadata, mem, i - 1, fds);
	ASSERT_TRUE(ret == 0 || ret == EHWPOISON || ret == EBUSY);
	ASSERT_TRUE(pfn_flags(pfn) & KPF_HWPOISON);
	ASSERT_TRUE(page_is_large(mem, 0));

	ret = move_folios(mem, node[1], status, &nr);
	if (ret < 0)
		ASSERT_EQ(errno, EHWPOISON);
	if (!ret)
		for (i = 0; i < nr; i++)
			ASSERT_EQ(status[i], node[1]);
	i = n / 2;

	if (!try_read(addr))
		ASSERT_EQ(page_pfn(mem, i), pfn);
	mem->page[i].addr = NULL;
	check_contents(_metadata, mem);
	if (ret >= 0)
		check_node(_metadata, mem, n, mem->nr_pages - n, node[1]);

	mem_free(mem);
	drain_lru_caches();
	if (unpoison_memory(pfn))
		TH_LOG("page %#lx stays poisoned", pfn);
	free(status);
}

FIXTURE(ksm_migrate)
{
	unsigned long run;
};

FIXTURE_SETUP(ksm_migrate)
{
	setup(_metadata);
	if (_metadata->exit_code)
		return;
	if (access(KSM_RUN_PATH, W_OK))
		SKIP(return, "no " KSM_RUN_PATH);
	self->run = read_num(KSM_RUN_PATH);
}

FIXTURE_TEARDOWN(ksm_migrate)
{
	write_num(KSM_RUN_PATH, self->run);
}

/* Sixteen pages, merged into two, which are then moved. */
TEST_F(ksm_migrate, merged)
{
	const unsigned int nr = 16;
	struct mem mem = {};
	struct child child;
	unsigned long pfn[2];
	unsigned int i;
	void *pages[2];
	int nodes[2], status[2] = { -1, -1 };
	char *value;

	mem_init(&mem, reserve(nr * pagesize), 0, nr);
	ASSERT_EQ(mprotect(mem.start, mem.len, PROT_READ | PROT_WRITE), 0);
	for (i = 0; i < nr; i++)
		memset(mem.page[i].addr, 0x55 + i % 2, pagesize);
	value = malloc(2 * pagesize);
	ASSERT_NE(value, NULL);
	memcpy(value, mem.start, 2 * pagesize);

	ASSERT_EQ(ksm_stop(), 0);
	ASSERT_EQ(madvise(mem.start, mem.len, MADV_MERGEABLE), 0);
	ASSERT_EQ(ksm_start(), 0);
	write_num(KSM_RUN_PATH, 0);
	for (i = 2; i < nr; i++)
		ASSERT_EQ(page_pfn(&mem, i), page_pfn(&mem, i % 2));
	pfn[0] = page_pfn(&mem, 0);
	pfn[1] = page_pfn(&mem, 1);
	ASSERT_NE(pfn[0], pfn[1]);

	child_start(_metadata, &mem, &child);
	for (i = 0; i < 2; i++) {
		pages[i] = mem.page[i].addr;
		nodes[i] = page_node(&mem, i) == node[0] ? node[1] : node[0];
	}
	ASSERT_EQ(move_pages(0, 2, pages, nodes, status, MPOL_MF_MOVE_ALL), 0);

	for (i = 0; i < nr; i++) {
		ASSERT_EQ(page_pfn(&mem, i), page_pfn(&mem, i % 2));
		ASSERT_NE(page_pfn(&mem, i), pfn[i % 2]);
		ASSERT_EQ(page_node(&mem, i), nodes[i % 2]);
		ASSERT_EQ(status[i % 2], nodes[i % 2]);
		ASSERT_EQ(memcmp(mem.page[i].addr, value + i % 2 * pagesize,
				 pagesize), 0);
	}

	/* Still copied on write. */
	memset(mem.page[0].addr, 0x77, pagesize);
	for (i = 1; i < nr; i++)
		ASSERT_EQ(memcmp(mem.page[i].addr, value + i % 2 * pagesize,
				 pagesize), 0);
	child_stop(_metadata, &child);
}

FIXTURE(pmd_and_ptes)
{
	struct mem mem;
};

FIXTURE_SETUP(pmd_and_ptes)
{
	setup(_metadata);
	if (_metadata->exit_code)
		return;
	mem_alloc(_metadata, &self->mem, sz2ord(pmdsize, pagesize), 1, true);
}

FIXTURE_TEARDOWN(pmd_and_ptes)
{
}

/* One process maps the folio by a PMD, another one by PTEs. */
TEST_F(pmd_and_ptes, contents)
{
	struct mem *mem = &self->mem;
	struct child child;

	child_start(_metadata, mem, &child);
	ASSERT_EQ(child_ask(&child, REQ_MAP_BY_PTE), 0);
	ASSERT_TRUE(check_huge_anon(mem->start, mem->len, 1, pmdsize));
	bounce(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);

	write_pages(mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	ASSERT_EQ(child_ask(&child, REQ_WRITE_EVEN), 0);
	check_contents(_metadata, mem);
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

TEST_F(pmd_and_ptes, whole)
{
	struct mem *mem = &self->mem;
	struct child child;

	child_start(_metadata, mem, &child);
	ASSERT_EQ(child_ask(&child, REQ_MAP_BY_PTE), 0);
	bounce_whole(_metadata, mem);
	ASSERT_TRUE(check_huge_anon(mem->start, mem->len, 1, pmdsize));
	ASSERT_EQ(child_ask(&child, REQ_CHECK), 0);
	child_stop(_metadata, &child);
}

TEST_HARNESS_MAIN
