// SPDX-License-Identifier: GPL-2.0
/*
 * Copy folios with several CPUs.
 *
 * The caller copies, and CPUs that are idle help. All of them take chunks from
 * a common cursor until there are none left, so it does not matter how many
 * helpers there are, when they get going, or whether they ever do. The caller
 * waits for no more than the chunks that are being copied when it finds none.
 *
 * Nothing is allocated: the job is on the caller's stack, and each CPU has one
 * helper, which works for one job at a time. That bounds the CPU time of all
 * helpers together, too. A helper gives up when its CPU has other work to do.
 */
#include <linux/completion.h>
#include <linux/cpumask.h>
#include <linux/jump_label.h>
#include <linux/kobject.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/sched.h>
#include <linux/sched/isolation.h>
#include <linux/sched/rt.h>
#include <linux/sched/stat.h>
#include <linux/sched/topology.h>
#include <linux/sysfs.h>
#include <linux/vmstat.h>
#include <linux/workqueue.h>
#include <kunit/visibility.h>
#include <trace/events/migrate.h>

#include "copy_pages.h"
#include "internal.h"

/**
 * struct copy_helper - What copies on another CPU.
 * @work: Copies chunks of @job until there are none left.
 * @lock: Held to look at @job, which the caller may take away at any time.
 * @job: The job to help with, NULL while nobody has asked for this helper.
 * @copying: A chunk is being copied: of @job, or of the one that it was.
 * @nr_chunks: Chunks of @job that it has taken.
 * @nr_pages: Base pages in these.
 * @node: Entry in the list of all helpers of @job.
 * @cpu: The CPU.
 */
struct copy_helper {
	struct work_struct work;
	/* Protects all up to the list entry, which is the caller's. */
	spinlock_t lock;
	struct copy_job *job;
	bool copying;
	unsigned long nr_chunks;
	unsigned long nr_pages;
	struct list_head node;
	int cpu;
};

static DEFINE_PER_CPU(struct copy_helper, copy_helpers);

VISIBLE_IF_KUNIT struct workqueue_struct *copy_pages_wq;
EXPORT_SYMBOL_IF_KUNIT(copy_pages_wq);

DEFINE_STATIC_KEY_FALSE(copy_mt_key);

/* Set in sysfs, see Documentation/ABI/testing/sysfs-kernel-mm-migrate. */
static unsigned int copy_cpus = 1;
static unsigned long copy_min_bytes = SZ_1M;

/* Do the CPUs of the destination help, or those of the source? */
static bool copy_pull;

/**
 * struct copy_chunk - What one CPU copies at a time.
 * @src: The first folio.
 * @dst: The folio to copy it to.
 * @idx: The page of @src to start with.
 * @nr_pages: The number of pages: of @src alone, or, if @idx is 0, of as many
 *	whole folios from there on.
 */
struct copy_chunk {
	struct folio *src;
	struct folio *dst;
	unsigned long idx;
	unsigned long nr_pages;
};

/**
 * copy_job_init - Set up a job of one folio.
 * @job: The job.
 * @dst: The folio to copy to.
 * @src: The folio to copy from.
 *
 * Context: Any context.
 */
VISIBLE_IF_KUNIT void copy_job_init(struct copy_job *job, struct folio *dst,
				    struct folio *src)
{
	*job = (struct copy_job) {
		.src = src,
		.dst = dst,
	};
	spin_lock_init(&job->lock);
	INIT_LIST_HEAD(&job->helpers);
	init_completion(&job->done);
}
EXPORT_SYMBOL_IF_KUNIT(copy_job_init);

/**
 * copy_job_init_lists - Set up a job of lists of folios.
 * @job: The job.
 * @dst_folios: The folios to copy to.
 * @src_folios: As many folios to copy from; not empty.
 * @failed_dst: Where to put those that were not copied to.
 * @failed_src: Where to put those that could not be read.
 *
 * Context: Any context.
 */
