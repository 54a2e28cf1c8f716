"""Which gradients are reduced together, when, and in what form.

packing.py   assigns gradients to buckets (pure)
bucket.py    the forms a bucket has: whole gradients, a linear layer's own buffer, or its factors
piggyback.py numbers of all workers that travel with a bucket
factors.py   decides whether sending a gradient's factors is cheaper (pure)
unfit.py     whose gradients are not finite, though the others' are?
reducer.py   sends buckets while backward goes on
deferred.py  overlap="step": parameters are updated when the next forward pass uses them
encoded/     buckets whose gradients are encoded by a codec
"""
