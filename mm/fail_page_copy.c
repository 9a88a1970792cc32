// SPDX-License-Identifier: GPL-2.0
#include <linux/debugfs.h>
#include <linux/fault-inject.h>
#include <linux/mm.h>
#include <kunit/visibility.h>

#include "internal.h"

static struct {
	struct fault_attr attr;

	unsigned long pfn;
} fail_page_copy = {
	.attr = FAULT_ATTR_INITIALIZER,
	.pfn = ULONG_MAX,
};

/* What a KUnit test wants to decide instead; it may sleep. */
VISIBLE_IF_KUNIT fail_page_copy_fn *fail_page_copy_stub;
EXPORT_SYMBOL_IF_KUNIT(fail_page_copy_stub);

/**
 * should_fail_page_copy - Is the copy of some pages to fail?
 * @page: The first page to copy from.
 * @nr_pages: The number of pages.
 *
 * Context: Any context.
 * Return: true if it is to be taken for one that a machine check has ended.
 */
bool should_fail_page_copy(struct page *page, unsigned long nr_pages)
{
	const unsigned long pfn = READ_ONCE(fail_page_copy.pfn);
	fail_page_copy_fn *stub = READ_ONCE(fail_page_copy_stub);

	if (IS_ENABLED(CONFIG_KUNIT) && stub)
		return stub(page, nr_pages);

	if (pfn != ULONG_MAX && pfn - page_to_pfn(page) >= nr_pages)
		return false;

	return should_fail(&fail_page_copy.attr, nr_pages);
}

#ifdef CONFIG_FAULT_INJECTION_DEBUG_FS

static int __init fail_page_copy_debugfs(void)
{
	struct dentry *dir;

	dir = fault_create_debugfs_attr("fail_page_copy", NULL,
					&fail_page_copy.attr);
	debugfs_create_ulong("pfn", 0600, dir, &fail_page_copy.pfn);

	return 0;
}

late_initcall(fail_page_copy_debugfs);

#endif /* CONFIG_FAULT_INJECTION_DEBUG_FS */
