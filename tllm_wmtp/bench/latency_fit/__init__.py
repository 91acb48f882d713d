"""``wmtp bench fit``: the latency model against measurements, and how well it predicts.

student.py      tails and quantiles of Student's t and of F
regression.py   a line with intervals, and a jump in it
repetitions.py  paired repetitions: medians, timers, resamples
fits.py         the lines of one arm and context next to the runtime's timers
predictions.py  a windowed step from a native one
measure.py      the sweep over depths
run_rows.py     the same lines through rows of ``wmtp bench run``
"""
