# SPDX-License-Identifier: GPL-2.0-only

# LINUX=DIR: for run, test, bench and shell, the user's own base; for apply, the
# tree that the series goes onto. The others are for send and compare.
export LINUX SIGNOFF PART VERSION PREFIX OUT

help:		## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' Makefile

run:		## set up, build stock and patched, boot both, measure, print the table
test:		## all that CI runs
selftests:	## the mm selftests of the kernel, on stock and on patched: results/
bench:		## measure at length, several boots of each kernel: results/
native:		## measure the copy at full speed, in user-mode kernels: results/
apply:		## put the series onto your own tree: LINUX=DIR [SIGNOFF=1]
send:		## write the mails of one part, mail nothing: PART=rmap [VERSION=v2] [OUT=DIR]
compare:	## what has changed since a version: VERSION=v1
tree:		## make linux/ (a git tree, one commit a patch) of base and patches
refresh:	## write the patches out of linux/
check:		## static checks only
matrix:		## build, and run, the series in many configurations: results/
bisect:		## build every patch of it: results/
analyze:	## sparse, coccicheck, checkstack, htmldocs: results/
shell:		## an interactive shell in the patched guest
clean:		## remove build/

run test selftests bench native matrix bisect analyze apply send compare refresh:
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

.PHONY: help run test selftests bench native matrix bisect analyze apply send compare \
	tree refresh check shell clean
