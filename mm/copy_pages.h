/* SPDX-License-Identifier: GPL-2.0 */
#ifndef __MM_COPY_PAGES_H
#define __MM_COPY_PAGES_H

#include <linux/completion.h>
#include <linux/list.h>
#include <linux/spinlock.h>

struct folio;

/*
 * What one CPU copies before it asks for more: long enough for the lock to be
 * negligible, and short, since the caller may have to wait for it.
 */
#define COPY_CHUNK_PAGES	max(SZ_128K / PAGE_SIZE, 1UL)

/**
 * struct copy_job - Folios that several CPUs copy.
 * @lock: Taken to take a chunk, and when one has failed.
 * @src: The folio that the next chunk starts in, NULL when all is taken.
 * @dst: The folio to copy it to.
 * @idx: The page of @src that the next chunk starts with.
 * @src_list: The list that @src is on, NULL when there is only one folio.
 * @dst_list: The list that @dst is on.
 * @failed_src: Where folios that could not be read are moved to.
 * @failed_dst: Where those that they should have been copied to are moved to.
 * @failed: A folio could not be read.
 * @done: Completed by each helper that was dismissed while it copied a chunk.
 * @helpers: The helpers that were asked for.
 * @nr_chunks: Chunks that the caller has copied.
 * @nr_helpers: How many of the helpers have copied anything; this and what
 *	follows is set by copy_job_finish().
 * @nr_helper_chunks: Chunks that helpers have copied.
 * @nr_helper_pages: Base pages that helpers have copied.
 */
struct copy_job {
	/* Protects where the next chunk starts, the lists, and failed. */
	spinlock_t lock;
	struct folio *src;
	struct folio *dst;
	unsigned long idx;
	struct list_head *src_list;
	struct list_head *dst_list;
	struct list_head *failed_src;
	struct list_head *failed_dst;
	bool failed;
	struct completion done;

	/* The caller's own. */
	struct list_head helpers;
	unsigned long nr_chunks;
	unsigned int nr_helpers;
	unsigned long nr_helper_chunks;
	unsigned long nr_helper_pages;
};

int copy_pages_start(void);

#if IS_ENABLED(CONFIG_KUNIT)
extern struct workqueue_struct *copy_pages_wq;

void copy_job_init(struct copy_job *job, struct folio *dst, struct folio *src);
void copy_job_init_lists(struct copy_job *job, struct list_head *dst_folios,
			 struct list_head *src_folios,
			 struct list_head *failed_dst,
			 struct list_head *failed_src);
bool copy_job_ask(struct copy_job *job, int cpu);
void copy_job_copy(struct copy_job *job);
void copy_job_finish(struct copy_job *job);
unsigned int copy_job_ask_idle(struct copy_job *job, unsigned int nr);
#endif

#endif /* __MM_COPY_PAGES_H */
