# SPDX-License-Identifier: GPL-2.0-only
# shellcheck shell=bash disable=SC2034
#
# The series in its two forms, and the ways between them: commits in linux/ on
# top of its first one, which is the base; and patches/ with `series` and the
# files that the series adds.

. "$(dirname "$0")/common.sh"

export LC_ALL=C

parts='copy rmap batch mt'
overlay='mm include tools/testing/selftests/mm Documentation'

# What was last written to, or read from, patches/. While linux/ stands there
# it has nothing to lose.
exported=refs/series/exported

# git in linux/. Nobody's configuration or identity plays a part.
g()
{
	GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 \
	GIT_COMMITTER_NAME=series GIT_COMMITTER_EMAIL=series@localhost \
		git -C "$linux" "$@"
}

base_commit()
{
	g rev-list --max-parents=0 HEAD | tail -n 1
}

# checkout COMMIT DIR: only files that differ from what is there are written, so
# nothing is built in vain.
checkout()
{
	mkdir -p "$2"
	GIT_INDEX_FILE=$2.index g --work-tree="$2" read-tree --reset -u "$1"
}

# touched RANGE FILTER PATHSPEC...: the files that these commits add (A), change (M)
# or both; touched_by_series FILTER PATHSPEC...: those of the whole series.
touched()
{
	local range=$1 filter=$2
	shift 2

	g diff --name-only --no-renames --diff-filter="$filter" "$range" -- "$@"
}

touched_by_series()
{
	touched "$(base_commit)..HEAD" "$@"
}

# What is compiled into a kernel.
of_kernel=('*.c' '*.h' ':!tools' ':!Documentation' ':!samples')

# complaints KIND: what a tool said of the source of KIND, one sorted line each, without
# the way to the files and without line numbers, so that it can be compared with what
# the tool said of another source.
complaints()
{
	local src

	src=$(realpath "$(source_of "$1")")
	sed -nE -e "s,$src/,,g" -e 's,^(\.\./)+,,' -e 's,^(base|linux|source)/,,' \
		-e 's/^[Ww]arning: //' \
		-e '/^[^ :]+:[0-9]+/ { s/:[0-9]+(:[0-9-]+)*\b//g; s/\bline [0-9]+/line/g; p }' | sort
}

# history COMMIT: all that a patch keeps of every commit up to it.
history()
{
	g log --reverse --date=raw --format='%T %an <%ae> %ad%n%B' \
		"$(base_commit)..$1"
}

# init_linux: makes linux/ of the base alone, whole or not at all. The threshold
# has git write one pack instead of a file for each blob.
init_linux()
{
	local new=$linux
	local linux=$new.tmp

	rm -rf "$linux"
	cp -a "$base" "$linux"
	g init -q -b series
	g -c core.bigFileThreshold=1 -c core.compression=1 add -A -f
	GIT_AUTHOR_NAME=series GIT_AUTHOR_EMAIL=series@localhost \
	GIT_AUTHOR_DATE='2026-01-01 00:00:00 +0000' \
	GIT_COMMITTER_DATE='2026-01-01 00:00:00 +0000' \
		g commit -q -m "Linux $(make -s -C "$base" kernelversion)"
	g branch base
	g update-ref "$exported" HEAD
	mv "$linux" "$new"
}

# import_patches DIR: makes commits of the patches in a directory on top of the base,
# as git am would, but leaves the files of linux/ alone. Prints the last one.
import_patches()
(
	tmp=$(mktemp -d "$work/import.XXXXXX")
	trap 'rm -rf "$tmp"' EXIT
	export GIT_INDEX_FILE=$tmp/index

	parent=$(base_commit)
	g read-tree "$parent"
	for patch in "$1"/*.patch; do
		[ -e "$patch" ] || continue
		g mailinfo "$tmp/message" "$tmp/diff" <"$patch" >"$tmp/info"
		field() { sed -n "s/^$1: //p" "$tmp/info"; }
		g apply --cached --whitespace=nowarn "$tmp/diff" 2>"$tmp/error" ||
			die "patches/${patch##*/} does not apply to ${linux#"$top"/} (the" \
				"series is for Linux ${BASE_VERSION%%-*}):" "$(cat "$tmp/error")"
		parent=$({ field Subject; echo; cat "$tmp/message"; } |
			git stripspace |
			GIT_AUTHOR_NAME=$(field Author) \
			GIT_AUTHOR_EMAIL=$(field Email) \
			GIT_AUTHOR_DATE=$(field Date) \
			GIT_COMMITTER_DATE=$(field Date) \
			g commit-tree -p "$parent" "$(g write-tree)")
	done
	echo "$parent"
)