VISIBLE_IF_KUNIT void copy_job_init_lists(struct copy_job *job,
					  struct list_head *dst_folios,
					  struct list_head *src_folios,
					  struct list_head *failed_dst,
					  struct list_head *failed_src)
{
	copy_job_init(job, list_first_entry(dst_folios, struct folio, lru),
		      list_first_entry(src_folios, struct folio, lru));
	job->src_list = src_folios;
	job->dst_list = dst_folios;
	job->failed_src = failed_src;
	job->failed_dst = failed_dst;
}
EXPORT_SYMBOL_IF_KUNIT(copy_job_init_lists);

/* Let the next chunk start with the next folio. */
static void copy_job_advance(struct copy_job *job)
{
	lockdep_assert_held(&job->lock);

	job->idx = 0;
	if (!job->src_list || list_is_last(&job->src->lru, job->src_list)) {
		job->src = NULL;
		return;
	}
	job->src = list_next_entry(job->src, lru);
	job->dst = list_next_entry(job->dst, lru);
}

/* Take the next chunk: a piece of a folio, or as many whole ones as fit in. */
static bool copy_job_take(struct copy_job *job, struct copy_chunk *chunk)
{
	unsigned long nr_pages;

	guard(spinlock)(&job->lock);

	if (!job->src)
		return false;

	*chunk = (struct copy_chunk) {
		.src = job->src,
		.dst = job->dst,
		.idx = job->idx,
	};

	nr_pages = folio_nr_pages(job->src) - job->idx;
	if (nr_pages > COPY_CHUNK_PAGES) {
		chunk->nr_pages = COPY_CHUNK_PAGES;
		job->idx += COPY_CHUNK_PAGES;
		return true;
	}

	do {
		chunk->nr_pages += nr_pages;
		copy_job_advance(job);
		if (chunk->idx || !job->src)
			break;
		nr_pages = folio_nr_pages(job->src);
	} while (chunk->nr_pages + nr_pages <= COPY_CHUNK_PAGES);

	return true;
}

/* A page of @src could not be read: what it is copied to is of no use. */
static void copy_job_fail(struct copy_job *job, struct folio *dst,
			  struct folio *src)
{
	struct folio *folio;

	guard(spinlock)(&job->lock);

	job->failed = true;
	if (job->src == src)
		copy_job_advance(job);
	if (!job->src_list)
		return;

	/* Another CPU may have found the same with another piece of it. */
	if (folio_nr_pages(src) > COPY_CHUNK_PAGES) {
		list_for_each_entry(folio, job->failed_src, lru) {
			if (folio == src)
				return;
		}
	}
	list_move_tail(&src->lru, job->failed_src);
	list_move_tail(&dst->lru, job->failed_dst);
}

/*
 * Only the CPU that has taken a chunk removes folios in it from the lists, so
 * their links to each other are stable.
 */
static void copy_job_copy_chunk(struct copy_job *job,
				const struct copy_chunk *chunk)
{
	unsigned long left = chunk->nr_pages, idx = chunk->idx;
	struct folio *src = chunk->src, *dst = chunk->dst;

	for (;;) {
		const unsigned long nr = min(left, folio_nr_pages(src) - idx);
		struct folio *next_src = NULL, *next_dst = NULL;

		cond_resched();

		left -= nr;
		if (left) {
			next_src = list_next_entry(src, lru);
			next_dst = list_next_entry(dst, lru);
		}
		if (unlikely(folio_mc_copy_range(dst, src, idx, nr)))
			copy_job_fail(job, dst, src);
		if (!left)
			return;

		src = next_src;
		dst = next_dst;
		idx = 0;
	}
}

/**
 * copy_job_copy - Copy what nobody else has taken yet.
 * @job: The job.
 *
 * Context: Process context. May sleep.
 */
VISIBLE_IF_KUNIT void copy_job_copy(struct copy_job *job)
{
	struct copy_chunk chunk;

	while (copy_job_take(job, &chunk)) {
		job->nr_chunks++;
		copy_job_copy_chunk(job, &chunk);
	}
}
EXPORT_SYMBOL_IF_KUNIT(copy_job_copy);

