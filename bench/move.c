// SPDX-License-Identifier: GPL-2.0-only
/*
 * Moves anonymous memory between two nodes with move_pages(2) and tells what
 * that costs: one key=value line for each measurement on standard output.
 *
 * For each folio size: fault fresh memory in on one node, move all of it to the
 * other node and back, as often as asked for, one address a folio. Every byte,
 * the node of every page and the size of every folio are checked afterwards.
 *
 *   move	one pass over all the memory: nanoseconds in move_pages(2), of the
 *		clock (ns) and of the CPU time of this thread (cpu). In a guest
 *		under "-icount shift=0" the latter is the number of instructions;
 *		the former also has the time that move_pages(2) sleeps, waiting
 *		for RCU, and the timer that ends the sleep is not the kernel's work.
 *		copy_cpus: 0, or with -m the setting of the kernel in this pass.
 *		Then asked and helped are what the pass added to the counters
 *		pgmigrate_copy_mt and pgmigrate_copy_helper: base pages.
 *   copy	a plain copy of as many bytes between the same two nodes, with the
 *		loop that the kernel copies pages with: the limit.
 *   copy2	with -m: the same by one thread, and half of it each by two on
 *		CPUs of their own: what two CPUs can do at most.
 *   folios	what was left of the folios after all the passes.
 *   stall	with -S: the longest time between two touches of a second thread
 *		that keeps writing to the pages while they move, and the same
 *		while the first thread only copies other memory.
 *
 * Exit: 0 all is well, 1 a byte was lost or a page is on the wrong node, 2 it
 * could not be measured. A folio that was split is reported, not judged.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define THP		"/sys/kernel/mm/transparent_hugepage/"
#define COPY_CPUS	"/sys/kernel/mm/migrate/copy_cpus"
#define COPY_NODE	"/sys/kernel/mm/migrate/copy_node"
#define MPOL_DEFAULT	0
#define MPOL_BIND	2
#define MPOL_MF_MOVE	(1 << 1)

#define KPF_COMPOUND_HEAD	(1ULL << 15)
#define KPF_COMPOUND_TAIL	(1ULL << 16)
#define PM_PRESENT		(1ULL << 63)
#define PM_PFN			((1ULL << 55) - 1)

#define PAGE		4096UL
#define TWO_COPIES	4
#define WORDS		(PAGE / sizeof(uint64_t))
#define TOUCHED		(WORDS - 1)	/* the word that the second thread counts in */
#define PMD		(2UL << 20)
#define SCRATCH		(64UL << 20)
#define QUERY		16384UL

enum kind { BASE, MTHP, PMD_MAPPED, PTE_MAPPED, HUGETLB };

struct size {
	const char *name;
	size_t bytes;
	enum kind kind;
};

static const struct size sizes[] = {
	{ "4K", PAGE, BASE },
	{ "64K", 64UL << 10, MTHP },
	{ "256K", 256UL << 10, MTHP },
	{ "1M", 1UL << 20, MTHP },
	{ "2M", PMD, PMD_MAPPED },
	{ "2M-pte", PMD, PTE_MAPPED },
	{ "1G", 1UL << 30, HUGETLB },
};

#define NR_SIZES	(sizeof(sizes) / sizeof(sizes[0]))

/* The memory under test, and what move_pages(2) is given for it. */
struct area {
	const struct size *size;
	char *map, *mem;
	size_t map_bytes, bytes, pages;
	uint64_t seed;
	void **addr;			/* one for each folio, and between lists */
	int *node, *status;
	size_t nr_addr;
};

static size_t opt_bytes = 64UL << 20;
static int opt_moves = 10, opt_repeats = 1;
static size_t opt_list;
static int opt_from, opt_to = 1;
static bool opt_stall;
static bool opt_warm;
static bool opt_even;
static bool opt_busy;
static int opt_mt;
static const char *opt_name = "move";
static bool cpu_erms, cpu_fsrm;

static cpu_set_t cpus;
static int first_cpu = -1, last_cpu = -1;

static char *scratch_from, *scratch_to;
static size_t scratch_bytes;

