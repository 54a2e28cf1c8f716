"""The codecs, one file each. `codec/codec.py` is their contract.

none.py            no encoding
auto.py            chooses a codec by measured links and speeds
between.py         a codec between sites only
fp16.py, bf16.py   16-bit floating point
fixed.py           fixed point of a few bits
dynamic_fixed.py   fixed point whose scale follows the gradients
one_bit.py         signs and two means
ternary.py         -s, 0 or +s (TernGrad)
top_k.py           the largest elements
threshold.py       the elements above a magnitude
random_k.py        random elements, the same on all workers
sparse_binary.py   positions and one value for all
dgc.py             the largest elements after momentum (deep gradient compression)
power_sgd.py       low-rank factors of each matrix
chain.py           a sparse codec whose values another codec writes
error_feedback.py  adds a residual to a codec that has none
"""
