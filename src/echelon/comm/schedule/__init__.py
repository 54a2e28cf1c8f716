"""Collectives as lists of sends and receives. Everything here is pure.

collective.py  the contract: what a collective, a schedule and a step are
collectives/   one file per collective
fold.py        adapts algorithms for powers of two to any number of workers
spread.py      schedules of broadcast and all-gather
arrange.py     which positions workers have in a collective
cost.py        predicts the time of a schedule, and chooses the cheapest collective
"""