static void __attribute__((noreturn, format(printf, 1, 2))) fail(const char *fmt, ...)
{
	va_list ap;

	fputs("move: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	if (errno)
		fprintf(stderr, ": %s", strerror(errno));
	fputc('\n', stderr);
	exit(2);
}

static uint64_t read_clock(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

static uint64_t now(void)
{
	return read_clock(CLOCK_MONOTONIC);
}

struct cost {
	uint64_t ns, cpu;
};

static void start_cost(struct cost *c)
{
	c->ns = now();
	c->cpu = read_clock(CLOCK_THREAD_CPUTIME_ID);
}

static void end_cost(struct cost *c)
{
	c->cpu = read_clock(CLOCK_THREAD_CPUTIME_ID) - c->cpu;
	c->ns = now() - c->ns;
}

/* Kernel settings: the value that was there first comes back at exit. */

struct setting {
	struct setting *next;
	char *path, *value;
};

static struct setting *settings;

static bool read_text(const char *path, char *buf, size_t len)
{
	int fd = open(path, O_RDONLY);
	ssize_t n = -1;

	if (fd >= 0) {
		n = read(fd, buf, len - 1);
		close(fd);
	}
	buf[n > 0 ? n : 0] = '\0';
	buf[strcspn(buf, "\n")] = '\0';
	return n > 0;
}

static bool write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	ssize_t n = -1;

	if (fd >= 0) {
		n = write(fd, text, strlen(text));
		close(fd);
	}
	return n == (ssize_t)strlen(text);
}

static long read_long(const char *path)
{
	char buf[64];

	return read_text(path, buf, sizeof(buf)) ? atol(buf) : -1;
}

/* The number in the first line of a file that has the format. */
static bool find_number(const char *path, const char *format, size_t *number)
{
	FILE *f = fopen(path, "r");
	bool found = false;
	char line[256];

	while (f && !found && fgets(line, sizeof(line), f))
		found = sscanf(line, format, number) == 1;
	if (f)
		fclose(f);
	return found;
}

static bool set(const char *path, const char *text)
{
	struct setting *s;
	char buf[256], *open, *close;

	for (s = settings; s && strcmp(s->path, path); s = s->next)
		;
	if (!s && read_text(path, buf, sizeof(buf))) {
		s = malloc(sizeof(*s));
		if (!s)
			fail("malloc");
		/* A choice is shown as "always [madvise] never". */
		open = strchr(buf, '[');
		close = strchr(buf, ']');
		if (open && close > open) {
			*close = '\0';
			memmove(buf, open + 1, close - open);
		}
		s->path = strdup(path);
		s->value = strdup(buf);
		s->next = settings;
		settings = s;
	}
	return write_text(path, text);
}

static void restore_settings(void)
{
	for (struct setting *s = settings; s; s = s->next)
		write_text(s->path, s->value);
}

/* Only folios of this size, and only where madvise(2) asks for them. */
static bool allow_thp(size_t bytes)
{
	char path[512], want[64];
	bool found = bytes == PAGE;
	struct dirent *d;
	DIR *dir;

	dir = opendir(THP);
	if (!dir)
		return found;
	snprintf(want, sizeof(want), "hugepages-%zukB", bytes >> 10);
	while ((d = readdir(dir))) {
		bool it = !strcmp(d->d_name, want);

		if (strncmp(d->d_name, "hugepages-", 10))
			continue;
		snprintf(path, sizeof(path), THP "%s/enabled", d->d_name);
		if (set(path, it ? "madvise" : "never") && it)
			found = true;
	}
	closedir(dir);
	set(THP "enabled", "madvise");
	set(THP "defrag", "madvise");
	/* Nothing else may change the folios in the meantime. */
	set(THP "khugepaged/scan_sleep_millisecs", "1000000000");
	return found;
}

static long thp_stat(size_t bytes, const char *name)
{
	char path[256];

	snprintf(path, sizeof(path), THP "hugepages-%zukB/stats/%s", bytes >> 10, name);
	return read_long(path);
}

/* Hugetlb pages are taken from a pool on each node. */
static bool hugetlb_pool(size_t bytes, int node, long want)
{
	char path[256], buf[32];

	snprintf(path, sizeof(path),
		 "/sys/devices/system/node/node%d/hugepages/hugepages-%zukB/nr_hugepages",
		 node, bytes >> 10);
	if (read_long(path) >= want)
		return true;
	snprintf(buf, sizeof(buf), "%ld", want);
	return set(path, buf) && read_long(path) >= want;
}

/*
 * The kernel's copy of a page. copy_mc_to_kernel() on x86 is "rep movsb" where
 * the CPU has ERMS, otherwise memcpy(), which then is the loop of memcpy_orig in
 * arch/x86/lib/memcpy_64.S: 12 instructions for 32 bytes, 1,536 for a page.
 */
static void copy(void *to, const void *from, size_t bytes)
{
#ifdef __x86_64__
	if (cpu_erms) {
		asm volatile("rep movsb"
			     : "+D" (to), "+S" (from), "+c" (bytes) : : "memory");
		return;
	}
	bytes -= 32;
	asm volatile("1:	subq $32, %2\n"
		     "	movq 0(%1), %%r8\n"
		     "	movq 8(%1), %%r9\n"
		     "	movq 16(%1), %%r10\n"
		     "	movq 24(%1), %%r11\n"
		     "	leaq 32(%1), %1\n"
		     "	movq %%r8, 0(%0)\n"
		     "	movq %%r9, 8(%0)\n"
		     "	movq %%r10, 16(%0)\n"
		     "	movq %%r11, 24(%0)\n"
		     "	leaq 32(%0), %0\n"
		     "	jae 1b\n"
		     : "+r" (to), "+r" (from), "+r" (bytes)
		     : : "r8", "r9", "r10", "r11", "cc", "memory");
#else
	memcpy(to, from, bytes);
#endif
}

static void set_node(int node)
{
	unsigned long mask[16] = { 0 };
	long ret;

	if (node < 0) {
		ret = syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0);
	} else {
		mask[node / 64] = 1UL << (node % 64);
		ret = syscall(SYS_set_mempolicy, MPOL_BIND, mask, 1024);
	}
	if (ret)
		fail("set_mempolicy");
}