/* CPUs that are to be left alone, in whatever way that was said. */
static bool cpu_may_help(int cpu)
{
	/* Cpuset partitions come and go, and with them the CPUs that are isolated. */
	guard(rcu)();

	return !cpu_is_isolated(cpu) && housekeeping_cpu(cpu, HK_TYPE_WQ);
}

/*
 * Workers run where they are asked to, but not only there. So this one looks at
 * what else there is for the CPU that it is on, and whether it may be there.
 *
 * The job is gone as soon as it is no longer the helper's, unless a chunk of it
 * is being copied: that is what its caller waits for.
 */
static void copy_helper_work(struct work_struct *work)
{
	struct copy_helper *helper = container_of(work, struct copy_helper, work);
	struct copy_chunk chunk;
	struct copy_job *job;

	spin_lock(&helper->lock);
	while ((job = helper->job) && single_task_running() &&
	       cpu_may_help(raw_smp_processor_id()) &&
	       copy_job_take(job, &chunk)) {
		helper->nr_chunks++;
		helper->nr_pages += chunk.nr_pages;
		helper->copying = true;
		spin_unlock(&helper->lock);

		copy_job_copy_chunk(job, &chunk);

		spin_lock(&helper->lock);
		helper->copying = false;
		if (!helper->job)
			complete(&job->done);
	}
	spin_unlock(&helper->lock);
}

/**
 * copy_job_ask - Ask for the helper of a CPU.
 * @job: The job to help with.
 * @cpu: The CPU, which is or was online. The helper starts there, or elsewhere
 *	if its workqueue must not run there; it does not copy on a CPU that is
 *	busy.
 *
 * Context: Process context.
 * Return: true if copy_job_finish() has to be called, false if the helper has
 * another job.
 */
VISIBLE_IF_KUNIT bool copy_job_ask(struct copy_job *job, int cpu)
{
	struct copy_helper *helper = per_cpu_ptr(&copy_helpers, cpu);

	scoped_guard(spinlock, &helper->lock) {
		if (helper->job || helper->copying)
			return false;
		WRITE_ONCE(helper->job, job);
		helper->nr_chunks = 0;
		helper->nr_pages = 0;
	}

	list_add_tail(&helper->node, &job->helpers);
	queue_work_on(cpu, copy_pages_wq, &helper->work);
	return true;
}
EXPORT_SYMBOL_IF_KUNIT(copy_job_ask);

/**
 * copy_job_finish - Dismiss all helpers.
 * @job: The job, of which nothing is left to be taken.
 *
 * Helpers that have not started never will. Waits for those that are at a chunk
 * to copy that, and for nothing else.
 *
 * Context: Process context. May sleep.
 */
VISIBLE_IF_KUNIT void copy_job_finish(struct copy_job *job)
{
	struct copy_helper *helper, *next;
	unsigned int nr_copying = 0;

	list_for_each_entry_safe(helper, next, &job->helpers, node) {
		/* Not _sync(): one that runs will find that it has no job. */
		cancel_work(&helper->work);
		list_del(&helper->node);

		guard(spinlock)(&helper->lock);
		WRITE_ONCE(helper->job, NULL);
		nr_copying += helper->copying;
		job->nr_helpers += !!helper->nr_chunks;
		job->nr_helper_chunks += helper->nr_chunks;
		job->nr_helper_pages += helper->nr_pages;
	}

	while (nr_copying--)
		wait_for_completion(&job->done);
}
EXPORT_SYMBOL_IF_KUNIT(copy_job_finish);

