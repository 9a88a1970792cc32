# SPDX-License-Identifier: GPL-2.0-only
#
# native.csv: the copy by one CPU and by two, at full speed.

wide = 1000; high = 500
load dir.'/style.gp'

user(s) = strstrt(s, 'user space') > 0
place(s) = user(s) ? 24 : log(bytes(word(s, 3))) / log(2)
at(figure, shift) = strcol(1) eq 'two_cpus' && strcol(3) eq figure \
	? place(strcol(2)) + shift : NaN

stats csv using (strcol(1) eq 'two_cpus' ? $6 : NaN) nooutput
set multiplot layout 1,2 margins 0.075,0.985,0.22,0.8 spacing 0.095 \
	title "64 MiB of folios copied by one CPU and by two, by folio size, beside a copy in user space\n".\
	sprintf("{/*0.85 User-mode kernel on two CPUs of a virtual machine, not emulated; median of %d runs, bars: standard deviation}", STATS_max)

set xrange [10.5:25.5]
set xtics ('4K' 12, '64K' 16, '2M' 21, "blocks\nof 2M" 24)
set label 1 'folio size' at 16.5, graph -0.14 center
set arrow 1 from 22.5, graph 0 to 22.5, graph 1 nohead ls 9
set label 2 'user space' at 24, graph 1.04 center
set label 3 'kernel' at 16.5, graph 1.04 center

set ylabel 'GB/s'
set yrange [0:22]
set key at screen 0.5, screen 0.02 center bottom maxrows 1
plot csv using (at('old', -0.15)):4:5 with yerrorbars ls 1 notitle, \
	csv using (at('new', 0.15)):4:5 with yerrorbars ls 2 notitle, \
	NaN with points ls 1 title 'one CPU', NaN with points ls 2 title 'two CPUs'

unset key
set ylabel 'ratio, two CPUs / one'
set yrange [0:2.4]
plot 1 with lines ls 3, \
	csv using (at('ratio', 0)):4:5 with yerrorbars ls 2 lc rgb '#404040'
unset multiplot