static void *map_touched(size_t bytes)
{
	void *mem = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (mem == MAP_FAILED)
		fail("mmap");
	return mem;
}

/* The two of them never begin at the same place of two PMDs: see even_out(). */
static void *map_scratch(int node, bool odd)
{
	char *mem = mmap(NULL, scratch_bytes + 3 * PMD, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (mem == MAP_FAILED)
		fail("mmap");
	mem = (char *)(((uintptr_t)mem + 2 * PMD - 1) & ~(2 * PMD - 1)) + odd * PMD;
	madvise(mem, scratch_bytes, MADV_HUGEPAGE);
	set_node(node);
	memset(mem, 1 + node, scratch_bytes);
	set_node(-1);
	return mem;
}

/* Maps and touches seven eighths of the free memory of a node. */
static char *take_node(int node, size_t *size)
{
	char path[64], *mem;
	size_t bytes;

	snprintf(path, sizeof(path), "/sys/devices/system/node/node%d/meminfo", node);
	if (!find_number(path, "Node %*d MemFree: %zu", &bytes))
		fail("%s", path);
	bytes = (bytes * 1024 / 8 * 7) & ~(PMD - 1);
	mem = mmap(NULL, bytes + PMD, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		fail("mmap");
	mem = (char *)(((uintptr_t)mem + PMD - 1) & ~(PMD - 1));
	madvise(mem, bytes, MADV_HUGEPAGE);
	set_node(node);
	for (size_t i = 0; i < bytes; i += PAGE)
		mem[i] = 1;
	set_node(-1);
	*size = bytes;
	return mem;
}

/*
 * A guest gets its memory from the host page by page, as it is first touched,
 * which is slow and not to be measured.
 */
static void warm_node(int node)
{
	size_t bytes;
	char *mem = take_node(node, &bytes);

	munmap(mem, bytes);
}

/*
 * An emulated CPU looks addresses up in a table, the place there being the lowest
 * bits of the page number. If a page and its copy have the same place, they drive
 * each other out with every access, and the copy takes five times as long: which
 * pages do is chance, and with a small table all folios of 2M do. QEMU doubles
 * the table when it is flushed while it is almost full, and halves it by and by.
 *
 * Two things that have no effect on a real CPU make such a chance the same for
 * all kernels. Of one node only the even blocks of 2M are used, of the other only
 * the odd ones: keep_blocks() takes the others out of use. And before each pass
 * even_out() touches so much memory on each CPU, here and in the kernel, with a
 * flush after it, that the table has room for more than two folios of 2M.
 */
static void keep_blocks(int node, bool odd)
{
	size_t bytes;
	char *mem = take_node(node, &bytes);
	int pagemap = open("/proc/self/pagemap", O_RDONLY);

	for (size_t i = 0; i < bytes; i += PMD) {
		uint64_t pfn;

		if (pread(pagemap, &pfn, sizeof(pfn),
			  (uintptr_t)(mem + i) / PAGE * sizeof(pfn)) != sizeof(pfn))
			fail("/proc/self/pagemap");
		pfn &= PM_PFN;
		if (!(pfn % (PMD / PAGE)) && pfn / (PMD / PAGE) % 2 == odd)
			madvise(mem + i, PMD, MADV_DONTNEED);
	}
	close(pagemap);
}

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		fail("sched_setaffinity");
}

static void even_out(void)
{
	for (int cpu = first_cpu; cpu <= last_cpu; cpu++) {
		if (!CPU_ISSET(cpu, &cpus))
			continue;
		pin(cpu);
		for (int i = 0; i < 5; i++) {
			char *mem = map_touched(4 * PMD);

			for (size_t j = 0; j < 4 * PMD; j += PAGE)
				mem[j] = 1;
			munmap(mem, 4 * PMD);
		}
	}
	pin(first_cpu);
}

/*
 * Every word tells the page it belongs to, its place there and the repeat. From
 * one word to the next it grows by STEP.
 */
#define STEP	0x9e3779b97f4a7c15ULL

static uint64_t pattern(const struct area *a, size_t page, size_t word)
{
	return (a->seed + page * WORDS + word) * STEP;
}

/*
 * With -l, every so many addresses there is one of a page that is to stay on the
 * other node. There, the kernel ends its list of folios, moves these, and begins a
 * new one. With a call of move_pages(2) for each list, most of the time would go
 * into what a call does once: wait for RCU, and for work on all CPUs.
 */
static bool is_separator(size_t i)
{
	return opt_list && i % (opt_list + 1) == opt_list;
}

static void fill(struct area *a)
{
	uint64_t *p = (uint64_t *)a->mem, value = pattern(a, 0, 0);

	for (size_t i = 0; i < a->pages * WORDS; i++, value += STEP)
		p[i] = value;
}

/* Bytes that are not what they were; *touches: what the second thread added. */
static size_t bad_bytes(const struct area *a, uint64_t *touches)
{
	const uint64_t *p = (const uint64_t *)a->mem;
	size_t bad = 0;

	for (size_t page = 0; page < a->pages; page++, p += WORDS) {
		uint64_t value = pattern(a, page, 0), any = 0;

		for (size_t word = 0; word < TOUCHED; word++, value += STEP)
			any |= p[word] ^ value;
		*touches += p[TOUCHED] - value;
		if (!any)
			continue;
		for (size_t word = 0; word < TOUCHED; word++) {
			uint64_t diff = p[word] ^ pattern(a, page, word);

			for (; diff; diff >>= 8)
				bad += !!(diff & 0xff);
		}
	}
	return bad;
}

/*
 * Looks at the folios behind the area: sets the list of addresses to one a
 * folio, and returns how many folios of the wanted size there are.
 */
static size_t scan(struct area *a)
{
	static int pagemap = -1, kpageflags = -1;
	size_t per_folio = a->size->bytes / PAGE, whole = 0;
	uint64_t *pfn, *flags;

	if (pagemap < 0) {
		pagemap = open("/proc/self/pagemap", O_RDONLY);
		kpageflags = open("/proc/kpageflags", O_RDONLY);
		if (pagemap < 0 || kpageflags < 0)
			fail("/proc/self/pagemap, /proc/kpageflags");
	}
	pfn = malloc(a->pages * sizeof(*pfn));
	flags = malloc(a->pages * sizeof(*flags));
	if (!pfn || !flags)
		fail("malloc");

	for (size_t i = 0; i < a->pages;) {
		size_t want = (a->pages - i) * sizeof(*pfn);
		ssize_t n = pread(pagemap, pfn + i, want,
				  ((uintptr_t)a->mem / PAGE + i) * sizeof(*pfn));

		if (n <= 0)
			fail("/proc/self/pagemap");
		i += n / sizeof(*pfn);
	}
	for (size_t i = 0, n; i < a->pages; i += n) {
		if (!(pfn[i] & PM_PRESENT) || !(pfn[i] & PM_PFN)) {
			errno = 0;
			fail("page %zu of %s: no page frame number", i, a->size->name);
		}
		pfn[i] &= PM_PFN;
		for (n = 1; i + n < a->pages && (pfn[i + n] & PM_PFN) == pfn[i] + n; n++)
			pfn[i + n] &= PM_PFN;
		n *= sizeof(*flags);
		if (pread(kpageflags, flags + i, n, pfn[i] * sizeof(*flags)) != (ssize_t)n)
			fail("/proc/kpageflags");
		n /= sizeof(*flags);
	}

	a->nr_addr = 0;
	for (size_t i = 0; i < a->pages; i++) {
		bool head = flags[i] & KPF_COMPOUND_HEAD;
		size_t n = 1;

		if (!(flags[i] & KPF_COMPOUND_TAIL)) {
			a->nr_addr += is_separator(a->nr_addr);
			a->addr[a->nr_addr++] = a->mem + i * PAGE;
		}
		if (i % per_folio || head != (per_folio > 1))
			continue;
		while (i + n < a->pages && (flags[i + n] & KPF_COMPOUND_TAIL) &&
		       pfn[i + n] == pfn[i] + n)
			n++;
		whole += n == per_folio;
	}
	free(pfn);
	free(flags);
	return whole;
}

/* What is not on this node, as move_pages(2) answers a query. */
static size_t not_on(const struct area *a, int node)
{
	static void *addr[QUERY];
	static int status[QUERY];
	size_t wrong = 0;

	for (size_t i = 0, n; i < a->pages; i += n) {
		n = a->pages - i < QUERY ? a->pages - i : QUERY;
		for (size_t j = 0; j < n; j++)
			addr[j] = a->mem + (i + j) * PAGE;
		if (syscall(SYS_move_pages, 0, n, addr, NULL, status, MPOL_MF_MOVE))
			fail("move_pages (query)");
		for (size_t j = 0; j < n; j++)
			wrong += status[j] != node;
	}
	return wrong;
}

/* Returns NULL, or why there is no such memory here. */
static const char *map_area(struct area *a, const struct size *size, uint64_t seed)
{
	static char reason[128];
	size_t folios, bytes = opt_bytes < size->bytes ? size->bytes : opt_bytes;
	int flags = MAP_PRIVATE | MAP_ANONYMOUS;

	memset(a, 0, sizeof(*a));
	a->size = size;
	a->seed = seed;
	a->bytes = size->kind == HUGETLB ? size->bytes : bytes - bytes % size->bytes;
	a->pages = a->bytes / PAGE;
	a->map_bytes = a->bytes + PMD;

	if (!allow_thp(size->kind == HUGETLB ? PAGE : size->bytes))
		return "no folios of this size in this kernel";
	if (size->kind == HUGETLB) {
		for (int i = 0; i < 2; i++) {
			int node = i ? opt_to : opt_from;

			if (!hugetlb_pool(size->bytes, node, 1)) {
				snprintf(reason, sizeof(reason),
					 "no free hugetlb page on node %d", node);
				return reason;
			}
		}
		flags |= MAP_HUGETLB | __builtin_ctzl(size->bytes) << MAP_HUGE_SHIFT;
		a->map_bytes = a->bytes;
	}
	set_node(opt_from);
	a->map = mmap(NULL, a->map_bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (a->map == MAP_FAILED) {
		set_node(-1);
		if (size->kind == HUGETLB)
			return "no hugetlb page";
		fail("mmap");
	}
	a->mem = a->map;
	if (size->kind != HUGETLB) {
		a->mem = (char *)(((uintptr_t)a->map + PMD - 1) & ~(PMD - 1));
		if (madvise(a->mem, a->bytes,
			    size->kind == BASE ? MADV_NOHUGEPAGE : MADV_HUGEPAGE) &&
		    size->kind != BASE)
			fail("madvise");
	}
	a->addr = map_touched(2 * a->pages * sizeof(*a->addr));
	a->node = map_touched(2 * a->pages * sizeof(*a->node));
	a->status = map_touched(2 * a->pages * sizeof(*a->status));

	if (size->kind == PTE_MAPPED) {
		for (size_t i = 0; i < a->bytes; i += size->bytes) {
			a->mem[i] = 1;
			if (mprotect(a->mem + i, PAGE, PROT_READ) ||
			    mprotect(a->mem + i, PAGE, PROT_READ | PROT_WRITE))
				fail("mprotect");
		}
	}
	fill(a);
	set_node(-1);

	folios = scan(a);
	errno = 0;
	if (folios != a->bytes / size->bytes)
		fail("%zu of %zu folios have the size %s", folios,
		     a->bytes / size->bytes, size->name);
	if (not_on(a, opt_from))
		fail("the memory is not on node %d", opt_from);
	return NULL;
}

static void unmap_area(struct area *a)
{
	munmap(a->map, a->map_bytes);
	munmap(a->addr, 2 * a->pages * sizeof(*a->addr));
	munmap(a->node, 2 * a->pages * sizeof(*a->node));
	munmap(a->status, 2 * a->pages * sizeof(*a->status));
}

/*
 * A spinning process on each CPU, stopped but for the passes. They are there
 * before the memory under test, which they must not share.
 */
static pid_t spinners[CPU_SETSIZE];

static void signal_spinners(int sig)
{
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (spinners[cpu])
			kill(spinners[cpu], sig);
}

static void kill_spinners(void)
{
	signal_spinners(SIGKILL);
}

static void start_spinners(void)
{
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &cpus))
			continue;
		spinners[cpu] = fork();
		if (spinners[cpu] < 0)
			fail("fork");
		if (!spinners[cpu]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			pin(cpu);
			raise(SIGSTOP);
			for (;;)
				asm volatile("");
		}
	}
	atexit(kill_spinners);
}

