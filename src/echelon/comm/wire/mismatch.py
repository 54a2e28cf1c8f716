"""Do workers make different calls, so that they would wait for each other for ever? Pure.

This worker is blocked on operation A, a peer on operation B. It is certain that neither can go on if

    A cannot end without the peer, which has not begun it, and
    B cannot end without this worker, which has not begun it, and
    nobody else can begin them: a worker begins operations in its training thread, which is blocked.

Waits that end by themselves, after a timeout of the script, do not count. The peer's answer is about one
moment, at which this worker had been blocked already and still was when the answer came. So both are true
of that moment, and from then on nothing can change.

It is as certain if the peer has ended its part of A, and this worker still lacks a message of it: messages
arrive in order, so the message will not come. Then the peer did something else under the same number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from echelon.comm.wire import doing
from echelon.comm.wire.doing import Doing
from echelon.errors import MismatchedCalls

_DIFFERENT_CALLS = "workers make different calls"
SAME_CALLS = "all workers must make the same calls in the same order"
SAME_TENSORS = "all workers must make the same calls with tensors of the same shape and type"
_CONDITIONS = "look for `break`, `continue` and conditions on the rank or on a worker's own loss"
_FIXES = {
    doing.IN_FORWARD: "all workers must run this forward pass, in which BatchNorm exchanges statistics: "
    "call model.eval() before a forward pass of one worker",
    doing.IN_BACKWARD: f"all workers must make the same number of backward passes: {_CONDITIONS}",
    doing.IN_STEP: f"all workers must take the same number of optimizer steps: {_CONDITIONS}",
    doing.AT_PASS: "all workers must loop over a prepared loader together, and to its end: "
    "look for `break` and conditions on the rank",
    doing.AT_EPOCH_END: f"all workers must run the same number of epochs: {_CONDITIONS}",
}


class Stage(IntEnum):
    """How far a worker is with an operation."""

    NOT_BEGUN = 0
    BEGUN = 1
    OVER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of one peer at one moment.

    stage           how far the peer is with the operation that this worker is blocked on
    required        that operation cannot end without the peer
    lacking         it lacks a message that the peer has sent if it is over there
    may_begin       a thread of the peer that is not blocked might begin that operation
    blocked         the peer is blocked on another operation
    requires_me     which cannot end without this worker
    begun_here      and which this worker has begun
    may_begin_here  or which a thread of this worker that is not blocked might begin
    """

    stage: Stage
    required: bool
    lacking: bool
    may_begin: bool
    blocked: bool
    requires_me: bool
    begun_here: bool
    may_begin_here: bool


def is_certain(facts: Facts) -> bool:
    """Whether this worker and the peer make different calls."""
    if facts.stage == Stage.OVER:
        return facts.lacking
    apart = facts.stage == Stage.NOT_BEGUN and facts.blocked and not facts.begun_here
    entangled = facts.required and facts.requires_me
    return apart and entangled and not facts.may_begin and not facts.may_begin_here


def different_calls(
    names: Mapping[int, str], doings: Mapping[int, Doing], found: str = ""
) -> MismatchedCalls:
    """The error of all workers, by what each of them is doing. `found`: how it was noticed."""
    ranks = tuple(sorted(doings))
    said = "; ".join(part for part in (doing.sentence(doings), found) if part)
    alike = found and len({one.call for one in doings.values()}) == 1
    return MismatchedCalls(
        f"{_DIFFERENT_CALLS}: {said}",
        ranks=ranks,
        where=", ".join(names[rank] for rank in ranks),
        fix=SAME_TENSORS if alike else fix(doings),
    )


def fix(doings: Mapping[int, Doing]) -> str:
    """What to change, by the call that only some workers make."""
    callers: dict[str, list[int]] = {}
    for rank in sorted(doings):
        callers.setdefault(doings[rank].call, []).append(rank)
    explicit = [call for call in callers if call.endswith("()")]
    if len(explicit) == 1 and len(callers) > 1:
        return must_call(explicit[0], callers[explicit[0]])
    if explicit:
        return SAME_CALLS
    if set(callers) == {doing.IN_FORWARD, doing.AT_PASS}:  # either may be the mistake
        return f"{_FIXES[doing.AT_PASS]}; or {_FIXES[doing.IN_FORWARD]}"
    known = [call for call in callers if call in _FIXES]
    order = list(_FIXES)

    def unlikely(call: str) -> tuple[bool, int, bool, int]:
        """The rarest call is the odd one; of equally rare ones, what only the leader does."""
        return call == doing.IN_STEP, len(callers[call]), callers[call] != [0], order.index(call)

    return _FIXES[min(known, key=unlikely)] if known else SAME_CALLS


def fix_of_early_end(waiting: Mapping[int, Doing]) -> str:
    """What to change if some workers ended before the others, by what those do."""
    for rank, one in waiting.items():
        if one.call.endswith("()"):
            return must_call(one.call, [rank])
    return "all workers must take the same number of steps and make the same calls"


def must_call(call: str, callers: Sequence[int]) -> str:
    """What to change if only some workers make this call: `in save()`."""
    name = call.removeprefix("in ")
    if list(callers) == [0]:
        return f"all workers must call {name}: move it out of `if session.is_leader`"
    return f"all workers must call {name}: {_CONDITIONS}"
