"""At which step, and in which parameter, do a script alone and the same script on workers part? Pure.

A difference is relative: to the largest of the parameter's values, or to a tenth of the largest of all
parameters' if that is more, so that gradients which are zero but for rounding do not count.

Gradients part where they differ by more than the tolerance. Weights part where they differ by a good part
of the way that they have gone since the first step: an optimizer such as Adam makes steps of full length of
gradients that are rounding alone. Elements with such gradients are left out of the weights' comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from echelon.check.notes import LossNote, StepNote, WorkerNotes

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]
_FLOOR = 0.1
_OF_THE_WAY = 0.05
_ROUNDINGS = 64.0
_HALF_EPSILON = 2.0**-8
_DOUBLE_ROUNDING = 1e-13
_GROWTH = 1e6  # in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class SideNotes:
    """What was noted of one side. `after` reads the arrays of a step, `before` the first weights."""

    workers: Sequence[WorkerNotes]
    after: Callable[[int], Arrays]
    before: Callable[[int], Arrays]

    @property
    def leader(self) -> WorkerNotes:
        """The notes of rank 0."""
        return self.workers[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """How one optimizer step differs between two sides.

    what, parameter  what parts first, and where; empty if nothing does
    factor           by which all gradients of the other side are those of the first, if they are
    """

    optimizer: str
    number: int
    loss_alone: float | None
    loss_workers: float | None
    loss: float | None
    gradients: float
    weights: float
    what: str = ""
    parameter: str = ""
    by: float = 0.0
    factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDrift:
    """A worker's weights are not the leader's after a step."""

    number: int
    rank: int
    parameter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SideComparison:
    """Two sides, step by step.

    counts    how many optimizer steps each has taken
    samples   how many samples each step had, alone and on all workers together
    start     a parameter that differs before the first step, and by how much
    drift     where the workers part from each other
    repeated  whether every worker had, bit for bit, the losses of the one alone
    """

    steps: tuple[StepDifference, ...]
    counts: tuple[int, int]
    samples: tuple[tuple[int | None, int | None], ...]
    start: tuple[str, float] | None = None
    drift: RankDrift | None = None
    repeated: bool = False

    @property
    def first(self) -> StepDifference | None:
        """The first step that parts."""
        return next((step for step in self.steps if step.what), None)

    @property
    def unequal_samples(self) -> int | None:
        """The index of the first step whose number of samples differs."""
        pairs = enumerate(self.samples)
        return next((at for at, (alone, workers) in pairs if alone != workers), None)

    @property
    def same(self) -> bool:
        """Whether nothing differs that matters."""
        equal_counts = self.counts == (len(self.steps), len(self.steps))
        rest = (self.first, self.unequal_samples, self.start, self.drift)
        return equal_counts and all(thing is None for thing in rest)

    @property
    def largest(self) -> float:
        """The largest difference of all losses, gradients and weights."""
        found = [step.loss or 0.0 for step in self.steps]
        return max([*found, *(max(step.gradients, step.weights) for step in self.steps), 0.0])


def compare(alone: SideNotes, workers: SideNotes, tolerance: float) -> SideComparison:
    """Compare the steps that both sides have taken."""
    counts = len(alone.leader.steps), len(workers.leader.steps)
    both = zip(alone.leader.steps, workers.leader.steps, strict=False)
    common = [mine for mine, _ in takewhile(lambda pair: pair[0].optimizer == pair[1].optimizer, both)]
    noise: dict[tuple[int, int], Array] = {}
    steps, start = [], None
    for index, mine in enumerate(common):
        kind = alone.leader.optimizers[mine.optimizer]
        begin = alone.before(mine.optimizer), workers.before(mine.optimizer)
        if mine.number == 1 and start is None:
            start = _start(*begin, kind.names, tolerance)
        steps.append(_step(alone, workers, index, begin[0], noise, tolerance))
    return SideComparison(
        steps=tuple(steps),
        counts=counts,
        samples=tuple(_samples(alone, workers, index) for index in range(len(common))),
        start=start,
        drift=_drift(workers.workers),
        repeated=_repeated(alone.leader, workers.workers),
    )


def without_growth(found: SideComparison) -> SideComparison:
    """The same comparison, in which steps do not part whose difference has only grown from rounding.

    In 64 bits rounding begins below 1e-12. What is real comes at once, and is larger by far than the
    differences of the steps before it; rounding grows step by step.
    """
    steps, before = [], 0.0
    for step in found.steps:
        difference = max(step.gradients, step.weights)
        grown = difference <= _GROWTH * max(before, _DOUBLE_ROUNDING)
        steps.append(replace(step, what="", parameter="", by=0.0, factor=None) if grown else step)
        before = max(before, difference)
    return replace(found, steps=tuple(steps))


def _start(
    mine: Arrays, theirs: Arrays, names: Sequence[str], tolerance: float
) -> tuple[str, float] | None:
    scale = _largest(mine.values())
    for index, name in enumerate(names):
        by = _relative(mine[f"w{index}"], theirs.get(f"w{index}"), scale)
        if by > tolerance:
            return name, by
    return None


def _step(
    alone: SideNotes,
    workers: SideNotes,
    index: int,
    begin: Arrays,
    noise: dict[tuple[int, int], Array],
    tolerance: float,
) -> StepDifference:
    step = alone.leader.steps[index]
    made = alone.leader.optimizers[step.optimizer]
    mine, theirs = alone.after(index), workers.after(index)
    losses = _losses(step, [worker.steps[index] for worker in workers.workers if len(worker.steps) > index])
    gradients = _gradients(mine, theirs, len(made.names))
    _note_noise(mine, theirs, step.optimizer, len(made.names), noise, tolerance)
    weights, beyond = _weights(mine, theirs, begin, step.optimizer, noise, tolerance, alone.leader.half)
    what, at, by = "", -1, 0.0
    parted = [position for position, difference in enumerate(gradients) if difference > tolerance]
    if parted:
        what, at, by = "gradient", parted[0], gradients[parted[0]]
    elif beyond:
        what, at, by = "weight", beyond[0], weights[beyond[0]]
    return StepDifference(
        optimizer=_label(alone.leader, step.optimizer),
        number=step.number,
        loss_alone=losses[0],
        loss_workers=losses[1],
        loss=losses[2],
        gradients=max(gradients, default=0.0),
        weights=max(weights, default=0.0),
        what=what,
        parameter=made.names[at] if what else "",
        by=by,
        factor=_factor(mine, theirs, len(made.names), tolerance) if what == "gradient" else None,
    )


def _label(notes: WorkerNotes, optimizer: int) -> str:
    """The optimizer's class, with a number if there are several of that class."""
    kinds = [known.kind for known in notes.optimizers]
    kind = kinds[optimizer]
    return kind if kinds.count(kind) == 1 else f"{kind} {kinds[:optimizer].count(kind) + 1}"


