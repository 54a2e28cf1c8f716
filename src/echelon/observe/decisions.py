"""What did the decisions that a run took by itself bring, and how good were their predictions?

A decision is a change of shares or of the collective. What came of it is the median duration of rank 0's
steps, from `SETTLING_STEPS` after it up to the next decision or the end. A decision that another one
follows sooner has no outcome of its own; the next one's includes it.

What a step was expected to take:

    shares      as the event says
    collective  as long as before, less what the sum of all gradients was expected to save

The error of a prediction is expected / measured - 1, in percent, as for the plan's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, TypeAlias

import msgspec

from echelon.config.units import show_seconds
from echelon.observe.events import AnyEvent, CollectiveChanged, SharesChanged, StepEnded
from echelon.observe.spans import length_s

DecisionKind: TypeAlias = Literal["shares", "collective"]

SETTLING_STEPS = 3  # batches that were drawn before a change still have the old shares
_STEPS_KEPT = 1000  # after each decision, the last ones: bounds the memory of a long run
_MOST_LISTED = 8  # workers, for their shares to be listed


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, what it was expected to bring, and what came of it; None is unknown.

    `expected_s` and `instead_s` are with the decision and without it: of a step for shares, of the sum of
    all gradients for a collective. `before_s` and `measured_s` are medians of rank 0's steps.
    """

    step: int
    kind: DecisionKind
    now: str
    before: str
    reason: str
    expected_s: float | None = None
    instead_s: float | None = None
    expected_step_s: float | None = None
    before_s: float | None = None
    measured_s: float | None = None

    @property
    def error_percent(self) -> float | None:
        """By how much the expected step is longer than the measured one."""
        if not self.expected_step_s or not self.measured_s:
            return None
        return 100 * (self.expected_step_s / self.measured_s - 1)

    @property
    def what(self) -> str:
        """What changed: 'shares 51,28,13,4 (before 24,24,24,24)'."""
        return f"{self.kind} {self.now} (before {self.before})"


@dataclass(slots=True)
class _Stretch:
    """The steps after a decision; those of the run's beginning come after none."""

    event: SharesChanged | CollectiveChanged | None = None
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    @property
    def median_s(self) -> float | None:
        return median(self.steps_s) if self.steps_s else None


class DecisionTally:
    """Takes the events of a run one by one, those of rank 0 in order; ignores those of other ranks."""

    def __init__(self) -> None:
        self._stretches = [_Stretch()]

    def add(self, event: AnyEvent) -> None:
        """Take one event into account."""
        if event.rank != 0:
            return
        if isinstance(event, SharesChanged | CollectiveChanged):
            self._stretches.append(_Stretch(event))
        elif isinstance(event, StepEnded):
            self._step(event)

    def _step(self, event: StepEnded) -> None:
        # A step's event may come after that of a decision which holds only from the next step on.
        for stretch in reversed(self._stretches):
            if stretch.event is None or event.step >= stretch.event.step + SETTLING_STEPS:
                stretch.steps_s.append(length_s(event))
                return
            if event.step >= stretch.event.step:
                return

    def decisions(self) -> tuple[Decision, ...]:
        """The decisions so far, in order."""
        found: list[Decision] = []
        before_s = base_s = self._stretches[0].median_s
        for stretch in self._stretches[1:]:
            assert stretch.event is not None
            decision = _decision(stretch.event, before_s, base_s, stretch.median_s)
            found.append(decision)
            # Without an outcome of its own, it is what the next decision's prediction starts from.
            base_s = decision.measured_s or decision.expected_step_s or base_s
            before_s = decision.measured_s or before_s
        return tuple(found)


def _decision(
    event: SharesChanged | CollectiveChanged,
    before_s: float | None,
    base_s: float | None,
    measured_s: float | None,
) -> Decision:
    """`base_s` is what a step would take without this decision, as far as is known."""
    if isinstance(event, SharesChanged):
        return Decision(
            step=event.step,
            kind="shares",
            now=_listed(event.shares),
            before=_listed(event.before),
            reason=f"rank {event.slowest} took {show_seconds(event.slowest_s)} for its share",
            expected_s=event.expected_s,
            instead_s=event.slowest_s,
            expected_step_s=event.expected_s,
            before_s=before_s,
            measured_s=measured_s,
        )
    known = event.expected_s > 0 and event.before_s > 0
    saved_s = event.before_s - event.expected_s
    return Decision(
        step=event.step,
        kind="collective",
        now=event.collective,
        before=event.before,
        reason=event.reason,
        expected_s=event.expected_s if known else None,
        instead_s=event.before_s if known else None,
        expected_step_s=base_s - saved_s if known and base_s is not None and base_s > saved_s else None,
        before_s=before_s,
        measured_s=measured_s,
    )


def _listed(shares: Sequence[int]) -> str:
    if len(shares) <= _MOST_LISTED:
        return ",".join(map(str, shares))
    return f"{min(shares)} to {max(shares)} for each of {len(shares)} workers"


def decisions_of(events: Iterable[AnyEvent]) -> tuple[Decision, ...]:
    """The decisions of these events."""
    tally = DecisionTally()
    for event in events:
        tally.add(event)
    return tally.decisions()


def shares_sentence(decisions: Sequence[Decision]) -> str:
    """From which step on which shares held; empty if they were not changed."""
    changes = [decision for decision in decisions if decision.kind == "shares"]
    if not changes:
        return ""
    last = changes[-1]
    if len(changes) == 1:
        return (
            f"Shares were balanced by measured speed from step {last.step:,} on: {last.now} "
            f"(before {last.before})."
        )
    return (
        f"Shares were balanced by measured speed {_times(len(changes))}, last from step {last.step:,} on: "
        f"{last.now} (at first {changes[0].before})."
    )


def decisions_verdict(decisions: Sequence[Decision]) -> str:
    """How good the predictions of a run's decisions were; empty if it took none."""
    if not decisions:
        return ""
    made = "One decision" if len(decisions) == 1 else f"{len(decisions)} decisions"
    checked = [decision for decision in decisions if decision.error_percent is not None]
    if not checked:
        return f"{made} during the run; no prediction could be compared with steps after it."
    last = checked[-1]
    assert last.expected_step_s is not None
    assert last.measured_s is not None
    which = "its prediction" if len(decisions) == 1 else f"that of {last.kind} at step {last.step:,}"
    before = f" (before {show_seconds(last.before_s)})" if last.before_s is not None else ""
    text = (
        f"{made} during the run; {which} was {show_seconds(last.expected_step_s)} for a step, which took "
        f"{show_seconds(last.measured_s)}{before}: {_signed(last.error_percent)} off."
    )
    if len(checked) > 1:
        errors = [abs(decision.error_percent or 0.0) for decision in checked]
        text += f" {len(checked)} predictions were {median(errors):.0f} % off at the median."
    return text


def show_error(decision: Decision) -> str:
    """The error of a decision's prediction; a dash if it is unknown."""
    return _signed(decision.error_percent)


def _signed(percent: float | None) -> str:
    return f"{percent:+.0f} %" if percent is not None else "–"


def _times(count: int) -> str:
    return "twice" if count == 2 else f"{count} times"
