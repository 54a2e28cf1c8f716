"""Echelon's engine as a backend of torch.distributed: importing this registers the name "echelon".

    import echelon.backend
    torch.distributed.init_process_group("echelon")

process_group.py  what torch.distributed calls: one method for each of its operations
collectives.py    each collective, in terms of what a group of workers offers
reduction.py      torch's ways to combine tensors (pure)
monitored.py      a barrier that says who did not come
staging.py        buffers in shared memory for tensors that are elsewhere
letters.py        messages from one worker to another, with tags
matching.py       which message goes to which receive (pure)
order.py          carries out operations in the order of their calls, in the background or while waiting
work.py           the handle of an operation in flight, with torch's future
connecting.py     the members of a process group meet at torch's store and connect
failures.py       Echelon's errors as torch's users expect them
register.py       tells torch.distributed about the backend; also torch's entry point
"""

from echelon.backend.register import register as register

register()
