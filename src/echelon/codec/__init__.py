"""How is a gradient written on the wire? One file per codec in `codecs/`; all of them pure.

    codec.py      what a codec is: values in, bytes out, with a state for each parameter
    bits.py       numbers of few bits side by side in bytes
    positions.py  where the chosen elements of a sparse vector are, in few bits
    fitting.py    what a codec cannot be combined with
    together.py   what a group of workers ends with, in one memory: the reference

Nothing here knows of sockets, clocks or threads: `comm/coded/` carries the bytes, and adds them up.
"""
