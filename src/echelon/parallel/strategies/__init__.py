"""The dimensions that a layout can have, one file each.

data.py      every worker has the whole model and a share of each batch
pipeline.py  every worker has some layers, and passes activations on in micro-batches
sharded.py   every worker keeps and updates a slice of each parameter
threads.py   the threads of each worker compute parts of its share
"""
