"""Reduction in shared memory.

segment.py  anonymous memory that several processes map
shm.py      reduction among the workers of one machine
rails.py    several workers on each of several machines: shared memory inside, TCP across
"""
