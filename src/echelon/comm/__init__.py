"""How bytes move: who meets whom, what a group can do, and the reduction of gradients.

place.py       which worker am I: the variables that launchers set
rendezvous.py  workers meet, learn of each other, and tell each other why they failed
group.py       the contract of a group of workers: reduce, gather, broadcast
open.py        which of the following a group is
alone.py       the group of one
c10d.py        a group on torch.distributed
engine.py      a group on our own transports

collective.py  what a collective is: steps of sends and receives (pure); collectives/ has them
fold.py        surplus workers of algorithms for powers of two (pure)
spread.py      broadcast and all-gather as steps (pure)
cost.py        what a schedule costs (pure)
links.py       how fast the links between workers are, measured

mesh.py        every worker connected with every other one
tls.py         connections that others cannot read, on request
handshake.py   a peer proves that it knows the run's secret
frames.py      how a message looks on the wire
connection.py  frames to and from one peer
loop.py        the thread that moves bytes
operation.py   something that a group does together, as the loop sees it
exchange.py    one worker's schedule, carried out
notices.py     what workers tell each other beside the payload
roll_call.py   who is to blame when a deadline has passed (pure)
blame.py       how it is said (pure)
shm.py         reduction in shared memory
segment.py     memory that processes share, without a name
serving.py     servers that only sum, in processes of their own
rails.py       several machines of several workers: shared memory inside, TCP across

buckets.py     which gradients travel together (pure)
parcels.py     what gradients travel in
factors.py     is it cheaper to send a gradient's factors? (pure)
reducer.py     reduces gradients while backward goes on
"""
