# SPDX-License-Identifier: GPL-2.0-only
# shellcheck shell=bash disable=SC2034
#
# Sourced by every script here: where things are, and how to speak to the user.

set -eu
unset MAKEFLAGS MAKELEVEL

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$top/build

# work: what is built from one base. base: its source, never changed. linux: a
# git tree, the base as its first commit and one commit a patch. LINUX=DIR
# stands for the user's own kernel tree, which gets a place of its own.
work=$build
base=$build/base
linux=$top/linux
if [ -n "${LINUX:-}" ]; then
	work=$build/own
	base=$work/base
	linux=$work/linux
fi
logs=$work/logs

BASE_VERSION=7.3.4-1~bpo13+1
BASE_SHA256=703e369ddd4cce971452f5a593ee55df3a5c10c83caf0fa0df039633ed181ee3
VNG_VERSION=1.35
B4_VERSION=0.14.2

# virtme-ng, QEMU and b4 as scripts/setup unpacked them, where the system has none or
# one that is too old.
export PATH="$build/qemu/usr/bin:$build/qemu-arm/usr/bin:$build/b4/usr/bin:$PATH:$build/vng/usr/bin"
python=usr/lib/python3/dist-packages
export PYTHONPATH="$build/vng/$python:$build/b4/$python${PYTHONPATH:+:$PYTHONPATH}"

mkdir -p "$logs"

# One line per long stage, with the time since the first script started.
START=${START:-$(date +%s)}
export START

say()
{
	local t=$(($(date +%s) - START))

	printf '[%3d:%02d] %s\n' $((t / 60)) $((t % 60)) "$*"
}

die()
{
	printf '%s: %s\n' "${0##*/}" "$*" >&2
	exit 1
}

# no_options "$@": for scripts that take none. --help prints what their head says.
no_options()
{
	[ $# != 0 ] || return 0
	sed -n '3,/^$/ { /shellcheck/d; s/^# \?//p }' "$0" | sed '/./,$!d' >&2
	case $1 in
	--help|-h) exit 0 ;;
	*) exit 1 ;;
	esac
}

# logged NAME COMMAND...: run it with its output in build/logs/NAME.log; on
# failure print the tail and the path.
logged()
{
	local log=$logs/$1.log
	shift

	if ! "$@" >"$log" 2>&1 </dev/null; then
		tail -n 25 "$log" >&2
		die "failed: $* (whole log: $log)"
	fi
}

# check NAME COMMAND...: one line of what came of it, its output on failure, which
# $failed remembers.
failed=0
check()
{
	local name=$1 log=$logs/${0##*/}-$1.log rc
	shift

	set +e
	(set -e; "$@") >"$log" 2>&1 </dev/null
	rc=$?
	set -e
	if [ $rc = 0 ]; then
		echo "  ok: $name"
	else
		tail -n 40 "$log" >&2
		echo "  FAILED: $name (whole log: $log)"
		failed=1
	fi
}

# Where the source of a KIND of kernel is.
source_of()
{
	case $1 in
	stock) echo "$base" ;;
	patched) echo "$linux" ;;
	rmap) echo "$work/rmap-source" ;;
	bisect) echo "$work/bisect/source" ;;
	esac
}

# kmake KIND OUT ARGS...: make in the source of KIND, built into OUT. Where cross is
# set, with the tools that have this prefix.
kmake()
{
	local src out=$2 cc=${cross:-}gcc hostcc=gcc

	src=$(source_of "$1")
	shift 2
	if command -v ccache >/dev/null; then
		cc="ccache $cc" hostcc="ccache $hostcc"
		export CCACHE_BASEDIR=$top CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1
	fi
	make -s -C "$src" O="$out" CROSS_COMPILE="${cross:-}" CC="$cc" HOSTCC="$hostcc" \
		LOCALVERSION="-${out##*/}" \
		KBUILD_BUILD_USER=guest KBUILD_BUILD_HOST=guest \
		-j"$(nproc)" "$@" 9>&-
}

# kconfig KIND FLAVOUR OUT: allnoconfig with configs/guest.config and
# configs/FLAVOUR.config over it. nomt goes over measure and debug over test; kernels
# that run tests have the suites of mm/tests as well.
kconfig()
{
	local kind=$1 flavour=$2 out=$3 src over=()

	src=$(source_of "$kind")
	mkdir -p "$out"
	[ "$kind" != patched ] || over=("$top/configs/patched.config")
	case $flavour in
	nomt)	over+=("$top/configs/measure.config") ;;
	debug)	over+=("$top/configs/test.config") ;;
	esac
	over+=("$top/configs/$flavour.config")
	case $flavour in
	test|debug|kcsan)
		[ ! -f "$src/mm/tests/.kunitconfig" ] ||
			over+=("$src/mm/tests/.kunitconfig") ;;
	esac
	cat "$top/configs/guest.config" "${over[@]}" >"$out/all.config"
	allconfig "$kind" "$out"
}

# allconfig KIND OUT ARGS...: allnoconfig with OUT/all.config over it, all of it.
# Always made anew, since a patch may have added an option: .config is only
# written when that changes it, so nothing is built in vain.
allconfig()
{
	local kind=$1 out=$2 name=${2##*/} lost
	shift 2

	KCONFIG_ALLCONFIG=$out/all.config \
		logged "$name-config" kmake "$kind" "$out" "$@" allnoconfig

	lost=$(awk '!/^CONFIG_[A-Z0-9_]*=/ { next }
		    { option = substr($0, 1, index($0, "=") - 1) }
		    FILENAME == ARGV[1] { want[option] = $0; next }
		    { is[option] = $0 }
		    END { for (o in want)
				if ((o in is ? is[o] : o "=n") != want[o])
					print want[o] }' "$out/all.config" "$out/.config")
	[ -z "$lost" ] || die "$name: not in the configuration:" "${lost//$'\n'/ }"
}

# One kernel build at a time: two would only take turns.
lock_builds()
{
	exec 9>>"$build/kernel.lock"
	if ! flock -n 9; then
		say "waiting for another kernel build: $(cat "$build/kernel.lock")"
		flock 9
	fi
	echo "${0##*/}, process $$" >"$build/kernel.lock"
}

# What guests run under: KVM or TCG. A /dev/kvm that opens proves nothing:
# where the CPU shows neither vmx nor svm it is an emulation that may hang.
accelerator()
{
	if grep -Eqw 'vmx|svm' /proc/cpuinfo && (: <>/dev/kvm) 2>/dev/null; then
		echo KVM
	else
		echo TCG
	fi
}
