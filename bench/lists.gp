# SPDX-License-Identifier: GPL-2.0-only
#
# bench.csv: throughput by the length of the list, copied by one CPU and by two.

wide = 1200; high = 720
load dir.'/style.gp'

# A list is called "64 x 2M". Those of the same length stand side by side: one CPU
# to the left of two, busy CPUs to the right of idle ones, a call by itself to the left.
folio(s) = word(s, 3)
len(s) = log(word(s, 1) * bytes(folio(s))) / log(2)
at(measure, size, shift) = strcol(1) eq measure && folio(strcol(3)) eq size \
	? len(strcol(3)) + shift : NaN
kind(k) = k ? '_'.word('busy call', k) : ''
shift(k) = word('0 0.75 -0.75', k + 1)

stats csv using (strcol(1) eq 'throughput_mt' ? $7 : NaN) nooutput
moves = STATS_min
stats csv using (strcol(1) eq 'ratio_mt' ? $11 : NaN) nooutput
set multiplot layout 2,5 margins 0.07,0.99,0.17,0.83 spacing 0.014,0.05 \
	title "move\\_pages(2), the copy by one CPU (mt off) and by two (mt on), by folio size and length of the list\n".\
	"{/*0.85 Emulated x86-64 (QEMU TCG), two CPUs, two nodes. Median and standard deviation, above of ".\
	sprintf("%d moves and more, below of %d rounds and more of moves off and on in turn.}\n", moves, STATS_min).\
	"{/*0.85 A ratio whose bar reaches 1, or nearly, shows no difference. Lists of 256K are too short for a second CPU: what differs there is noise alone.}"

sizes = '4K 64K 1M 2M 64M'
user(s) = s eq '64M'
name(s) = user(s) ? 'a copy in user space' : s eq '2M' ? 'THPs, 2M' : 'folios of '.s
set xrange [16.6:28.4]
unset key
do for [row = 1:2] {
	if (row == 1) {
		set logscale y
		set yrange [0.04:5]
		set ytics (0.05, 0.1, 0.2, 0.5, 1, 2, 4)
		set xtics ('' 18, '' 21, '' 24, '' 27)
	} else {
		unset logscale y
		set yrange [0:2.6]
		set ytics 0, 0.5
		set xtics ('256K' 18, '2M' 21, '16M' 24, '128M' 27)
	}
	do for [i = 1:5] {
		s = word(sizes, i)
		set title row == 1 ? name(s) : '' offset 0,-0.5
		set xlabel row == 2 ? (user(s) ? 'bytes copied' : 'length of the list') : ''
		set ylabel i > 1 ? '' : row == 1 ? 'GB/s, log scale' : 'ratio, mt on / off'
		set format y i > 1 ? '' : '%g'
		if (row == 2 && i < 3) {
			set label 1 "one CPU\nonly" at 17, 0.5 font ',9' textcolor rgb '#606060'
		}
		if (row == 1) {
			plot for [k = 0:2] csv using \
				(at('throughput_mt'.kind(k), s, shift(k) - 0.17)):5:6 \
				with yerrorbars ls 1 pt 6 + 2 * k, \
			for [k = 0:2] csv using \
				(at('throughput_mt'.kind(k), s, shift(k) + 0.17)):9:10 \
				with yerrorbars ls 2 pt 7 + 2 * k, \
			csv using (at('throughput_mt_user', s, -0.17)):5:6 with yerrorbars ls 1, \
			csv using (at('throughput_mt_user', s, 0.17)):9:10 with yerrorbars ls 2
		} else {
			if (i == 5) {
				set key at screen 0.5, screen 0.015 center bottom maxrows 2
			}
			plot 1 with lines ls 3 notitle, \
			for [k = 0:2] csv using (at('ratio_mt'.kind(k), s, shift(k))):9:10 \
				with yerrorbars ls 2 lc rgb '#404040' pt 7 + 2 * k notitle, \
			csv using (at('ratio_mt_user', s, 0)):9:10 \
				with yerrorbars ls 2 lc rgb '#404040' notitle, \
			NaN with points ls 1 title 'mt off, CPUs idle', \
			NaN with points ls 2 title 'mt on, CPUs idle', \
			NaN with points ls 1 pt 8 title 'mt off, every CPU busy', \
			NaN with points ls 2 pt 9 title 'mt on, every CPU busy', \
			NaN with points ls 1 pt 10 title 'mt off, one call a THP', \
			NaN with points ls 2 pt 11 title 'mt on, one call a THP'
		}
		unset label 1
	}
}
unset multiplot
