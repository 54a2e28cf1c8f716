"""Who does how much, and how workers communicate: pure decisions, values in and values out.

groups.py   which workers form a group
balance.py  which shares let all workers arrive together?
shares.py   a batch cut into one share per worker, an epoch cut into batches
plan.py     the whole assignment of a run, and its form on disk
"""