/* Whoever interrupts this gets his settings back as well. */
static void quit(int sig)
{
	restore_settings();
	kill_spinners();
	signal(sig, SIG_DFL);
	raise(sig);
}

/* The second thread: touches every page in turn, far apart from each other. */

struct toucher {
	pthread_t thread;
	struct area *area;
	int cpu;
	uint64_t touches;		/* all of them */
	uint64_t gap;			/* longest since the last reset */
	bool reset, stop;
};

static void *touch(void *arg)
{
	struct toucher *t = arg;
	uint64_t last, time;
	size_t page = 0;

	pin(t->cpu);
	last = now();
	while (!__atomic_load_n(&t->stop, __ATOMIC_ACQUIRE)) {
		uint64_t *word = (uint64_t *)(t->area->mem + page * PAGE) + TOUCHED;

		__atomic_fetch_add(word, 1, __ATOMIC_RELAXED);
		time = now();
		if (__atomic_load_n(&t->reset, __ATOMIC_ACQUIRE)) {
			t->gap = 0;
			__atomic_store_n(&t->reset, false, __ATOMIC_RELEASE);
		} else if (time - last > t->gap) {
			__atomic_store_n(&t->gap, time - last, __ATOMIC_RELAXED);
		}
		last = time;
		__atomic_store_n(&t->touches, t->touches + 1, __ATOMIC_RELEASE);
		/* 61 is prime to any power of two */
		page = (page + 61) % t->area->pages;
	}
	return NULL;
}

