"""A server's arrivals and decisions as events, the same in real training and on the virtual clock.

A rule that is given the recorded arrivals in order must make the recorded decisions (`replay.py`).
"""

from __future__ import annotations

from echelon.observe.events import Arrived, Decided
from echelon.sync.families.serve import Apply, Arrival, Decision, Drop, Invite, Release


def arrived(arrival: Arrival, *, rank: int, version: int) -> Arrived:
    """The event of an arrival; `rank` is the server's, `version` that of its weights."""
    return Arrived(
        t=arrival.t,
        rank=rank,
        worker=arrival.worker,
        kind=arrival.kind,
        step=arrival.step,
        version=version,
        read=arrival.read,
        samples=arrival.samples,
        compute_s=arrival.compute_s,
        transfer_s=arrival.transfer_s,
        square=arrival.square,
        dot=arrival.dot,
    )


def decided(decision: Decision, *, t: float, rank: int, version: int) -> Decided:
    """The event of a decision; `version` is that of the weights after it."""
    match decision:
        case Apply(parts):
            listed = [(part.worker, part.step, part.weight) for part in parts]
            return Decided(t=t, rank=rank, what="apply", version=version, parts=listed)
        case Drop(worker, step, reason):
            return Decided(
                t=t, rank=rank, what="drop", version=version, worker=worker, step=step, reason=reason
            )
        case Release(worker, fresh, ask):
            return Decided(
                t=t, rank=rank, what="release", version=version, worker=worker, fresh=fresh, ask=ask
            )
        case Invite(worker):
            return Decided(t=t, rank=rank, what="invite", version=version, worker=worker)
    return Decided(t=t, rank=rank, what="wake", version=version, at=decision.t)