def _losses(
    alone: StepNote, workers: Sequence[StepNote]
) -> tuple[float | None, float | None, float | None]:
    """The loss alone, that of all workers together, and the relative difference; None where unknown."""
    mine = [loss.value for loss in alone.losses]
    if not mine:
        return None, None, None
    if any(len(step.losses) != len(mine) for step in workers):
        return sum(mine), None, None
    theirs = [_together([step.losses[index] for step in workers]) for index in range(len(mine))]
    if any(value is None for value in theirs):
        return sum(mine), None, None
    known = [value for value in theirs if value is not None]
    differences = [abs(a - b) / max(abs(a), abs(b), 1e-8) for a, b in zip(mine, known, strict=True)]
    finite = [d if np.isfinite(d) else 0.0 if str(a) == str(b) else np.inf
              for d, a, b in zip(differences, mine, known, strict=True)]  # fmt: skip
    return sum(mine), sum(known), float(max(finite))


def _together(losses: Sequence[LossNote]) -> float | None:
    """The weighted sum of the workers' losses; None if the weights are those of no mean and no sum."""
    weights = [loss.weight for loss in losses]
    whole = abs(sum(weights) - 1) < 1e-6 or all(weight == 1 for weight in weights)
    return sum(loss.value * loss.weight for loss in losses) if whole else None


def _gradients(mine: Arrays, theirs: Arrays, count: int) -> list[float]:
    scale = _largest(array for name, array in mine.items() if name.startswith("g"))
    norms = mine["norms"][:, 0], theirs["norms"][:, 0]
    widest = float(norms[0].max(initial=0.0))
    found = []
    for index in range(count):
        name = f"g{index}"
        if name not in mine and name not in theirs:
            found.append(0.0)
            continue
        like = mine.get(name, theirs.get(name))
        assert like is not None
        by = _relative(mine.get(name, np.zeros_like(like)), theirs.get(name, np.zeros_like(like)), scale)
        norm = _relative(norms[0][index : index + 1], norms[1][index : index + 1], widest)
        found.append(max(by, norm))
    return found


def _note_noise(
    mine: Arrays,
    theirs: Arrays,
    optimizer: int,
    count: int,
    noise: dict[tuple[int, int], Array],
    tolerance: float,
) -> None:
    """Mark the elements whose gradient, in any step so far, was too small to mean anything."""
    least = tolerance * _largest(array for name, array in mine.items() if name.startswith("g"))
    for index in range(count):
        a, b = mine.get(f"g{index}"), theirs.get(f"g{index}")
        if a is None or b is None or a.shape != b.shape:
            continue
        small = (np.abs(a) < least) & ((a != 0) | (b != 0))
        before = noise.get((optimizer, index))
        noise[optimizer, index] = small if before is None else before | small