static void start_touching(struct toucher *t, struct area *a, int cpu)
{
	memset(t, 0, sizeof(*t));
	t->area = a;
	t->cpu = cpu;
	if (pthread_create(&t->thread, NULL, touch, t))
		fail("pthread_create");
}

static void wait_for_touch(struct toucher *t)
{
	uint64_t from = __atomic_load_n(&t->touches, __ATOMIC_ACQUIRE);

	/* Two, since the first may have begun before. */
	while (__atomic_load_n(&t->touches, __ATOMIC_ACQUIRE) < from + 2)
		sched_yield();
}

static void reset_gap(struct toucher *t)
{
	__atomic_store_n(&t->reset, true, __ATOMIC_RELEASE);
	while (__atomic_load_n(&t->reset, __ATOMIC_ACQUIRE))
		sched_yield();
}

static uint64_t read_gap(struct toucher *t)
{
	wait_for_touch(t);
	return __atomic_load_n(&t->gap, __ATOMIC_RELAXED);
}

static uint64_t stop_touching(struct toucher *t)
{
	__atomic_store_n(&t->stop, true, __ATOMIC_RELEASE);
	pthread_join(t->thread, NULL);
	return t->touches;
}

/* The copy by several CPUs: what it is set to, and what it did. */

struct mt {
	int cpus;
	size_t asked, helped;
};