# last_of PART: the commit in linux/ that its last patch is.
last_of()
{
	local last commit

	last=$(awk -v part="$1" '/^# part:/ { at = $3 }
				 at == part && /^[0-9]/ { last = $1 }
				 END { print last }' "$top/series")
	last=${last#*-}
	last=${last%.patch}
	commit=$(g log --format='%H %f' "$(base_commit)..HEAD" |
		awk -v name="${last:-?}" 'index($2, name) == 1 { print $1 }')
	[ -n "$commit" ] || die "linux/ has no commit for the last patch of part $1: $last"
	echo "$commit"
}

# before PART: the last commit in linux/ of what comes before it.
before()
{
	local part last

	last=$(base_commit)
	for part in $parts; do
		[ "$part" != "$1" ] || break
		last=$(last_of "$part")
	done
	echo "$last"
}

# list_series PATCHES: the file `series` for the patches in a directory. The part
# of a patch is the one under whose heading its name, less the number, stands
# in `series` so far. A patch with a new name goes where the one before it is.
list_series()
{
	local old=$top/series

	[ -f "$old" ] || old=/dev/null
	find "$1" -name '*.patch' -printf '%f\n' | sort |
	awk -v parts="$parts" -v base="linux-source-7.3 $BASE_VERSION" '
	BEGIN { n = split(parts, order); for (i in order) rank[order[i]] = i + 0; part = order[1] }
	/^# part: / && FILENAME != "-" { was = $3; next }
	/^#/ || !NF { next }
	{ name = $1; sub(/^[0-9]+-/, "", name) }
	FILENAME != "-" { known[name] = was; next }
	{
		if (!(name in known))
			print "new in part " part ", unless moved in series: " $1 >"/dev/stderr"
		else if (rank[known[name]] >= rank[part])
			part = known[name]
		else {
			print $1 " is of part " known[name] ", but follows part " part >"/dev/stderr"
			exit bad = 1
		}
		list[part] = list[part] $1 "\n"
	}
	END {
		if (bad)
			exit 1
		print "# base: " base
		for (i = 1; i <= n; i++)
			printf "\n# part: %s\n%s", order[i], list[order[i]]
	}' "$old" -
}

# list_maintainers: what the series adds to MAINTAINERS, under the headings.
list_maintainers()
{
	g diff -U9999 "$(base_commit)" HEAD -- MAINTAINERS | awk '
	/^(---|\+\+\+|@@|diff|index)/ { next }
	{ mark = substr($0, 1, 1); line = substr($0, 2) }
	line ~ /^[^\t ]/ && line !~ /^[A-Z]:/ { head = line }
	mark == "+" && line != head && line != "" {
		if (head != shown)
			print (shown ? "\n" : "") head
		shown = head
		print line
	}'
}

# export_series DIR: HEAD of linux/ as patches/, series, MAINTAINERS.snippet and
# the files that the series adds, in an empty directory.
export_series()
{
	local root added

	root=$(base_commit)
	[ -z "$(g rev-list --merges "$root..HEAD")" ] ||
		die "linux/ has a merge; the series is a line of commits"
	mkdir -p "$1/patches"
	g -c core.abbrev=12 format-patch -q --zero-commit --no-signature \
		--no-numbered --no-cover-letter -o "$1/patches" "$root..HEAD"
	list_series "$1/patches" >"$1/series"
	g diff --quiet "$root" HEAD -- MAINTAINERS ||
		list_maintainers >"$1/MAINTAINERS.snippet"
	# shellcheck disable=SC2086
	added=$(g diff --name-only --diff-filter=A --no-renames "$root" HEAD -- $overlay)
	# shellcheck disable=SC2086
	[ -z "$added" ] ||
		g -c tar.umask=022 archive HEAD -- $added | tar -x -C "$1"
}
