"""Which layout has the shortest step for this model, on these workers? `parallel="auto"` in `prepare`.

All workers measure the model's layers with samples of the loader, and the exchanges between them; then
the cost model ranks the layouts that fit into memory (`parallel/layout_cost.py`). All decide alike, from
the same figures. A launcher that tries layouts reads the ranking from the event.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.utils.data import DataLoader, IterableDataset

from echelon.comm.group import Group
from echelon.errors import ConfigError, EchelonError, PlanError
from echelon.observe.events import LayoutsPredicted
from echelon.parallel.candidates import candidate_layouts
from echelon.parallel.chain import Given, LayerChain
from echelon.parallel.layout import lines, parse_layout
from echelon.parallel.layout_cost import LayoutCost, LayoutJob, RankedLayouts, ranked_layouts
from echelon.parallel.layout_probe import LayerTimes, chain_or_whole, measure_exchange, update_s
from echelon.parallel.strategies.data import Replicas
from echelon.parallel.strategies.pipeline import Pipeline
from echelon.parallel.strategies.sharded import Sharded
from echelon.plan.plan import Plan
from echelon.train import batchnorm
from echelon.train.checks import check_layout
from echelon.train.families.slice_steps import ELEMENTWISE
from echelon.train.fitting_memory import bytes_of, room_bytes

_MOST_SHIFTS = 8
WHERE = "prepare(parallel='auto')"
_GIVE_ONE = "give a layout instead: data, or one that `echelon list parallel` shows"


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoJob:
    """What was prepared: one model, its optimizers, and the loader of its batches."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loader: DataLoader[Any]
    batch: int
    local_batchnorm: bool


def auto_job(things: Sequence[Any], workers: int, *, per_worker: bool, local_batchnorm: bool) -> AutoJob:
    """The job among the arguments of `prepare`; ConfigError if it is not complete."""
    models = [one for one in things if isinstance(one, nn.Module)]
    loaders = [one for one in things if isinstance(one, DataLoader)]
    if len(models) != 1 or not loaders or loaders[0].batch_size is None:
        raise ConfigError(
            f"auto needs one model and the loader of its batches, there are {len(models)} models and "
            f"{len(loaders)} loaders",
            where=WHERE,
            fix=f"prepare them together; or {_GIVE_ONE}",
        )
    if isinstance(loaders[0].dataset, IterableDataset):
        raise ConfigError(
            "auto looks at samples of the data set, and this one can be read only once",
            where=WHERE,
            fix=_GIVE_ONE,
        )
    return AutoJob(
        model=models[0],
        optimizers=[one for one in things if isinstance(one, Optimizer)],
        loader=loaders[0],
        batch=loaders[0].batch_size * (workers if per_worker else 1),
        local_batchnorm=local_batchnorm,
    )


def picked(
    job: AutoJob, group: Group, plan: Plan, stated: str, workers_here: int, order: tuple[int, ...] = ()
) -> RankedLayouts:
    """The layouts for this job, ranked alike on all workers; PlanError if none fits.

    stated  what the plan says that this worker may use of memory
    order   the workers, neighbours beside each other; empty: by rank
    """
    texts, left_out = _possible(job, group, plan)
    if texts == ["data"]:
        return ranked_alone("data", left_out)
    chain, whole = chain_or_whole(job.model)
    if whole:
        left_out |= dict.fromkeys(filter(_is_pipeline, texts), whole)
        texts = [text for text in texts if not _is_pipeline(text)]
    measured = replace(
        _measured(job, group, chain, stated, workers_here, _shifts(texts, group.size, order)), order=order
    )
    found = ranked_layouts(texts, measured)
    if not found.costs:
        text, why = next(iter(found.left_out.items()))
        raise PlanError(
            f"no layout of {group.size} workers fits; {text}: {why}",
            where=WHERE,
            fix="use workers with more memory, more workers, or a smaller batch",
        )
    return RankedLayouts(found.costs, {**left_out, **found.left_out})


def ranked_alone(text: str, left_out: Mapping[str, str]) -> RankedLayouts:
    """A ranking without a prediction: nothing else is possible."""
    return RankedLayouts((LayoutCost(text=text, step_s=0.0, compute_s=0.0),), dict(left_out))


def said(found: RankedLayouts) -> str:
    """Why a layout was chosen: the predictions, and what was left out."""
    best, *others = found.costs
    beside = "".join(f"; {one}" for one in others)
    without = "".join(f"; left out {text}: {why}" for text, why in found.left_out.items())
    return f"auto, by predicted steps: {best}{beside}{without}"


def predicted_event(found: RankedLayouts) -> LayoutsPredicted:
    """The ranking for the record."""
    return LayoutsPredicted(
        t=time.time(),
        rank=0,
        chosen=found.costs[0].text,
        steps_s={one.text: one.step_s for one in found.costs},
        worth=found.worth_trying,
        left_out=dict(found.left_out),
    )


