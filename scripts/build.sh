# SPDX-License-Identifier: GPL-2.0-only
# shellcheck shell=bash
#
# Sourced by the scripts that compile what the series touches: in one configuration
# or in many, all of the series or each of its patches.

. "$(dirname "${BASH_SOURCE[0]}")/series.sh"

# kernel_id COMMIT: changes with all that a kernel is made of, and with nothing else.
kernel_id()
{
	g ls-tree "$1" | grep -vE '\b(Documentation|MAINTAINERS|samples|tools)$' | sha256sum |
		cut -c 1-16
}

# fitting SRC FILE...: these configurations, less the options of the series that the
# source does not have.
fitting()
{
	local src=$1 option absent=(-e '^$')
	shift

	for option in $(g diff "$(base_commit)" HEAD -- '*Kconfig*' | sed -n 's/^+config //p'); do
		grep -rqx --include='Kconfig*' "config $option" "$src/mm" "$src/lib" ||
			absent+=(-e "^CONFIG_$option=")
	done
	grep -hv "${absent[@]}" "$@"
}

# configured SRC OUT FILE...: the objects of those of these .c files that are there
# and that the configuration in OUT has. Those that no option is about, it has.
configured()
{
	local src=$1 out=$2 file object option
	shift 2

	for file; do
		object=${file%.c}.o
		option=$(sed -nE "s,^obj-\\$\((CONFIG_\w+)\).*\s${object#*/}(\s.*)?\$,\1,p" \
			"$src/${file%%/*}/Makefile")
		if [ -f "$src/$file" ] && grep -q "^${option:-CONFIG_MMU}=[ym]" "$out/.config"; then
			echo "$object"
		fi
	done
}

# warnings KIND OUT FILES OBJECTS ARGS...: compiles the objects with W=1 and prints
# the warnings that are in the files.
warnings()
{
	local kind=$1 out=$2 files=${3//$'\n'/:$'\n'}: objects=$4 name=${2##*/}-w1 object
	shift 4

	for object in $objects; do
		rm -f "$out/$object"
	done
	# shellcheck disable=SC2086
	logged "$name" kmake "$kind" "$out" "$@" W=1 -k $objects
	grep -Ei '(warning|error): ' "$logs/$name.log" | complaints "$kind" |
		grep -F "$files" | sort -u || true
}

# new_warnings KIND OUT FILES OBJECTS ARGS...: those of this source, configured in OUT,
# that the base does not have. That is only compiled if there is something to ask.
new_warnings()
{
	local kind=$1 out=$2 files=$3 objects=$4 stock=$2-stock known='' new object
	shift 4

	[ -n "$objects" ] || return 0
	new=$(warnings "$kind" "$out" "$files" "$objects" "$@")
	[ -n "$new" ] || return 0
	mkdir -p "$stock"
	fitting "$base" "$out/all.config" >"$stock/all.config"
	allconfig stock "$stock" "$@"
	for object in $objects; do
		[ ! -f "$base/${object%.o}.c" ] || known="$known $object"
	done
	comm -23 <(echo "$new") <(warnings stock "$stock" "$files" "$known" "$@")
}

# keep RESULT KEY WHAT COMMAND...: runs it, unless that went well with the same key.
# Of what it prints, the first line is for the table and the others are details. Sets
# rc.
keep()
{
	local result=$1 key=$2 what=$3 verdict=ok
	shift 3

	rc=0
	[ "$(head -n 1 "$result" 2>/dev/null)" != "ok $key" ] || return 0
	say "$what"
	set +e
	(set -e; "$@") >"$result.out" 2>&1 </dev/null
	rc=$?
	set -e
	if [ $rc != 0 ]; then
		verdict=FAILED
		tail -n 25 "$result.out" >&2
		say "FAILED: $what"
	fi
	{ echo "$verdict $key"; cat "$result.out"; } >"$result.new"
	mv "$result.new" "$result"
	rm "$result.out"
}

# cell RESULT KEY: what the table says of it. That of another key says nothing.
cell()
{
	case $(head -n 1 "$1" 2>/dev/null) in
	"ok $2") sed -n 2p "$1" ;;
	"FAILED $2") echo "FAILED: $(sed -n 2p "$1")" ;;
	*) echo "not run" ;;
	esac
}
