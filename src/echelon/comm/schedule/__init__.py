"""Collectives as lists of sends and receives. All of it is pure.

collective.py  what a collective is
collectives/   one file per collective
fold.py        adapts algorithms for powers of two to any number of workers
spread.py      broadcast and all-gather
cost.py        what a schedule costs on given links
"""
