/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * For spatch, which reads no headers: macros without which it passes over functions
 * that the series adds, and says nothing.
 */
#define VISIBLE_IF_KUNIT
#define scoped_guard(type, lock) if (1)

/* kselftest_harness.h */
#define FIXTURE_VARIANT_ADD(name, variant) struct name##_variant name##_##variant =
#define TEST_F(fixture, name) void fixture##_##name(void)
#define TEST_F_TIMEOUT(fixture, name, timeout) void fixture##_##name(void)
#define ASSERT_EQ(a, b) if ((a) != (b))