/* The CPUs of the node that the administrator prefers, or else of one close. */
static const struct cpumask *copy_job_cpus(const struct copy_job *job)
{
	const bool pull = READ_ONCE(copy_pull);
	const struct cpumask *cpus;

	cpus = cpumask_of_node(folio_nid(pull ? job->dst : job->src));
	if (cpumask_intersects(cpus, cpu_active_mask))
		return cpus;

	cpus = cpumask_of_node(folio_nid(pull ? job->src : job->dst));
	if (cpumask_intersects(cpus, cpu_active_mask))
		return cpus;

	return cpumask_of_node(numa_node_id());
}

static bool cpu_can_help(int cpu)
{
	return cpu_active(cpu) && cpu_may_help(cpu) && idle_cpu(cpu) &&
	       !vcpu_is_preempted(cpu);
}

/* Do more than @nr of those who copy share their last level cache with @cpu? */
static bool copy_job_crowded(const struct copy_job *job, int cpu, unsigned int nr)
{
	unsigned int nr_sharing = cpus_share_cache(cpu, raw_smp_processor_id());
	const struct copy_helper *helper;

	list_for_each_entry(helper, &job->helpers, node) {
		if (nr_sharing > nr)
			break;
		nr_sharing += cpus_share_cache(cpu, helper->cpu);
	}

	return nr_sharing > nr;
}

/**
 * copy_job_ask_idle - Ask for helpers of CPUs that have nothing else to do.
 * @job: The job to help with, of which nothing has been taken yet.
 * @nr: The number of helpers.
 *
 * The helpers are spread over last level caches first: the bandwidth of the
 * CPUs that share one is limited. The number of them that may share one about
 * doubles with each look at all CPUs, so few looks suffice.
 *
 * Context: Process context.
 * Return: How many helpers there are: at most @nr.
 */
VISIBLE_IF_KUNIT unsigned int copy_job_ask_idle(struct copy_job *job,
						unsigned int nr)
{
	const struct cpumask *cpus = copy_job_cpus(job);
	unsigned int nr_asked = 0, nr_sharing = 0;
	bool more;
	int cpu;

	do {
		more = false;
		for_each_cpu_wrap(cpu, cpus, raw_smp_processor_id()) {
			if (nr_asked == nr)
				return nr_asked;
			if (READ_ONCE(per_cpu(copy_helpers, cpu).job) ||
			    !cpu_can_help(cpu))
				continue;
			if (copy_job_crowded(job, cpu, nr_sharing))
				more = true;
			else
				nr_asked += copy_job_ask(job, cpu);
		}
		nr_sharing = 2 * nr_sharing + 1;
		cond_resched();
	} while (more);

	return nr_asked;
}
EXPORT_SYMBOL_IF_KUNIT(copy_job_ask_idle);

/**
 * copy_pages_start - Let there be helpers, from the first call on.
 *
 * Each CPU gets a worker of its own, so that none of them has to wake the next.
 * That is for those alone who want to copy with several CPUs.
 *
 * Context: Process context. May sleep.
 * Return: 0 on success, -ENOMEM.
 */
int copy_pages_start(void)
{
	static DEFINE_MUTEX(lock);
	struct workqueue_struct *wq;
	struct workqueue_attrs *attrs;
	int err = -ENOMEM;

	guard(mutex)(&lock);
	if (copy_pages_wq)
		return 0;

	wq = alloc_workqueue("copy_pages",
			     WQ_UNBOUND | WQ_MEM_RECLAIM | WQ_SYSFS, 0);
	attrs = alloc_workqueue_attrs();
	if (wq && attrs) {
		attrs->affn_scope = WQ_AFFN_CPU;
		err = apply_workqueue_attrs(wq, attrs);
	}
	free_workqueue_attrs(attrs);
	if (!err)
		copy_pages_wq = wq;
	else if (wq)
		destroy_workqueue(wq);

	return err;
}
EXPORT_SYMBOL_IF_KUNIT(copy_pages_start);

