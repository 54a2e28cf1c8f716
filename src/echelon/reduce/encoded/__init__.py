"""Reduction of encoded gradients: the part between a codec and a group.

bucket.py   a bucket whose gradients are sent encoded
encoder.py  makes the encoded buckets of one model
rounds.py   the three ways to combine encoded gradients of several workers, and the bytes of their messages
route.py    which workers exchange encoded gradients: all, or one worker of each site
states.py   codec states by parameter: for checkpoints, and for other numbers of workers
thread.py   the codec thread, which encodes and decodes while backward goes on
cost.py     decides whether a codec pays on these links (pure but for the measurement)
"""
