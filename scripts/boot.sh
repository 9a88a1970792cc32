# SPDX-License-Identifier: GPL-2.0-only
# shellcheck shell=bash disable=SC2034
#
# Sourced by the scripts that run tests in guests.

. "$(dirname "$0")/series.sh"

# What kernel is tested; the most seconds that a guest may take; what it does in the
# end; what else is on its command line; where its output goes.
flavour='test' limit=1200 finally=':' append=''
dir=$logs/${0##*/}

# disk FILE SIZE MKFS...: an image for a guest, with what the command makes on it.
disk()
{
	local file=$1 size=$2
	shift 2

	rm -f "$file"
	truncate -s "$size" "$file"
	"$@" "$file"
}

# in_guest KIND OUT COMMAND OPTIONS...: runs the command under the kernel of KIND,
# with an ext4 as /dev/vda. The kernel log goes to OUT.log, what it prints to
# OUT.out, what scripts/guest has to say to OUT.err. OPTIONS and the exit status are
# those of scripts/guest.
in_guest()
{
	local kind=$1 out=$2 command=$3 ext4=$work/${0##*/}.img
	shift 3

	disk "$ext4" 1G mkfs.ext4 -q
	"$top/scripts/guest" -t "$limit" -l "$out.log" -d "$ext4" "$@" \
		"$work/$kind-$flavour/arch/x86/boot/bzImage" \
		"{ $command; }; rc=\$?; $finally; (exit \$rc)" \
		>"$out.out" 2>"$out.err"
}

# What was not freed, in debug kernels: kmemleak wants to see twice that nothing points
# there, and not in the first 5 seconds.
leaks=/sys/kernel/debug/kmemleak
find_leaks="echo scan >$leaks; sleep 6; echo scan >$leaks; cat $leaks"

# For them as well: slow kernels on a slow CPU are not to be taken for dead.
be_patient='workqueue.watchdog_thresh=120 watchdog_thresh=60'

# For the command of a guest: into the ext4, with the selftests in it.
on_ext4="mkdir /tmp/ext4 && mount /dev/vda /tmp/ext4 &&
	cp -r $work/selftests/. /tmp/ext4 && cd /tmp/ext4"

# build_selftests [NAME...]: those of memory management, or all of them, built
# outside of linux/. What does not change keeps its date.
build_selftests()
{
	local src=$linux/tools/testing/selftests/mm out=$work/selftests
	local targets=("${@/#/$out/}")

	# The Makefile there looks for liburing only once.
	! grep -qs 'No liburing' "$src/local_config.mk" || rm -f "$src"/local_config.*
	lock_builds
	say "building selftests: ${*:-all}"
	mkdir -p "$out"
	logged headers kmake patched "$work/patched-$flavour" headers
	exec 9>&-
	logged selftests make -s -C "$src" OUTPUT="$out" \
		KHDR_INCLUDES="-isystem $work/patched-$flavour/usr/include" \
		"${targets[@]:-all}"
	cp -p "$src"/*.sh "$src/settings" "$out/"
}

# The categories of run_vmtests.sh that the series adds. Each has a program of its name.
categories()
{
	touched_by_series A '*/ksft_*.sh' | sed -E 's,.*/ksft_(.*)\.sh$,\1,'
}

# The selftests of the series, and two of the kernel that are near.
build_series_selftests()
{
	# shellcheck disable=SC2046
	build_selftests $(categories) migration rmap
}

clean_log()
{
	"$top/scripts/klog" "$1"
}

# what_runs COMMAND: changes with the kernel and the programs that it names.
what_runs()
{
	local program

	{
		cat "$work/patched-$flavour/arch/x86/boot/bzImage"
		for program in $(categories) migration rmap; do
			[[ $1 != *"$program"* ]] || cat "$work/selftests/$program"
		done
	} | sha256sum
}

# run_tests NAME KIND COMMAND OPTIONS...: runs the command under the patched kernel,
# with an ext4 as /dev/vda, and counts the results: those of KUnit in the kernel log
# (KIND is log) or those of the command in its output (out). OPTIONS are of
# scripts/guest. With $resume, what has passed is not run again.
passed=0 failed=0 skipped=0 executed=0 resume=''
run_tests()
{
	local name=$1 kind=$2 command=$3 kunit=0 rc=0 more='' what counts
	local profiling='page_owner=on sysctl.vm.mem_profiling=1'
	shift 3

	mkdir -p "$dir"
	what=$(what_runs "$command")
	if [ -n "$resume" ] && [ "$(cat "$dir/$name.passed" 2>/dev/null)" = "$what" ]; then
		say "$name has passed"
		read -r -a counts < <(tail -n 1 "$dir/$name.results")
		passed=$((passed + counts[0]))
		skipped=$((skipped + counts[2]))
		return
	fi
	say "$name"
	rm -f "$dir/$name".*
	[ "$kind" = out ] || kunit=1
	in_guest patched "$dir/$name" "$command" -p 4 \
		-k "kunit.enable=$kunit $profiling $append" "$@" || rc=$?
	"$top/scripts/tap" "$name" "$dir/$name.$kind" >"$dir/$name.tap"
	read -r -a counts < <(tail -n 1 "$dir/$name.tap")
	if [ $((counts[0] + counts[1] + counts[2])) = 0 ]; then
		more+="  FAILED: $name: no result"$'\n'
	elif [ "${counts[1]}" = 0 ] && [ $rc != 0 ] && [ $rc != 4 ]; then
		more+="  FAILED: $name: exit status $rc"$'\n'
	fi
	clean_log "$dir/$name.log" || more+="  FAILED: $name: the kernel log is not clean"$'\n'
	counts[1]=$((counts[1] + $(grep -c . <<<"$more" || true)))
	{
		sed '$d' "$dir/$name.tap"
		printf '%s' "$more"
		echo "${counts[*]}"
	} >"$dir/$name.results"
	sed '$d' "$dir/$name.results"
	if [ "${counts[1]}" = 0 ]; then
		echo "$what" >"$dir/$name.passed"
	else
		echo "  (see ${dir#"$top"/}/$name.*)"
	fi
	passed=$((passed + counts[0]))
	failed=$((failed + counts[1]))
	skipped=$((skipped + counts[2]))
	executed=$((executed + counts[0] + counts[1]))
}

# All tests that the series adds, and two of the kernel.
run_series_tests()
{
	local category

	[ -z "$(touched_by_series A '*_kunit.c')" ] || run_tests kunit log true
	for category in $(categories) migration rmap; do
		run_tests "$category" out "$on_ext4 && ./ksft_$category.sh"
	done
	[ ! -x "$work/selftests/migrate_copy" ] ||
		run_tests memory_only out "$on_ext4 && ./migrate_copy -f migrate_copy_mt" -a
	[ ! -x "$work/selftests/migrate_races" ] ||
		run_tests tiers out "$on_ext4 && ./migrate_races -f migrate_system" -a
}
