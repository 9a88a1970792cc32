# SPDX-License-Identifier: GPL-2.0-only
#
# What the plots have in common. scripts/plot gives csv, the file to draw from, and
# type, svg or png; a plot gives wide and high. No date goes into the file, so that
# the same figures give the same file.

if (type eq 'svg') {
	set terminal svg size wide, high font 'DejaVu Sans,sans-serif,13' background '#ffffff'
	small = 0.85
} else {
	set terminal pngcairo size wide, high font 'DejaVu Sans,10.5'
	small = 1
}
set encoding utf8
set datafile separator comma
set datafile missing NaN

# One light and one dark colour, which are so in grey, too; open and filled points.
old = '#e08a1e'
new = '#123a6b'
set style line 1 lc rgb old lw 1.6 pt 6 ps small
set style line 2 lc rgb new lw 1.6 pt 7 ps 0.85 * small
set style line 3 lc rgb '#808080' lw 1.2 dt 2
set style line 9 lc rgb '#dddddd' lw 0.8

set border 3 lc rgb '#404040'
set tics nomirror out scale 0.5
set grid ytics ls 9

unit(s) = strstrt(s, 'K') + strstrt(s, 'M') + strstrt(s, 'G')
bytes(s) = int(s[1:unit(s) - 1]) * 1024.0 ** strstrt('KMG', s[unit(s):unit(s)])
