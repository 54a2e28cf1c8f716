"""Who does how much, and how they talk: pure decisions, values in and values out.

shares.py  a batch cut into one part per worker, an epoch cut into batches
plan.py    the whole assignment of a run, and its form on disk
"""
