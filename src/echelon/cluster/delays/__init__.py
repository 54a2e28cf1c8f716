"""Distributions of pauses, one file each. `cluster/delay.py` is their contract.

constant.py     the same pause every time
uniform.py      between two bounds
normal.py       normal distribution, negative draws count as zero
exponential.py  mostly short, occasionally long
pareto.py       heavy tail
sometimes.py    a fixed pause with a probability
"""
