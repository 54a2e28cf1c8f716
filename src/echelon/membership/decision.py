"""What becomes of the step under way when a view ends? The commit rule: where members stand in, record out.

Members that are `current` have the whole state after the last step whose sum landed on them. A member sends
its gradients of step s + 1 only after the sum of step s has landed on it; that is its vote for s. So when
anybody's sum of step s + 1 has landed, everybody has voted for s, and members are at most one step apart.

Let c be the last step that any survivor has in its state.

    step c      is committed. A survivor without it receives the state from one that has it, and
                takes part with weight zero until then.
    step c + 1  landed on no survivor. Either nobody had begun: it is drawn. Or all hold their own
                gradients: they are reduced again, and only the survivors' samples count. Or somebody's were
                overwritten by half a sum: the step is repeated from the same samples.

Nobody applies half a step: what has landed on somebody is applied by all, and nothing else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from uuid import UUID

from echelon.membership.ledger import Ledger
from echelon.membership.messages import Healing, How, NewView, StepState
from echelon.membership.view import MemberId, View

States = Mapping[MemberId, StepState]


def holders(states: States) -> list[MemberId]:
    """The members with a whole state."""
    return [member for member, state in states.items() if state.holds is not None]


def decide(run: UUID, old: View, states: States, joining: Collection[MemberId]) -> NewView:
    """The record of the next view: of the members of `old` with a state, and those that join.

    At least one of them must have a whole state.
    """
    ordered = [member for member in old.members if member in states]
    committed = max(states[member].holds or 0 for member in holders(states))
    ledger = _agreed([_held(states[m]) for m in ordered if states[m].holds == committed])
    current = [m for m in ordered if states[m].holds == committed and _held(states[m]) == ledger]
    sources = _sources(states, current, [*ordered, *sorted(joining)], committed)
    how = _how([states[member] for member in current], committed)
    parts = tuple((m, states[m].part) for m in current) if how == "reduce" else ()
    view = old.follow(run, [*ordered, *joining], sources)
    kept = tuple((m, source) for m, source in sources.items() if m in view.members)
    return NewView(view=view, committed=committed, ledger=ledger, how=how, parts=parts, sources=kept)


def _held(state: StepState) -> Ledger:
    return state.ledger if state.current or state.held is None else state.held


def _agreed(ledgers: Sequence[Ledger]) -> Ledger:
    """All are the same, unless a worker is wrong; then most decide."""
    return Counter(ledgers).most_common(1)[0][0]


def _how(current: Sequence[StepState], committed: int) -> How:
    """What becomes of the step after the committed one."""
    # A member that fell back to a state it had kept holds no gradients of the step after it.
    phases = {state.phase if state.following == committed else "partial" for state in current}
    if "partial" in phases:
        return "repeat"
    return "reduce" if "held" in phases else "draw"


def _sources(
    states: States, current: Sequence[MemberId], members: Sequence[MemberId], committed: int
) -> dict[MemberId, Healing]:
    """From whom each member without the state receives it; equally many from each source."""
    found: dict[MemberId, Healing] = {}
    for member in members:
        if member in current:
            continue
        state = states.get(member)
        going_on = state.healing if state is not None and state.following == committed else None
        if going_on is not None and going_on.source in current:
            found[member] = going_on  # no step is missing, so that the transfer can go on
        else:
            found[member] = Healing(source=current[len(found) % len(current)], base=committed)
    return found
