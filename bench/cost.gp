# SPDX-License-Identifier: GPL-2.0-only
#
# bench.csv: what it costs to move a page, by the size of the folio that it is in.

wide = 1100; high = 540
load dir.'/style.gp'

# Log scale for folios that are mapped by PTEs; those that are mapped as a whole are
# moved by other code, and stand on their own to the right of them.
whole(s) = s eq '2M' || s eq '1G'
place(s) = whole(s) ? 23.9 + 2.2 * (s eq '1G') : log(bytes(s)) / log(2)
at(measure, w) = strcol(1) eq measure && whole(strcol(3)) == w ? place(strcol(3)) : NaN

stats csv using (strcol(1) eq 'instructions_ten_moves' ? $7 : NaN) nooutput
set multiplot layout 1,2 margins 0.085,0.985,0.235,0.82 spacing 0.095 \
	title "What move\\_pages(2) takes for each 4K page, on stock and with the series\n".\
	sprintf("{/*0.85 Instructions, counted by QEMU -icount: emulated x86-64 (TCG), one CPU, two nodes; median of %d boots, bars: standard deviation}", STATS_max)

set xrange [11.5:27.1]
set xtics ('4K' 12, '64K' 16, '256K' 18, '1M' 20, '2M' 21, '2M' 23.9, '1G' 26.1)
set xlabel 'folio size' offset 0,-1
set label 1 'mapped by PTEs' at 16.5, graph -0.13 center
set label 2 'by a PMD, a PUD' at 25, graph -0.13 center
set arrow 1 from 22.45, graph 0 to 22.45, graph 1 nohead ls 9
unset key

set title 'All of the move' offset 0,-0.5
set ylabel 'instructions per 4K page'
set yrange [0:7500]
copy = 1536	# COPY of bench/report
set label 3 'the copy itself' at 11.8, copy - 350 textcolor rgb '#606060'
do for [less in '- _less_copy'] {
	first = 'instructions_one_move'.(less eq '-' ? '' : less)
	ten = 'instructions_ten_moves'.(less eq '-' ? '' : less)
	if (less ne '-') {
		unset label 3
		copy = NaN
		set title 'Without the copy, which is the same for both'
		set ylabel 'the same less 1536, log scale'
		set logscale y
		set yrange [1:10000]
		set key at screen 0.5, screen 0.02 center bottom maxrows 1
	}
	plot copy with lines ls 3 notitle, \
		for [w = 0:1] csv using (at(first, w)):5:6 \
			with yerrorbars ls 1 pt 4 notitle, \
		for [w = 0:1] csv using (at(ten, w)):5:6 with yerrorbars ls 1 notitle, \
		for [w = 0:1] csv using (at(first, w)):9:10 \
			with yerrorbars ls 2 pt 5 notitle, \
		for [w = 0:1] csv using (at(ten, w)):9:10 with yerrorbars ls 2 notitle, \
		csv using (at(first, 0)):5 with lines ls 1 dt 3 notitle, \
		csv using (at(ten, 0)):5 with lines ls 1 notitle, \
		csv using (at(first, 0)):9 with lines ls 2 dt 3 notitle, \
		csv using (at(ten, 0)):9 with lines ls 2 notitle, \
		NaN with linespoints ls 1 title 'stock, ten moves', \
		NaN with linespoints ls 1 dt 3 pt 4 title 'stock, one move', \
		NaN with linespoints ls 2 title 'series, ten moves', \
		NaN with linespoints ls 2 dt 3 pt 5 title 'series, one move'
}
unset multiplot
