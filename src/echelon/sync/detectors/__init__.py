"""The detectors of slow workers.

absolute.py         compares with the worker's own average, in seconds and both ways
function.py         a function of the user's
median_mad.py       compares with the median of all workers
running_average.py  compares with the worker's own average
sliding_window.py   compares with the worker's own last steps
"""