/* How many helpers are worth their while? Each should get a few chunks. */
static unsigned int nr_helpers_wanted(unsigned long nr_pages)
{
	/* Whoever finds more than 1 finds the workqueue as well. */
	unsigned long nr_cpus = smp_load_acquire(&copy_cpus);

	/* No helper has a priority that could serve this task. */
	if (rt_or_dl_task(current))
		return 0;

	if (nr_pages * PAGE_SIZE < READ_ONCE(copy_min_bytes))
		return 0;

	nr_cpus = min(nr_cpus, nr_pages / (2 * COPY_CHUNK_PAGES));
	return nr_cpus ? nr_cpus - 1 : 0;
}

static bool copy_job_run(struct copy_job *job, unsigned long nr_folios,
			 unsigned long nr_pages)
{
	u64 start = trace_mm_copy_pages_mt_enabled() ? ktime_get_ns() : 0;
	unsigned int nr_asked;

	nr_asked = copy_job_ask_idle(job, nr_helpers_wanted(nr_pages));
	if (!nr_asked)
		return false;

	copy_job_copy(job);
	copy_job_finish(job);

	count_vm_events(PGMIGRATE_COPY_MT, nr_pages);
	count_vm_events(PGMIGRATE_COPY_HELPER, job->nr_helper_pages);
	trace_mm_copy_pages_mt(nr_folios, nr_pages, job->nr_helper_pages,
			       job->nr_chunks, job->nr_helper_chunks, nr_asked,
			       job->nr_helpers,
			       start ? ktime_get_ns() - start : 0);
	return true;
}

/**
 * copy_page_lists_mt - Copy a list of folios to another with several CPUs.
 * @dst_folios: The folios to copy to.
 * @src_folios: The folios to copy from: as many, in the same order, each one of
 *	the size of its counterpart.
 * @failed_dst: Where to put those that were not copied to.
 * @failed_src: Where to put those that could not be read, in the same order.
 *
 * If it is on, the lists are long enough, and other CPUs are idle, these help
 * the caller to copy, with the same machine-check-safe copy. They are CPUs of
 * one node, the one that is right for the first folio.
 *
 * The folios are on the lists by folio->lru; nobody else may use them, or the
 * lists.
 *
 * Context: Process context, with any locks held that may be held while sleeping.
 * Sleeps only until each helper has copied the chunk that it is at. Does not
 * allocate memory. A real-time task copies alone.
 * Return: true if all folios were copied, except for those that failed; false if
 * the caller had better copy them by itself: nothing was done then.
 */
bool copy_page_lists_mt(struct list_head *dst_folios,
			struct list_head *src_folios,
			struct list_head *failed_dst,
			struct list_head *failed_src)
{
	unsigned long nr_folios = 0, nr_pages = 0;
	struct copy_job job;
	struct folio *src;

	list_for_each_entry(src, src_folios, lru) {
		nr_pages += folio_nr_pages(src);
		nr_folios++;
	}
	if (!nr_helpers_wanted(nr_pages))
		return false;

	copy_job_init_lists(&job, dst_folios, src_folios, failed_dst,
			    failed_src);
	return copy_job_run(&job, nr_folios, nr_pages);
}

/**
 * copy_folio_mt - Copy one folio to another with several CPUs.
 * @dst: The folio to copy to, of the size of @src.
 * @src: The folio to copy from.
 *
 * copy_page_lists_mt() for a single folio, which need not be on a list.
 *
 * Context: As copy_page_lists_mt().
 * Return: 0 on success, -EHWPOISON if @src could not be read, -EAGAIN if the
 * caller had better copy it by itself: nothing was done then.
 */
int copy_folio_mt(struct folio *dst, struct folio *src)
{
	const unsigned long nr_pages = folio_nr_pages(src);
	struct copy_job job;

	if (!nr_helpers_wanted(nr_pages))
		return -EAGAIN;

	copy_job_init(&job, dst, src);
	if (!copy_job_run(&job, 1, nr_pages))
		return -EAGAIN;

	return job.failed ? -EHWPOISON : 0;
}

