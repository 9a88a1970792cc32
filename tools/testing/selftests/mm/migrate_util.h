/* SPDX-License-Identifier: GPL-2.0 */
#ifndef __MIGRATE_UTIL_H__
#define __MIGRATE_UTIL_H__

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the tests of migration have in common. */

#define STAT_REFRESH_PATH	"/proc/sys/vm/stat_refresh"

extern size_t pagesize;
extern size_t pmdsize;
extern int node[2];		/* memory is allocated on the first one */
extern int pagemap_fd;
extern int kpageflags_fd;

/* Return NULL, or why the tests have to be skipped. */
const char *migrate_setup(void);

void *alloc(size_t nr, size_t size);
void *alloc_shared(size_t size);	/* with child processes */
char *reserve(size_t len);
uint64_t now_ns(void);

bool try_write_file(const char *path, const char *value);
unsigned long read_stat(const char *path, const char *name);
unsigned long read_vmstat(const char *name);
unsigned long nr_isolated(void);
void drain_lru_caches(void);
bool node_has_cpu(int nid);

/*
 * Threads that race with a test, each until *@stop is set. Return 0 on success.
 * A test that fails leaves them to racers_stop(), before what they use is gone.
 */
int racer_start(pthread_t *thread, void *(*fn)(void *), void *arg,
		atomic_bool *stop);
int racer_stop(pthread_t thread);
void racers_stop(void);

/* An access that is expected to fail: return the signal, 0 if none. */
int try_read(char *addr);
int try_write(char *addr);
int try_poison(char *addr);

/* A cgroup of our own: return NULL, or why there is none. */
const char *cgroup_enter(const char *controller);
bool cgroup_leave(void);
bool cgroup_write(const char *name, const char *value);
unsigned long cgroup_read(const char *name);
unsigned long cgroup_stat(const char *file, const char *name);

#endif /* __MIGRATE_UTIL_H__ */