/*
 * Off, off, on, on, on, on, off, off and again: there and back with each. The
 * kernel gives free pages back in an order that repeats itself after four passes,
 * so each setting gets each of the four.
 */
static int mt_cpus(int pass)
{
	if (!opt_mt)
		return 0;
	return (pass - 1) / 2 % 4 == 1 || (pass - 1) / 2 % 4 == 2 ? opt_mt : 1;
}

static size_t vmstat(const char *format)
{
	size_t n;

	if (!find_number("/proc/vmstat", format, &n))
		fail("/proc/vmstat: no %s", format);
	return n;
}

static void read_mt(struct mt *mt)
{
	mt->asked = vmstat("pgmigrate_copy_mt %zu");
	mt->helped = vmstat("pgmigrate_copy_helper %zu");
}

/*
 * With one CPU in each node, as in the guests of scripts/guest, the one that can
 * help is that of the node which the caller is not on.
 */
static void start_mt(struct mt *mt, int cpus, int to)
{
	unsigned int own;
	char text[16];

	mt->cpus = cpus;
	if (!cpus)
		return;
	getcpu(NULL, &own);
	snprintf(text, sizeof(text), "%d", cpus);
	if (!set(COPY_CPUS, text) ||
	    !set(COPY_NODE, to == (int)own ? "source" : "destination"))
		fail(COPY_CPUS);
	read_mt(mt);
}

static void end_mt(struct mt *mt)
{
	struct mt before = *mt;

	if (!mt->cpus)
		return;
	read_mt(mt);
	mt->asked -= before.asked;
	mt->helped -= before.helped;
}

/* All of the list once. */
static void move(struct area *a, int to, struct cost *cost)
{
	for (size_t i = 0; i < a->nr_addr; i++) {
		a->node[i] = to;
		a->status[i] = -1;
		if (is_separator(i)) {
			a->addr[i] = to == opt_to ? scratch_from : scratch_to;
			a->node[i] = to == opt_to ? opt_from : opt_to;
		}
	}
	start_cost(cost);
	if (syscall(SYS_move_pages, 0, a->nr_addr, a->addr, a->node, a->status,
		    MPOL_MF_MOVE) < 0)
		fail("move_pages");
	end_cost(cost);
}

/*
 * Looks for pages that did not move, and moves them too, which is not part of
 * the measurement. Of *unmoved pages move_pages(2) had said of *silent that it
 * moved them. Returns the pages that never moved.
 */
static size_t settle(struct area *a, int to, size_t *unmoved, size_t *silent)
{
	size_t said = 0, left = not_on(a, to);
	struct cost again;

	for (size_t i = 0; i < a->nr_addr; i++)
		said += a->status[i] == a->node[i];
	*unmoved = left;
	*silent = said == a->nr_addr ? left : 0;
	for (int tries = 0; left && tries < 20; tries++) {
		scan(a);
		move(a, to, &again);
		left = not_on(a, to);
	}
	return left;
}

