"""Reduction and messages in shared memory.

segment.py      anonymous memory that several processes map
bell.py         sleeping until another worker of the machine rings
cores.py        on which core does a thread run, and should it leave it?
patience.py     waiting for workers of the machine: spin, sleep, deadlines, and who is awaited
shm.py          reduction among the workers of one machine, in buffers that all of them map
slots.py        operations through slots: numbers, heads, and the order of operations
collectives.py  what each operation writes to slots, sums and reads
operations.py   the operations of a group whose members are on one machine
blocks.py       memory for long messages, which receivers map
pairs.py        messages from one worker to another, through rings
messages.py     these messages as futures, and from each to each
rails.py        several workers on each of several machines: shared memory inside, TCP across
"""
