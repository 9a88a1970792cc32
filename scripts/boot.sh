# SPDX-License-Identifier: GPL-2.0-only
# shellcheck shell=bash disable=SC2034
#
# Sourced by the scripts that run tests in guests.

. "$(dirname "$0")/series.sh"

# disk FILE SIZE MKFS...: an image for a guest, with what the command makes on it.
disk()
{
	local file=$1 size=$2
	shift 2

	rm -f "$file"
	truncate -s "$size" "$file"
	"$@" "$file"
}

# in_guest KIND OUT COMMAND OPTIONS...: runs the command under the test kernel of
# KIND, with an ext4 as /dev/vda. The kernel log goes to OUT.log, what it prints to
# OUT.out, what scripts/guest has to say to OUT.err. OPTIONS and the exit status are
# those of scripts/guest.
in_guest()
{
	local kind=$1 out=$2 command=$3 ext4=$work/${0##*/}.img
	shift 3

	disk "$ext4" 1G mkfs.ext4 -q
	"$top/scripts/guest" -l "$out.log" -d "$ext4" "$@" \
		"$work/$kind-test/arch/x86/boot/bzImage" "$command" \
		>"$out.out" 2>"$out.err"
}

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
	logged headers kmake patched "$work/patched-test" headers
	exec 9>&-
	logged selftests make -s -C "$src" OUTPUT="$out" \
		KHDR_INCLUDES="-isystem $work/patched-test/usr/include" \
		"${targets[@]:-all}"
	cp -p "$src"/*.sh "$src/settings" "$out/"
}