def _weights(
    mine: Arrays,
    theirs: Arrays,
    begin: Arrays,
    optimizer: int,
    noise: Mapping[tuple[int, int], Array],
    tolerance: float,
    half: bool,
) -> tuple[list[float], list[int]]:
    """Each parameter's relative difference, and the indices of those that part."""
    scale = _largest(array for name, array in mine.items() if name.startswith("w"))
    fraction = min(0.5, max(_OF_THE_WAY, 5 * tolerance))
    differences, beyond = [], []
    for index in range(sum(name.startswith("w") for name in mine)):
        a, b, first = mine[f"w{index}"], theirs.get(f"w{index}"), begin.get(f"w{index}")
        if b is None or first is None or not a.shape == b.shape == first.shape:
            differences.append(np.inf)
            beyond.append(index)
            continue
        means = ~noise.get((optimizer, index), np.zeros(a.shape, dtype=bool))
        a, b, first = a[means], b[means], first[means]
        differences.append(_relative(a, b, scale))
        epsilon = _HALF_EPSILON if half else float(np.finfo(a.dtype).eps)
        allowed = fraction * _peak(a - first) + _ROUNDINGS * epsilon * _peak(a)
        if _peak(_apart(a, b)) > allowed:
            beyond.append(index)
    return differences, beyond


def _factor(mine: Arrays, theirs: Arrays, count: int, tolerance: float) -> float | None:
    """c, if all gradients of the other side are c times the first side's; None if there is no such c."""
    both = [f"g{index}" for index in range(count) if f"g{index}" in mine and f"g{index}" in theirs]
    pairs = [(mine[name], theirs[name]) for name in both]
    square = sum(float(np.dot(a.astype(float), a.astype(float))) for a, _ in pairs)
    if not 0 < square < np.inf:
        return None
    factor = sum(float(np.dot(a.astype(float), b.astype(float))) for a, b in pairs) / square
    scale = factor * _largest(a for a, _ in pairs)
    wrong = max(_relative(factor * a, b, scale) for a, b in pairs)
    return factor if wrong < max(10 * tolerance, 1e-3) else None


def _samples(alone: SideNotes, workers: SideNotes, index: int) -> tuple[int | None, int | None]:
    """How many samples a step had, alone and on all workers together."""
    mine = alone.leader.steps[index].samples
    theirs = [worker.steps[index].samples for worker in workers.workers if len(worker.steps) > index]
    known = [count for count in theirs if count is not None]
    return mine, sum(known) if len(known) == len(theirs) else None


def _repeated(alone: WorkerNotes, workers: Sequence[WorkerNotes]) -> bool:
    losses = [[loss.value for loss in step.losses] for step in alone.steps]
    return any(losses) and all(
        [[loss.value for loss in step.losses] for step in worker.steps] == losses for worker in workers
    )


def _drift(workers: Sequence[WorkerNotes]) -> RankDrift | None:
    """The first step after which a worker has other weights than the leader."""
    for index, step in enumerate(workers[0].steps):
        for worker in workers[1:]:
            if len(worker.steps) <= index:
                continue
            digests = worker.steps[index].digests
            known = workers[0].optimizers[step.optimizer].names
            for name, ours, theirs in zip(known, step.digests, digests, strict=False):
                if ours != theirs:
                    return RankDrift(number=step.number, rank=worker.rank, parameter=name)
    return None


def _relative(a: Array, b: Array | None, scale: float) -> float:
    """The largest difference, relative to the largest of `a`, or to a tenth of `scale` if that is more."""
    if b is None or a.shape != b.shape:
        return float(np.inf)
    apart = _peak(_apart(a, b))
    size = max(_peak(a[np.isfinite(a)]), _FLOOR * abs(scale))
    return 0.0 if apart == 0 else apart / size if size > 0 else float(np.inf)


def _apart(a: Array, b: Array) -> Array:
    """Differences of elements; none where both are the same infinity or not a number."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
    strange = ~np.isfinite(difference)
    alike = (a == b) | (np.isnan(a) & np.isnan(b))
    out: Array = np.where(strange, np.where(alike, 0.0, np.inf), difference)
    return out


def _largest(arrays: Iterable[Array]) -> float:
    """The largest finite absolute value of all arrays."""
    return max((_peak(array[np.isfinite(array)]) for array in arrays), default=0.0)


def _peak(array: Array) -> float:
    """The largest absolute value; what is not a number does not count."""
    return float(np.max(np.abs(array), initial=0.0, where=~np.isnan(array)))
