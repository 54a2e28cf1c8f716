"""Why do a script alone and on workers part? The usual causes, each with its evidence. Pure.

The rules are asked in order, the certain ones first. The first that has evidence gives the sentence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.check.compare import SideComparison, StepDifference
from echelon.check.notes import WorkerNotes


@dataclass(frozen=True, slots=True, kw_only=True)
class PartingCause:
    """Why they part, and what to do. `certain`: the evidence leaves no other cause."""

    text: str
    fix: str
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PartingEvidence:
    """What is known of two sides that part."""

    alone: WorkerNotes
    workers: Sequence[WorkerNotes]
    found: SideComparison

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.workers)

    @property
    def first(self) -> StepDifference | None:
        """The first step that parts."""
        return self.found.first


SAME_SAMPLES = PartingCause(
    text="no prepared loader handed out a batch, and all workers have the same losses",
    fix="prepare the loader, or give each rank its own part: x[session.rank::session.world_size]",
)
Rule = Callable[[PartingEvidence], PartingCause | None]


def explain(alone: WorkerNotes, workers: Sequence[WorkerNotes], found: SideComparison) -> PartingCause:
    """The cause that the evidence points to."""
    evidence = PartingEvidence(alone=alone, workers=workers, found=found)
    for rule in _RULES:
        cause = rule(evidence)
        if cause is not None:
            return cause
    return _unknown(evidence)


def explain_failure(text: str, notes: WorkerNotes) -> PartingCause | None:
    """Why a script may fail on workers that does not fail alone; None if nothing points to a cause."""
    if "init_process_group" in text:
        return PartingCause(
            text="the script starts torch.distributed by itself when it finds several workers",
            fix="take that out, with DistributedDataParallel and DistributedSampler: session.prepare "
            "replaces them",
        )
    if notes.batch is None:
        return None
    share, batch = notes.batch
    last = text.strip().rpartition("\n")[2]
    numbers = {int(number) for number in re.findall(r"\d+", last)}
    if share != batch and {share, batch} <= numbers:
        return PartingCause(
            text=f"the error names {batch}, the size of the whole batch, and {share}, this worker's share: "
            "a batch size is written into the script",
            fix="take the size from the batch, x.size(0)",
            certain=False,
        )
    return None


def _policy(evidence: PartingEvidence) -> PartingCause | None:
    notes = evidence.workers[0]
    if notes.sync not in ("", "full"):
        return PartingCause(
            text=f"the workers synchronise by {notes.sync}, which does not compute what one alone does",
            fix="check the script with sync full; the policy then changes the results on purpose",
        )
    if notes.codec not in ("", "none"):
        return PartingCause(
            text=f"gradients are encoded by {notes.codec}, which loses some of their digits",
            fix="check the script without a codec",
        )
    return None


def _not_prepared(evidence: PartingEvidence) -> PartingCause | None:
    if evidence.workers[0].models == 0:
        return PartingCause(
            text="the script prepares no model, so each worker trains one of its own",
            fix="model, optimizer, loader = session.prepare(model, optimizer, loader)",
        )
    for optimizer in evidence.workers[0].optimizers:
        if optimizer.unprepared:
            return PartingCause(
                text=f"{optimizer.kind} updates {_some(optimizer.unprepared)}, which belong to no prepared "
                "model: their gradients are each worker's own",
                fix="give every model that is trained to session.prepare, and replace no layer afterwards",
            )
    return None


def _start(evidence: PartingEvidence) -> PartingCause | None:
    if evidence.found.start is None:
        return None
    name, _ = evidence.found.start
    return PartingCause(
        text=f"{name} differs before the first step: the model is not built, or loaded, in the same way",
        fix="look for what depends on the number of workers, or on chance, before prepare",
    )


def _loader(evidence: PartingEvidence) -> PartingCause | None:
    at = evidence.found.unequal_samples
    if at is None:
        return None
    alone, together = evidence.found.samples[at]
    places = evidence.workers[0].unshared
    if alone is not None and together == alone * evidence.size and places:
        return PartingCause(
            text=f"each of the {evidence.size} workers trained {alone} samples in a step, {together} "
            f"together, where one alone trains {alone}: the loader at {places[0]} is not one that prepare "
            "returned",
            fix="loader = session.prepare(loader), and loop over that one",
        )
    after = evidence.found.samples[at + 1][0] if at + 1 < len(evidence.found.samples) else None
    rest = (together or 0) - (alone or 0)
    if 0 < rest < evidence.size and after in (None, rest):
        return PartingCause(
            text=f"the last batch of a pass has {rest} samples, fewer than workers, so it joins another",
            fix="nothing: every sample is trained once; drop_last=True gives equal batches",
        )
    return PartingCause(
        text=f"a step had {_count(alone)} alone and {_count(together)} on all workers together",
        fix="let prepared loaders share out the batches, with the batch size of one worker alone",
    )


def _settings(evidence: PartingEvidence) -> PartingCause | None:
    first = evidence.first
    if first is None or first.what != "weight":
        return None
    index = evidence.found.steps.index(first)
    mine, theirs = evidence.alone.steps[index], evidence.workers[0].steps[index]
    for ours, other in zip(mine.settings, theirs.settings, strict=False):
        for name, value in ours.items():
            if other.get(name, value) != value:
                return PartingCause(
                    text=f"{name} of {first.optimizer} is {value:g} alone and {other[name]:g} on workers",
                    fix="with the global batch the same settings give the same training: do not scale them",
                )
    return None


def _factor(evidence: PartingEvidence) -> PartingCause | None:
    first = evidence.first
    if first is None or first.factor is None or abs(first.factor - 1) < 0.01:
        return None
    by, size = first.factor, evidence.size
    if abs(by * size - 1) < 0.01 and evidence.workers[0].loss == "mean":
        return PartingCause(
            text=f"all gradients on {size} workers are 1/{size} of those alone: the loss is a sum over "
            "samples, or is divided by a fixed batch size",
            fix='session.prepare(..., loss="sum"), or a loss that is the mean over x.size(0) samples',
        )
    if abs(by / size - 1) < 0.01 and evidence.workers[0].loss == "sum":
        return PartingCause(
            text=f"all gradients on {size} workers are {size} times those alone: the loss is a mean, and "
            'prepare was told loss="sum"',
            fix='session.prepare(...) without loss="sum"',
        )
    return PartingCause(
        text=f"all gradients on {size} workers are {by:.4g} times those alone: the loss has a factor that "
        "depends on the number of workers",
        fix="backward() gives the gradient of the whole batch; do not scale the loss or the gradients",
    )


def _drift(evidence: PartingEvidence) -> PartingCause | None:
    drift = evidence.found.drift
    if drift is None:
        return None
    return PartingCause(
        text=f"after step {drift.number}, {drift.parameter} of rank {drift.rank} is not that of rank 0",
        fix="look for weights or gradients that are changed on some ranks only, or a layer that was "
        "replaced after prepare",
    )


def _norms(evidence: PartingEvidence) -> PartingCause | None:
    layers = evidence.workers[0].local
    if not layers:
        return None
    return PartingCause(
        text=f"{_some(layers)} normalise over each worker's own samples",
        fix='prepare without batchnorm="local", and with torch\'s own BatchNorm layers',
    )


def _seeds(evidence: PartingEvidence) -> PartingCause | None:
    leader = evidence.workers[0].seeds
    for worker in evidence.workers[1:]:
        for (ours, place), (theirs, _) in zip(leader, worker.seeds, strict=False):
            if ours != theirs:
                return PartingCause(
                    text=f"{place} seeds rank 0 with {ours} and rank {worker.rank} with {theirs}: what "
                    "is drawn before prepare, or by other libraries, may differ between the workers",
                    fix="give all ranks the same seed; after prepare each draws from a stream of its own",
                    certain=False,
                )
    return None


def _draws_of_leader(evidence: PartingEvidence) -> PartingCause | None:
    return _unaligned(evidence, evidence.workers[:1])


def _draws(evidence: PartingEvidence) -> PartingCause | None:
    guessed = [place for worker in evidence.workers for place in worker.guessed]
    if guessed:
        return PartingCause(
            text="the script shares out data of its own, and which samples belong to the random draw at "
            f"{guessed[0]} is not known, so the difference may be its own",
            fix="let a prepared loader share out the data, or check without random draws",
            certain=False,
        )
    return _unaligned(evidence, evidence.workers)


def _unaligned(evidence: PartingEvidence, workers: Sequence[WorkerNotes]) -> PartingCause | None:
    """The draw of these workers that could not be aligned, in the step that parts or before."""
    first = evidence.first
    last = evidence.found.steps.index(first) if first else len(evidence.found.steps)
    found = [draw for worker in workers for draw in worker.unaligned if draw.step <= last]
    if not found:
        return None
    draw = min(found, key=lambda draw: draw.step)
    return PartingCause(
        text=f"the random draw {draw.what} at {draw.place} could not be made the same on both sides, so "
        f"the difference may be its own: {draw.why}",
        fix="leave it out for the check",
        certain=False,
    )


def _loss(evidence: PartingEvidence) -> PartingCause | None:
    first = evidence.first
    if first is None or first.number != 1 or first.what != "gradient" or first.loss is None:
        return None
    if first.loss > first.by / 100:
        return PartingCause(
            text=f"with the same weights the loss is {first.loss_alone:.6g} alone, and "
            f"{first.loss_workers:.6g} as the mean over the workers: the loss of a batch is not the mean "
            "of its samples' losses",
            fix="if it is a mean over other things than samples, such as tokens, call "
            "session.weigh(their number) before backward(); a loss over pairs of samples, or over "
            "statistics of the batch, sees a share only",
            certain=False,
        )
    return PartingCause(
        text="the losses agree and the gradients do not: they are made, or changed, by other means than "
        "backward()",
        fix="clip and change gradients after backward(), and outside of session.accumulate()",
        certain=False,
    )


def _counts(evidence: PartingEvidence) -> PartingCause | None:
    alone, workers = evidence.found.counts
    if alone == workers or evidence.first is not None:
        return None
    return PartingCause(
        text=f"one worker alone takes {_steps(alone)}, the workers {_steps(workers)} each",
        fix="look for a number of steps or a batch size that depends on the number of workers",
    )


def _unknown(evidence: PartingEvidence) -> PartingCause:
    return PartingCause(
        text="none of the usual causes was recognised",
        fix="look for what depends on the rank, on the number of workers, or on other samples of the batch",
        certain=False,
    )


_RULES: tuple[Rule, ...] = (
    _policy,
    _not_prepared,
    _start,
    _loader,
    _settings,
    _factor,
    _norms,
    _counts,
    _drift,
    _draws_of_leader,
    _seeds,
    _draws,
    _loss,
)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"


def _count(samples: int | None) -> str:
    return "an unknown number of samples" if samples is None else f"{samples} samples"


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
