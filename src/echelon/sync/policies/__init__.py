"""The synchronisation policies.

full.py               all workers in every step
asynchronous.py       the server applies each gradient on arrival
delay_compensated.py  async, with gradients corrected for their delay
downpour.py           async, with pushes and pulls every few steps
bounded_delay.py      async, with a limit on how far a worker may be ahead
backup.py             does not wait for the slowest few workers
flexible.py           leaves slow workers out until they are normal again
percentage.py         each worker takes part in a share of the rounds
smooth_switch.py      from async to synchronous, by a growing buffer
local.py              several steps alone, then an average of all
elastic_averaging.py  workers tied to a center
gossip.py             averages with neighbours on a graph
hogwild.py            all workers of a machine update the same memory
levels.py             one policy inside groups, another between them
none.py               no synchronisation, as a baseline
"""
