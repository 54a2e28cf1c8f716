"""How bytes move between workers: a group and the transports that carry it out.

group.py     the contract of a group of workers: reduce, gather, broadcast, exchange messages
future.py    the result of an operation in flight
inbox.py     a queue between threads, with waits that end
open.py      opens a group: chooses one of the following three
changing.py  a group whose operations are repeated without members that were lost
returning.py the group of a worker that was started again, before it is a member
left_out.py  the group of a worker that is left out for a while
alone.py     the group of one
c10d.py      a group on torch.distributed
c10d_store.py the store with which it connects, on the meeting's board
engine.py    a group on Echelon's own transports
endpoint.py  a worker's connections and memory, which a group and its forks share

meet/        how workers find each other, connect, and measure their links
wire/        messages on TCP connections, and the operations that send and receive them
schedule/    collectives as lists of sends and receives (pure)
memory/      reduction and messages in shared memory
"""
