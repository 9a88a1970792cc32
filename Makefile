# SPDX-License-Identifier: GPL-2.0-only

# LINUX=DIR: the user's own base; for apply, the tree that the series goes onto.
# What the others are for is in the list of targets, and in scripts/send --help.
export LINUX SIGNOFF MINUTES PART VERSION PREFIX OUT

help:		## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' Makefile

run:		## set up, build stock and patched, boot both, measure, print the table
test:		## all that CI runs
apply:		## put the series onto your own tree: LINUX=DIR [SIGNOFF=1]
send:		## write the mails of a part, mail none: PART=rmap [VERSION=v2 OUT=DIR SIGNOFF=1]
compare:	## what has changed since a tagged version, patch by patch: VERSION=v1
tree:		## make linux/ (a git tree, one commit a patch) of base and patches
refresh:	## write the patches out of linux/
check:		## static checks only
selftests:	## the mm selftests of the kernel, on stock and on patched: results/
debug:		## the tests of the series in kernels with KASAN and with KCSAN: results/
soak:		## racing tests under load for MINUTES=10: results/
matrix:		## build, and run, the series in many configurations: results/
bisect:		## build every patch of it: results/
analyze:	## sparse, coccicheck, checkstack, htmldocs: results/
bench:		## measure at length, several boots of each kernel: results/
native:		## measure the copy at full speed, in user-mode kernels: results/
shell:		## an interactive shell in the patched guest
clean:		## remove build/

run test selftests debug soak matrix bisect analyze bench native apply send \
compare refresh:
	@scripts/$@

tree check:
	@scripts/setup
	@scripts/$@

shell:
	@scripts/setup
	@scripts/tree
	@scripts/kernel patched measure
	@scripts/guest build/$(if $(LINUX),own/)patched-measure/arch/x86/boot/bzImage

clean:
	rm -rf build

.PHONY: help run test selftests debug soak matrix bisect analyze bench native apply \
	send compare tree refresh check shell clean
