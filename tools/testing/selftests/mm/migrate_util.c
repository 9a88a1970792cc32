// SPDX-License-Identifier: GPL-2.0
#include <errno.h>
#include <fcntl.h>
#include <numa.h>
#include <numaif.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "hugepage_settings.h"
#include "migrate_util.h"
#include "vm_util.h"

size_t pagesize;
size_t pmdsize;
int node[2];
int pagemap_fd;
int kpageflags_fd;

void *alloc(size_t nr, size_t size)
{
	void *p = calloc(nr, size);

	if (!p)
		ksft_exit_fail_perror("calloc() failed");
	return p;
}

void *alloc_shared(size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE,
		       MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		ksft_exit_fail_perror("mmap() failed");
	return p;
}

/* Return a range that starts a page table and that nothing else will use. */
char *reserve(size_t len)
{
	char *area = mmap(NULL, len + 3 * pmdsize, PROT_NONE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (area == MAP_FAILED)
		ksft_exit_fail_perror("mmap() failed");
	return (char *)(((uintptr_t)area + pmdsize) & ~(pmdsize - 1));
}

uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

/* The system. */

/* False, and errno, if there is no such file or it does not take the value. */
bool try_write_file(const char *path, const char *value)
{
	int fd = open(path, O_WRONLY), err;
	ssize_t ret, len = strlen(value);

	if (fd < 0)
		return false;
	ret = write(fd, value, len);
	err = errno;
	close(fd);
	errno = ret < 0 ? err : EIO;
	return ret == len;
}

unsigned long read_stat(const char *path, const char *name)
{
	FILE *fp = fopen(path, "r");
	unsigned long value = -1UL;
	char line[128];

	if (!fp)
		ksft_exit_fail_perror(path);
	if (check_for_pattern(fp, name, line, sizeof(line)))
		value = strtoul(line + strlen(name), NULL, 10);
	fclose(fp);
	return value;
}

unsigned long read_vmstat(const char *name)
{
	return read_stat("/proc/vmstat", name);
}

unsigned long nr_isolated(void)
{
	write_num(STAT_REFRESH_PATH, 1);
	return read_vmstat("nr_isolated_anon ") +
	       read_vmstat("nr_isolated_file ");
}

/* Folios may wait in a per-CPU batch for their place on an LRU list. */
void drain_lru_caches(void)
{
	int status, target = node[0];
	void *page = &status;

	move_pages(0, 1, &page, &target, &status, MPOL_MF_MOVE);
}

bool node_has_cpu(int nid)
{
	struct bitmask *cpus = numa_allocate_cpumask();
	bool has;

	if (numa_node_to_cpus(nid, cpus))
		ksft_exit_fail_perror("numa_node_to_cpus() failed");
	has = numa_bitmask_weight(cpus);
	numa_free_cpumask(cpus);
	return has;
}

/* Threads. */

#define MAX_RACERS	16

static struct {
	pthread_t thread;
	atomic_bool *stop;
} racers[MAX_RACERS];

static unsigned int nr_racers;

int racer_start(pthread_t *thread, void *(*fn)(void *), void *arg,
		atomic_bool *stop)
{
	int err;

	if (nr_racers == MAX_RACERS)
		ksft_exit_fail_msg("too many threads\n");
	atomic_store(stop, false);
	err = pthread_create(thread, NULL, fn, arg);
	if (err)
		return err;
	racers[nr_racers].thread = *thread;
	racers[nr_racers].stop = stop;
	nr_racers++;
	return 0;
}

int racer_stop(pthread_t thread)
{
	unsigned int i;

	for (i = 0; i < nr_racers; i++)
		if (pthread_equal(racers[i].thread, thread))
			break;
	if (i == nr_racers)
		return -1;
	atomic_store(racers[i].stop, true);
	racers[i] = racers[--nr_racers];
	return pthread_join(thread, NULL);
}

void racers_stop(void)
{
	while (nr_racers)
		racer_stop(racers[0].thread);
}

/* Signals: of whichever thread. */

static __thread sigjmp_buf trap_env;
static __thread atomic_bool trap_armed;

static void trap_handler(int sig)
{
	if (trap_armed)
		siglongjmp(trap_env, sig);
	/* Not expected: let the access be repeated, and end the test. */
	signal(sig, SIG_DFL);
}

static void set_trap_handler(void)
{
	struct sigaction sa = { .sa_handler = trap_handler };

	sigaction(SIGSEGV, &sa, NULL);
	sigaction(SIGBUS, &sa, NULL);
}

int try_read(char *addr)
{
	int sig = sigsetjmp(trap_env, 1);

	trap_armed = !sig;
	if (!sig)
		FORCE_READ(*addr);
	trap_armed = false;
	return sig;
}

int try_write(char *addr)
{
	int sig = sigsetjmp(trap_env, 1);

	trap_armed = !sig;
	if (!sig)
		__atomic_store_n(addr, FORCE_READ(*addr), __ATOMIC_RELAXED);
	trap_armed = false;
	return sig;
}

/*
 * The signal of memory that is poisoned comes before the call has returned.
 * Return the error of the call.
 */
int try_poison(char *addr)
{
	int sig = sigsetjmp(trap_env, 1);
	int err = 0;

	trap_armed = !sig;
	if (!sig && madvise(addr, pagesize, MADV_HWPOISON))
		err = errno;
	trap_armed = false;
	return err;
}

/* Cgroups. */

static char cgroup_root[128];
static char cgroup_path[160];

static bool write_in(const char *dir, const char *name, const char *value)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	return try_write_file(path, value);
}

