"""How bytes move: who meets whom, what a group can do, and the reduction of gradients.

place.py       which worker am I: the variables that launchers set
rendezvous.py  workers meet, learn of each other, and tell each other why they failed
group.py       the contract of a group of workers: reduce, gather, broadcast
alone.py       the group of one
c10d.py        a group on torch.distributed
buckets.py     which gradients travel together (pure)
reducer.py     reduces gradients while backward goes on
"""