static int measure(const struct size *size, int repeat)
{
	static const char *const names[] = {
		"nr_anon", "split", "split_deferred", "nr_anon_partially_mapped",
	};
	long stat[4] = { 0 }, before[4] = { 0 };
	uint64_t touches = 0, counted = 0;
	struct cost cost;
	struct mt mt = { 0 };
	size_t folios, whole, bad, wrong = 0;
	bool large = size->kind != BASE && size->kind != HUGETLB;
	struct toucher toucher;
	const char *reason;
	struct area a;
	int to = opt_from;

	for (int i = 0; large && i < 4; i++)
		before[i] = thp_stat(size->bytes, names[i]);

	reason = map_area(&a, size, (uint64_t)(repeat + 1) << 40);
	if (reason) {
		printf("skip size=%s reason=\"%s\"\n", size->name, reason);
		return 0;
	}
	folios = a.bytes / size->bytes;
	if (opt_stall)
		start_touching(&toucher, &a, last_cpu);

	for (int i = 1; i <= opt_moves; i++) {
		size_t unmoved, silent, left, list;

		to = to == opt_from ? opt_to : opt_from;
		/* A folio that was split is one entry a page from now on. */
		whole = scan(&a);
		list = a.nr_addr;
		if (opt_even)
			even_out();
		start_mt(&mt, mt_cpus(i), to);
		if (opt_busy) {
			signal_spinners(SIGCONT);
			usleep(20000);
		}
		if (opt_stall)
			reset_gap(&toucher);
		move(&a, to, &cost);
		if (opt_busy)
			signal_spinners(SIGSTOP);
		if (opt_stall) {
			uint64_t gap = read_gap(&toucher), end;

			reset_gap(&toucher);
			end = now() + cost.ns;
			while (now() < end)
				copy(scratch_to, scratch_from, PMD);
			printf("stall size=%s repeat=%d pass=%d copy_cpus=%d ns=%llu gap=%llu base_gap=%llu\n",
			       size->name, repeat, i, mt.cpus, (unsigned long long)cost.ns,
			       (unsigned long long)gap,
			       (unsigned long long)read_gap(&toucher));
		}
		end_mt(&mt);
		left = settle(&a, to, &unmoved, &silent);
		wrong += left;
		printf("move size=%s repeat=%d pass=%d touched=%d pages=%zu list=%zu whole=%zu ns=%llu cpu=%llu copy_cpus=%d asked=%zu helped=%zu unmoved=%zu silent=%zu wrong_node=%zu\n",
		       size->name, repeat, i, opt_stall, a.pages, list, whole,
		       (unsigned long long)cost.ns, (unsigned long long)cost.cpu,
		       mt.cpus, mt.asked, mt.helped,
		       unmoved, silent, left);
	}

	if (opt_stall)
		touches = stop_touching(&toucher);
	whole = scan(&a);
	for (int i = 0; large && i < 4; i++)
		stat[i] = thp_stat(size->bytes, names[i]) - before[i];
	bad = bad_bytes(&a, &counted);
	if (counted != touches)
		bad += sizeof(uint64_t);
	printf("folios size=%s repeat=%d touched=%d moves=%d folios=%zu whole=%zu split=%zu nr_anon=%ld stat_split=%ld split_deferred=%ld partially_mapped=%ld bad_bytes=%zu wrong_node=%zu\n",
	       size->name, repeat, opt_stall, opt_moves, folios, whole,
	       folios - whole, stat[0], stat[1], stat[2], stat[3], bad, wrong);
	unmap_area(&a);
	return bad || wrong;
}

static void copy_scratch(size_t from, size_t to)
{
	for (size_t i = from; i < to; i += PAGE)
		copy(scratch_to + i, scratch_from + i, PAGE);
}

static void measure_copy(const struct size *size, int repeat)
{
	struct cost cost;

	if (opt_even)
		even_out();
	start_cost(&cost);
	copy_scratch(0, scratch_bytes);
	end_cost(&cost);
	printf("copy size=%s repeat=%d pages=%zu ns=%llu cpu=%llu\n", size->name,
	       repeat, scratch_bytes / PAGE, (unsigned long long)cost.ns,
	       (unsigned long long)cost.cpu);
}

static void *copy_second_half(void *start)
{
	pin(last_cpu);
	pthread_barrier_wait(start);
	copy_scratch(scratch_bytes / 2, scratch_bytes);
	return NULL;
}

static void measure_two_copies(const struct size *size, int repeat)
{
	uint64_t begin, middle, end;
	pthread_barrier_t start;
	pthread_t second;

	pthread_barrier_init(&start, NULL, 2);
	for (int i = 0; i < TWO_COPIES; i++) {
		if (pthread_create(&second, NULL, copy_second_half, &start))
			fail("pthread_create");
		begin = now();
		copy_scratch(0, scratch_bytes);
		middle = now();
		pthread_barrier_wait(&start);
		end = now();
		copy_scratch(0, scratch_bytes / 2);
		pthread_join(second, NULL);
		printf("copy2 size=%s repeat=%d pages=%zu one=%llu two=%llu\n",
		       size->name, repeat, scratch_bytes / PAGE,
		       (unsigned long long)(middle - begin),
		       (unsigned long long)(now() - end));
	}
	pthread_barrier_destroy(&start);
}

static size_t parse_bytes(const char *text)
{
	char *end;
	size_t n = strtoull(text, &end, 0);

	if (*end && strchr("KMG", *end)) {
		n <<= *end == 'K' ? 10 : *end == 'M' ? 20 : 30;
		end++;
	}
	errno = 0;
	if (*end || !n)
		fail("not a size: %s", text);
	return n;
}

static bool wanted(const char *list, const char *name)
{
	size_t len = strlen(name);

	if (!strcmp(list, "all"))
		return true;
	for (const char *p = list; p; p = strchr(p, ',')) {
		p += *p == ',';
		if (!strncmp(p, name, len) && (!p[len] || p[len] == ','))
			return true;
	}
	return false;
}

