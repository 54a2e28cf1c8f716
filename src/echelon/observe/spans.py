"""When each part of a step took place, for all displays alike.

The parts follow each other on the worker's clock without overlapping: data from the step's start, compute
up to the arrival, wait from the arrival on, apply after it. Exchanges are waits, too: they interrupt
computing, or follow the optimizer. The rest of the step is `other`: the user's own code between these
parts. A wait for the round of the step before is shown before computing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from echelon.observe.events import StepEnded

Activity: TypeAlias = Literal["data", "compute", "wait", "apply"]
ACTIVITIES: tuple[Activity, ...] = ("data", "compute", "wait", "apply")
Span: TypeAlias = tuple[Activity, float, float]


def end_of(step: StepEnded) -> float:
    """When the step ended: when its event was made, as the next data was requested."""
    return max(step.t, step.start)


def other_s(step: StepEnded) -> float:
    """The time within the step outside the four activities."""
    return max(0.0, end_of(step) - step.start - _known_s(step))


def length_s(step: StepEnded) -> float:
    """How long the step took; at least the sum of its activities, even if the clock was set back."""
    return max(end_of(step) - step.start, _known_s(step))


def _known_s(step: StepEnded) -> float:
    return step.data_s + step.compute_s + step.wait_s + step.apply_s


def exchanges(step: StepEnded) -> list[tuple[float, float]]:
    """When the step's exchanges began and ended, on the worker's clock."""
    placed = []
    at = step.start
    for own_us, wait_us in step.exchanges_us:
        begun = at + own_us / 1e6
        at = begun + wait_us / 1e6
        placed.append((begun, at))
    return placed


def exchanged_s(step: StepEnded) -> float:
    """The part of the step's wait that was at exchanges."""
    return sum(wait_us for _, wait_us in step.exchanges_us) / 1e6


def result_of(step: StepEnded) -> float:
    """When the worker had the result of the step's last round."""
    return step.arrival + max(0.0, step.wait_s - step.deferred_s - exchanged_s(step))


def spans(step: StepEnded) -> list[Span]:
    """What the worker did from when to when, in order; with accumulation, compute ends at the arrival."""
    met = exchanges(step)
    within = [(begun, ended) for begun, ended in met if begun < step.arrival]
    computing = step.arrival - step.compute_s - sum(ended - begun for begun, ended in within)
    result = result_of(step)
    wanted: list[Span] = [("data", step.start, step.start + step.data_s)]
    wanted += [("wait", computing - step.deferred_s, computing)]
    wanted += [("compute", begin, end) for begin, end in _without(computing, step.arrival, within)]
    wanted += [("wait", begun, ended) for begun, ended in met]
    wanted += [("wait", step.arrival, result), ("apply", result, result + step.apply_s)]
    over = end_of(step)
    placed: list[Span] = []
    free_from = step.start
    for activity, begin, end in sorted(wanted, key=lambda span: span[1]):
        begin = min(max(begin, free_from), over)
        free_from = min(max(begin, end), over)
        if free_from > begin:
            placed.append((activity, begin, free_from))
    return placed


def _without(begin: float, end: float, holes: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """An interval without these parts, which are in order."""
    left = []
    for hole_begin, hole_end in holes:
        left.append((begin, max(begin, min(hole_begin, end))))
        begin = max(begin, min(hole_end, end))
    return [*left, (begin, end)]