/**
 * __copy_mt_cpus - How many CPUs should have a batch to copy?
 * @nr_pages: The number of base pages that a single CPU has.
 * @max: The most CPUs that a batch can be made for.
 *
 * Context: Process context.
 * Return: The limit that is set, the caller's own CPU included, but not more than
 * @max; 1 if so many times @nr_pages would not be copied by several CPUs.
 */
unsigned long __copy_mt_cpus(unsigned long nr_pages, unsigned long max)
{
	const unsigned long nr_cpus = min(READ_ONCE(copy_cpus), max);

	return nr_helpers_wanted(nr_cpus * nr_pages) ? nr_cpus : 1;
}

static ssize_t copy_cpus_show(struct kobject *kobj, struct kobj_attribute *attr,
			      char *buf)
{
	return sysfs_emit(buf, "%u\n", READ_ONCE(copy_cpus));
}

static ssize_t copy_cpus_store(struct kobject *kobj,
			       struct kobj_attribute *attr, const char *buf,
			       size_t count)
{
	static DEFINE_MUTEX(lock);
	unsigned int nr;
	int err;

	if (kstrtouint(buf, 10, &nr) || !nr || nr > num_possible_cpus())
		return -EINVAL;

	if (nr > 1) {
		err = copy_pages_start();
		if (err)
			return err;
	}

	/* The value and the key must not end up in disagreement. */
	guard(mutex)(&lock);
	/* Pairs with the smp_load_acquire() in nr_helpers_wanted(). */
	smp_store_release(&copy_cpus, nr);
	if (nr > 1)
		static_branch_enable(&copy_mt_key);
	else
		static_branch_disable(&copy_mt_key);

	return count;
}

static struct kobj_attribute copy_cpus_attr = __ATTR_RW(copy_cpus);

static ssize_t copy_min_bytes_show(struct kobject *kobj,
				   struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lu\n", READ_ONCE(copy_min_bytes));
}

static ssize_t copy_min_bytes_store(struct kobject *kobj,
				    struct kobj_attribute *attr,
				    const char *buf, size_t count)
{
	unsigned long bytes;

	if (kstrtoul(buf, 10, &bytes) || bytes < PAGE_SIZE ||
	    bytes / PAGE_SIZE > totalram_pages())
		return -EINVAL;

	WRITE_ONCE(copy_min_bytes, bytes);
	return count;
}

static struct kobj_attribute copy_min_bytes_attr = __ATTR_RW(copy_min_bytes);

static ssize_t copy_node_show(struct kobject *kobj, struct kobj_attribute *attr,
			      char *buf)
{
	return sysfs_emit(buf, "%s\n", READ_ONCE(copy_pull) ?
			  "source [destination]" : "[source] destination");
}

static ssize_t copy_node_store(struct kobject *kobj,
			       struct kobj_attribute *attr, const char *buf,
			       size_t count)
{
	if (sysfs_streq(buf, "source"))
		WRITE_ONCE(copy_pull, false);
	else if (sysfs_streq(buf, "destination"))
		WRITE_ONCE(copy_pull, true);
	else
		return -EINVAL;

	return count;
}

static struct kobj_attribute copy_node_attr = __ATTR_RW(copy_node);

static struct attribute *migrate_attrs[] = {
	&copy_cpus_attr.attr,
	&copy_min_bytes_attr.attr,
	&copy_node_attr.attr,
	NULL,
};

static const struct attribute_group migrate_attr_group = {
	.name = "migrate",
	.attrs = migrate_attrs,
};

static int __init copy_pages_init(void)
{
	int cpu, err;

	for_each_possible_cpu(cpu) {
		struct copy_helper *helper = per_cpu_ptr(&copy_helpers, cpu);

		INIT_WORK(&helper->work, copy_helper_work);
		spin_lock_init(&helper->lock);
		helper->cpu = cpu;
	}

	err = sysfs_create_group(mm_kobj, &migrate_attr_group);
	if (err)
		pr_err("failed to create the attributes of migrate: %d\n", err);

	return err;
}
subsys_initcall(copy_pages_init);
