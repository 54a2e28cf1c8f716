"""How a gradient is written on the wire. Everything here is pure: no sockets, clocks or threads.

codec.py      the contract: values in, bytes out, with a state for each parameter
codecs/       one file per codec
bits.py       packs numbers of few bits into bytes
grid.py       rounds values to evenly spaced levels, and back
halves.py     16-bit floating-point types that never overflow
positions.py  writes the positions of a sparse vector in few bits
sparse.py     chooses the largest elements and writes them, for all sparse codecs
fitting.py    refuses combinations that a codec does not support
reference.py  combines the gradients of a group in one process: the reference for tests and `echelon bench`

`reduce/encoded/` carries the bytes between workers and adds the gradients up.
"""
