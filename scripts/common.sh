# SPDX-License-Identifier: GPL-2.0-only
# shellcheck shell=bash
#
# Sourced by every script here: where things are, and how to speak to the user.

set -eu

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$top/build
logs=$build/logs
export top build logs

BASE_VERSION=7.3.4-1~bpo13+1
BASE_SHA256=703e369ddd4cce971452f5a593ee55df3a5c10c83caf0fa0df039633ed181ee3
VNG_VERSION=1.35
export BASE_VERSION BASE_SHA256 VNG_VERSION

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

# The base as it was imported, or the user's own with LINUX=DIR.
base_version()
{
	make -s --no-print-directory -C "$1" kernelversion
}
