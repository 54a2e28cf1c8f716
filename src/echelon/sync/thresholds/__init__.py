"""The thresholds.

exponential.py  doubles after every so many gradients
function.py     a function of the user's
linear.py       grows in proportion to the number of gradients
noise.py        follows the measured noise of gradients
sigmoid.py      grows from one to all workers around a given moment
step.py         grows by one after every so many gradients
"""
