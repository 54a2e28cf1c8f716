"""The collectives, one file each. `comm/schedule/collective.py` is their contract.

auto.py              chooses the cheapest of the others
ring.py              neighbours only, fewest bytes
direct.py            every pair exchanges parts, in two steps
butterfly.py         exchanges whole buffers, fewest steps
halving_doubling.py  exchanges halves, quarters, ...: few steps and few bytes
binary_blocks.py     halving-doubling for worker counts that are not powers of two
hierarchical.py      sums inside groups, then between groups
ps.py                some workers are servers that sum
"""