/* Which string copy the kernel picks is a matter of these two flags. */
static void print_guest(void)
{
	char line[8192], clock[64] = "";
	struct utsname uts;
	FILE *f;

	f = fopen("/proc/cpuinfo", "r");
	while (f && fgets(line, sizeof(line), f)) {
		if (strncmp(line, "flags", 5))
			continue;
		cpu_erms = strstr(line, " erms");
		cpu_fsrm = strstr(line, " fsrm");
		break;
	}
	if (f)
		fclose(f);
	read_text("/sys/devices/system/clocksource/clocksource0/current_clocksource",
		  clock, sizeof(clock));
	uname(&uts);
	printf("guest name=%s kernel=%s cpus=%d clock=%s erms=%d fsrm=%d\n",
	       opt_name, uts.release, CPU_COUNT(&cpus), clock, cpu_erms, cpu_fsrm);
}

static void usage(FILE *f)
{
	fprintf(f,
		"move [-s SIZE,...] [-b BYTES] [-n MOVES] [-r REPEATS] [-l LIST] [-S]\n"
		"     [-m CPUS] [-B] [-W] [-E] [-f FROM] [-t TO] [-N NAME]\n"
		"  -s  4K,64K,256K,1M,2M,2M-pte,1G or all of them (all)\n"
		"  -b  bytes to move, at least one folio (64M)\n"
		"  -n  moves of the same memory, there and back (10)\n"
		"  -r  repeats, each with fresh memory (1)\n"
		"  -l  folios in one of the lists that the kernel moves together (all)\n"
		"  -S  a second thread touches the pages meanwhile; report its stalls\n"
		"  -m  copy by one CPU (off) and by CPUS of them in turn; those that help are\n"
		"      of the other node\n"
		"  -B  a spinning process on each CPU meanwhile\n"
		"  -W  first touch all free memory of both nodes (a guest's is slow to get)\n"
		"  -E  the same, and for a guest under QEMU's emulation: keep its table of\n"
		"      translations from favouring some addresses\n"
		"  -f, -t  the two memory nodes (0 and 1)\n"
		"  -N  a name for the output\n");
}

static int skip_all(const char *reason)
{
	printf("skip size=all reason=\"%s\"\ndone ret=0\n", reason);
	return 0;
}

int main(int argc, char **argv)
{
	const char *list = "all";
	int opt, ret = 0;

	while ((opt = getopt(argc, argv, "s:b:n:r:l:m:f:t:N:BSWEh")) != -1) {
		switch (opt) {
		case 's':
			list = optarg;
			break;
		case 'b':
			opt_bytes = parse_bytes(optarg);
			break;
		case 'n':
			opt_moves = atoi(optarg);
			break;
		case 'r':
			opt_repeats = atoi(optarg);
			break;
		case 'l':
			opt_list = atol(optarg);
			break;
		case 'm':
			opt_mt = atoi(optarg);
			break;
		case 'f':
			opt_from = atoi(optarg);
			break;
		case 't':
			opt_to = atoi(optarg);
			break;
		case 'S':
			opt_stall = true;
			break;
		case 'B':
			opt_busy = true;
			break;
		case 'W':
			opt_warm = true;
			break;
		case 'E':
			opt_even = true;
			break;
		case 'N':
			opt_name = optarg;
			break;
		case 'h':
			usage(stdout);
			return 0;
		default:
			usage(stderr);
			return 2;
		}
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	atexit(restore_settings);
	signal(SIGINT, quit);
	signal(SIGTERM, quit);
	signal(SIGHUP, quit);
	signal(SIGPIPE, quit);

	if (sched_getaffinity(0, sizeof(cpus), &cpus))
		fail("sched_getaffinity");
	for (int i = 0; i < CPU_SETSIZE; i++) {
		if (!CPU_ISSET(i, &cpus))
			continue;
		if (first_cpu < 0)
			first_cpu = i;
		last_cpu = i;
	}
	print_guest();
	if (opt_stall && first_cpu == last_cpu)
		return skip_all("one CPU, no second thread");
	if (opt_mt && access(COPY_CPUS, W_OK))
		return skip_all("no copy by several CPUs in this kernel");
	if (opt_busy)
		start_spinners();
	pin(first_cpu);

	scratch_bytes = opt_bytes < SCRATCH ? opt_bytes : SCRATCH;
	scratch_bytes = (scratch_bytes + PMD - 1) & ~(PMD - 1);
	allow_thp(PMD);
	if (opt_even) {
		keep_blocks(opt_from, false);
		keep_blocks(opt_to, true);
	} else if (opt_warm) {
		warm_node(opt_from);
		warm_node(opt_to);
	}
	scratch_from = map_scratch(opt_from, false);
	scratch_to = map_scratch(opt_to, true);

	for (size_t i = 0; i < NR_SIZES; i++) {
		if (!wanted(list, sizes[i].name))
			continue;
		for (int repeat = 1; repeat <= opt_repeats; repeat++) {
			if (!opt_stall)
				measure_copy(&sizes[i], repeat);
			if (opt_mt && !opt_stall && !opt_busy)
				measure_two_copies(&sizes[i], repeat);
			ret |= measure(&sizes[i], repeat);
		}
	}
	printf("done ret=%d\n", ret);
	return ret;
}