def _is_pipeline(text: str) -> bool:
    return parse_layout(text).find(Pipeline) is not None


def _possible(job: AutoJob, group: Group, plan: Plan) -> tuple[list[str], dict[str, str]]:
    """The layouts that go with the plan, the model and its optimizers, and why others do not."""
    left_out: dict[str, str] = {}
    texts = []
    for text in candidate_layouts(group.size):
        why = _against(text, job)
        try:
            check_layout(replace(plan, parallel=text), group.size)
        except EchelonError as error:
            why = why or error.message
        if why:
            left_out[text] = why
        else:
            texts.append(text)
    return texts, left_out


def _against(text: str, job: AutoJob) -> str:
    layout = parse_layout(text)
    names = [type(one).__name__ for one in job.optimizers if type(one) not in ELEMENTWISE]
    if layout.find(Sharded) is not None and names:
        return f"{names[0]} may compute with whole parameters"
    if layout.find(Pipeline) is not None:
        if any(isinstance(one, LBFGS) for one in job.optimizers):
            return "LBFGS computes with all parameters at once"
        if batchnorm.layers(job.model) and not job.local_batchnorm:
            return "batch normalisation would see one micro-batch at a time"
    return ""


def _measured(
    job: AutoJob, group: Group, chain: LayerChain, stated: str, workers_here: int, shifts: Sequence[int]
) -> LayoutJob:
    """The job with all workers' figures, the same on all of them."""
    problem, times, sizes = "", None, _sizes(job, group.size)
    try:
        times = LayerTimes(job.model, chain, _samples_of(job, sizes[1]), sizes)
    except EchelonError as error:
        problem = error.message
    except Exception as error:  # noqa: BLE001 - the model's own; whatever it is, it is told
        problem = f"{type(error).__name__}: {error}"
    told = group.all_gather_bytes(problem.encode()[:500])
    for rank, one in enumerate(told):
        if one:
            raise ConfigError(
                f"the model could not be measured with the loader's samples on rank {rank}: "
                f"{one.decode(errors='replace').splitlines()[0]}",
                where=WHERE,
                fix=_GIVE_ONE,
            )
    assert times is not None
    model = bytes_of([job.model], job.optimizers)
    room = room_bytes(workers_here, stated, model.parameters)
    mine = [*times.fixed_s, *times.sample_s, room, update_s(model.trained, model.states)]
    rows = [one.tolist() for one in group.all_gather(torch.tensor(mine, dtype=torch.float64))]
    count = len(chain)
    return LayoutJob(
        batch=job.batch,
        fixed_s=[row[:count] for row in rows],
        sample_s=[row[count : 2 * count] for row in rows],
        trained_bytes=times.trained_bytes,
        yielded_bytes=times.yielded_bytes,
        apply_s=max(row[-1] for row in rows),
        model=model,
        rooms=[row[-2] for row in rows],
        exchange=measure_exchange(group, model.trained, shifts),
        closed=chain.closed,
    )


def _sizes(job: AutoJob, workers: int) -> tuple[int, int]:
    """Few samples, and a worker's share; at least two, which batch normalisation needs."""
    there = len(job.loader.dataset)  # type: ignore[arg-type]
    share = max(2, min(there, -(-job.batch // workers)))
    return max(2, share // 8), share


def _shifts(texts: Sequence[str], workers: int, order: tuple[int, ...]) -> list[int]:
    """How many ranks further messages go in these layouts; the most frequent, if they are many."""
    found: Counter[int] = Counter({1: workers})
    for text in texts:
        layout = replace(parse_layout(text), order=order)
        for kind in (Pipeline, Replicas, Sharded) if layout.find(Pipeline) is not None else ():
            for line in lines(layout, workers, kind):
                ring = pairwise([*line, line[0]] if len(line) > 2 else line)
                found.update((other - one) % workers for one, other in ring)
    return sorted(shift for shift, _ in found.most_common(_MOST_SHIFTS))


def _samples_of(job: AutoJob, share: int) -> Callable[[int], Given]:
    """Batches of the data set's first samples, as the model is called with them."""
    dataset: Any = job.loader.dataset
    with _same_random():
        samples = [dataset[at] for at in range(min(len(dataset), max(2, share)))]

    def given(count: int) -> Given:
        rows = [samples[at % len(samples)] for at in range(count)]
        batch: Any = job.loader.collate_fn(rows)
        return (batch[0] if isinstance(batch, (tuple, list)) else batch,), {}

    return given


@contextmanager
def _same_random() -> Iterator[None]:
    """Random numbers afterwards are as if nothing had been drawn."""
    own, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(own)
    np.random.set_state(numpys)