bool cgroup_write(const char *name, const char *value)
{
	return write_in(cgroup_path, name, value);
}

unsigned long cgroup_read(const char *name)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", cgroup_path, name);
	return read_num(path);
}

unsigned long cgroup_stat(const char *file, const char *name)
{
	char path[256];

	snprintf(path, sizeof(path), "%s/%s", cgroup_path, file);
	return read_stat(path, name);
}

const char *cgroup_enter(const char *controller)
{
	FILE *fp = fopen("/proc/mounts", "r");
	char type[32], line[512], enable[32];

	if (!fp)
		ksft_exit_fail_perror("/proc/mounts");
	while (fgets(line, sizeof(line), fp)) {
		if (sscanf(line, "%*s %127s %31s", cgroup_root, type) == 2 &&
		    !strcmp(type, "cgroup2"))
			break;
		cgroup_root[0] = '\0';
	}
	fclose(fp);
	if (!cgroup_root[0])
		return "cgroup2 is not mounted";
	snprintf(enable, sizeof(enable), "+%s", controller);
	if (!write_in(cgroup_root, "cgroup.subtree_control", enable))
		return "the cgroup2 lacks the controller";

	snprintf(cgroup_path, sizeof(cgroup_path), "%s/migrate.%d", cgroup_root,
		 getpid());
	if (mkdir(cgroup_path, 0755) || !cgroup_write("cgroup.procs", "0"))
		ksft_exit_fail_perror(cgroup_path);
	return NULL;
}

/* False if it is still there. */
bool cgroup_leave(void)
{
	bool left;

	if (!cgroup_path[0])
		return true;
	left = write_in(cgroup_root, "cgroup.procs", "0") &&
	       !rmdir(cgroup_path);
	cgroup_path[0] = '\0';
	return left;
}

/* Setup. */

/* Shared with the processes that run the tests. */
static bool *thp_is_set;

/* Whoever exits has them restored. */
static void forget_thp_settings(void)
{
	*thp_is_set = false;
}

static void __attribute__((constructor)) share_settings(void)
{
	thp_is_set = alloc_shared(sizeof(*thp_is_set));
	atexit(forget_thp_settings);
}

/*
 * Large folios only where and when a test asks for them. That takes its time,
 * so it is done once, and undone in the end.
 */
static void set_thp_settings(void)
{
	struct thp_settings settings;
	int i;

	if (*thp_is_set)
		return;
	thp_read_settings(&settings);
	settings.thp_defrag = THP_DEFRAG_ALWAYS;
	settings.use_zero_page = true;
	for (i = 0; i < NR_ORDERS; i++) {
		settings.hugepages[i].enabled = THP_NEVER;
		settings.shmem_hugepages[i].enabled = SHMEM_NEVER;
	}
	thp_push_settings(&settings);
	*thp_is_set = true;
}

const char *migrate_setup(void)
{
	int n, nr = 0;

	if (geteuid())
		return "not root";
	if (numa_available() < 0)
		return "NUMA not available";
	for (n = 0; n <= numa_max_node() && nr < 2; n++)
		if (numa_bitmask_isbitset(numa_all_nodes_ptr, n))
			node[nr++] = n;
	if (nr < 2)
		return "fewer than two NUMA nodes with memory";

	pagesize = getpagesize();
	pmdsize = read_pmd_pagesize();
	if (!thp_available() || !pmdsize)
		return "no transparent huge pages";

	pagemap_fd = open("/proc/self/pagemap", O_RDONLY);
	kpageflags_fd = open("/proc/kpageflags", O_RDONLY);
	if (pagemap_fd < 0 || kpageflags_fd < 0)
		return "no /proc/self/pagemap and /proc/kpageflags";

	set_trap_handler();
	/* Tasks with a policy are left alone by NUMA balancing. */
	numa_set_preferred(node[0]);
	set_thp_settings();
	return NULL;
}
