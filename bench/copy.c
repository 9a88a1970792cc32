// SPDX-License-Identifier: GPL-2.0-only
/*
 * usage: copy [PASSES]
 *
 * How fast do one thread and two threads copy 64 MiB in blocks of 2M, in user
 * space? This is what two CPUs of this machine can do at most. The memory is of
 * the same kind as that of a user-mode kernel: a file without a name on tmpfs,
 * touched before. Each thread stays on a CPU of its own.
 */
#define _GNU_SOURCE
#include <err.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define BLOCK	(2UL << 20)
#define BYTES	(64UL << 20)

static char *src, *dst;
static int nr_threads;		/* of this pass; 0: the end */
static pthread_barrier_t start, end;

/* The CPUs that this process may run on. */
static int cpus[2];

static void stay_on(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set))
		err(1, "sched_setaffinity");
}

/* Every second block, for one of two threads. */
static void copy_share(int thread)
{
	for (size_t at = thread * BLOCK; at < BYTES; at += nr_threads * BLOCK) {
		void *to = dst + at, *from = src + at;
		size_t len = BLOCK;

		asm volatile("rep movsb"
			     : "+D" (to), "+S" (from), "+c" (len) : : "memory");
	}
}

static void *second(void *unused)
{
	stay_on(cpus[1]);
	for (;;) {
		pthread_barrier_wait(&start);
		if (!nr_threads)
			return unused;
		if (nr_threads == 2)
			copy_share(1);
		pthread_barrier_wait(&end);
	}
}

static uint64_t now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ULL + ts.tv_nsec;
}

/* One thread does without the barriers, which may take as long as a sleep. */
static uint64_t pass(int nr)
{
	uint64_t ns;

	nr_threads = nr;
	if (nr == 1) {
		ns = now();
		copy_share(0);
		return now() - ns;
	}
	pthread_barrier_wait(&start);
	ns = now();
	copy_share(0);
	pthread_barrier_wait(&end);
	return now() - ns;
}

static char *map(void)
{
	int fd = memfd_create("copy", 0);
	char *p;

	if (fd < 0 || ftruncate(fd, BYTES))
		err(1, "memfd");
	p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		err(1, "mmap");
	close(fd);
	return p;
}

static int cmp(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
	int passes = argc > 1 ? atoi(argv[1]) : 25, n, t, nr = 0;
	uint64_t *ns[2];
	pthread_t thread;
	cpu_set_t set;

	if (passes < 1)
		errx(1, "usage: copy [PASSES]");
	if (sched_getaffinity(0, sizeof(set), &set))
		err(1, "sched_getaffinity");
	for (n = 0; n < CPU_SETSIZE && nr < 2; n++)
		if (CPU_ISSET(n, &set))
			cpus[nr++] = n;
	if (nr < 2)
		errx(1, "this takes two CPUs");

	src = map();
	dst = map();
	for (size_t i = 0; i < BYTES / sizeof(uint64_t); i++)
		((uint64_t *)src)[i] = i * 0x9e3779b97f4a7c15ULL;
	memset(dst, 0xd5, BYTES);

	stay_on(cpus[0]);
	pthread_barrier_init(&start, NULL, 2);
	pthread_barrier_init(&end, NULL, 2);
	if (pthread_create(&thread, NULL, second, NULL))
		errx(1, "pthread_create");

	for (t = 0; t < 2; t++) {
		ns[t] = calloc(passes, sizeof(*ns[t]));
		if (!ns[t])
			err(1, "calloc");
		pass(t + 1);
		if (memcmp(src, dst, BYTES))
			errx(1, "%d threads have lost bytes", t + 1);
		memset(dst, 0xd5, BYTES);
	}
	for (n = 0; n < passes; n++) {
		ns[0][n] = pass(1);
		ns[1][n] = pass(2);
	}
	nr_threads = 0;
	pthread_barrier_wait(&start);
	pthread_join(thread, NULL);
	if (memcmp(src, dst, BYTES))
		errx(1, "bytes are lost");

	for (t = 0; t < 2; t++) {
		qsort(ns[t], passes, sizeof(*ns[t]), cmp);
		printf("native: what=user len=%lu cpus=%d bytes=%lu ns=%llu\n",
		       BLOCK, t + 1, BYTES,
		       (unsigned long long)ns[t][passes / 2]);
	}
	return 0;
}
