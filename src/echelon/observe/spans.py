"""When each part of a step took place, for all displays alike.

The parts follow each other on the worker's clock without overlapping: data from the step's start, compute
up to the arrival, wait from the arrival on, apply after it. The rest of the step is `other`: the user's
own code between these parts. A step with several rounds is shown as if the last were the only one.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from echelon.observe.events import StepEnded

Activity: TypeAlias = Literal["data", "compute", "wait", "apply"]
ACTIVITIES: tuple[Activity, ...] = ("data", "compute", "wait", "apply")


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


def spans(step: StepEnded) -> dict[Activity, tuple[float, float]]:
    """Begin and end of each activity, in order; an empty one ends where it begins.

    With accumulation, compute is one span that ends at the arrival.
    """
    over = end_of(step)
    round_over = step.arrival + step.wait_s
    wanted: dict[Activity, tuple[float, float]] = {
        "data": (step.start, step.start + step.data_s),
        "compute": (step.arrival - step.compute_s, step.arrival),
        "wait": (step.arrival, round_over),
        "apply": (round_over, round_over + step.apply_s),
    }
    placed: dict[Activity, tuple[float, float]] = {}
    free_from = step.start
    for activity, (begin, end) in wanted.items():
        begin = min(max(begin, free_from), over)
        free_from = min(max(begin, end), over)
        placed[activity] = (begin, free_from)
    return placed
