"""What would a step take with a layout, and does it fit? From measured layers and links. Pure.

    data        the slowest worker's share, and an all-reduce that its backward pass hides in part
    sharded     the same bytes; level 1 hides none, level 3 gathers parameters twice
    pipeline    what its schedule takes, with the best cuts (`schedule_time.py`); then the output to all
                stages, and an all-reduce of each stage's gradients over the replicas. With shards of level
                3 also gathers, forward and backward of each micro-batch

A worker's memory is a hard limit. Times are estimates, to rank layouts and to leave out hopeless ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from echelon.config.units import show_memory, show_seconds
from echelon.errors import EchelonError, PlanError
from echelon.parallel.cut import ChainCost, best_chunk_cuts, best_cuts
from echelon.parallel.layout import Layout, Mesh, lines, mesh_of, parse_layout
from echelon.parallel.memory import MemoryNeed, ModelBytes, memory_needs, missing_memory
from echelon.parallel.schedule_time import schedule_s
from echelon.parallel.strategies.data import Replicas
from echelon.parallel.strategies.pipeline import Pipeline
from echelon.parallel.strategies.sharded import Sharded

_HIDDEN = 0.5  # of computing, behind which bytes between machines travel
_CLEARLY = 0.97  # of the step of a simpler layout
_HOPELESS = 3.0  # times the best prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCost:
    """What exchanges cost: messages by (sender, receiver), and an all-reduce over all workers.

    reduce_bytes_per_s  of gradients, in the memory that the group reduces fastest; `slices_bytes_per_s` of
                        other memory, as with shards; 0: the same
    hides  whether bytes travel while workers compute; in shared memory the workers copy them
    """

    latency_s: Mapping[tuple[int, int], float]
    bytes_per_s: Mapping[tuple[int, int], float]
    reduce_latency_s: float
    reduce_bytes_per_s: float
    hides: bool
    slices_bytes_per_s: float = 0.0

    def message_s(self, size_bytes: float, sender: int, receiver: int) -> float:
        """One message; a pair that was not measured is as slow as the slowest."""
        pair = sender, receiver
        latency_s = self.latency_s.get(pair, max(self.latency_s.values(), default=0.0))
        return latency_s + size_bytes / self.bytes_per_s.get(pair, min(self.bytes_per_s.values()))

    def reduce_s(self, size_bytes: float, ranks: Sequence[int], workers: int) -> float:
        """An all-reduce: as measured over all workers, else a ring of messages."""
        if len(ranks) < 2 or not size_bytes:
            return 0.0
        if len(ranks) == workers:
            return self.reduce_latency_s + size_bytes / self.reduce_bytes_per_s
        ring = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
        piece = max(self.message_s(size_bytes / len(ranks), one, other) for one, other in ring)
        return 2 * (len(ranks) - 1) * piece


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutJob:
    """A measured job: what each layer costs on each worker, [rank][layer], and what is exchanged.

    fixed_s, sample_s  forward and backward: what a pass costs, and what each sample adds
    trained_bytes      of each layer: its trained parameters
    yielded_bytes      of each layer: what it yields for a sample
    apply_s            an update of all parameters on the slowest worker
    rooms              what each worker's models may use, in bytes
    closed             layers before which no cut is possible
    order              the workers, neighbours beside each other; empty: by rank
    """

    batch: int
    fixed_s: Sequence[Sequence[float]]
    sample_s: Sequence[Sequence[float]]
    trained_bytes: Sequence[float]
    yielded_bytes: Sequence[float]
    apply_s: float
    model: ModelBytes
    rooms: Sequence[float]
    exchange: ExchangeCost
    closed: frozenset[int] = field(default_factory=frozenset)
    order: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.rooms)

    @property
    def layers(self) -> int:
        """How many the model has."""
        return len(self.trained_bytes)

    def times_s(self, rank: int, samples: float) -> list[float]:
        """Each layer's time for so many samples on a worker."""
        pairs = zip(self.fixed_s[rank], self.sample_s[rank], strict=True)
        return [fixed_s + samples * sample_s for fixed_s, sample_s in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """A layout with its predicted step; `compute_s` is the part in which the slowest worker computes."""

    text: str
    step_s: float
    compute_s: float

    def __str__(self) -> str:
        return f"{self.text} {show_seconds(self.step_s)} (computing {show_seconds(self.compute_s)})"


def layout_cost(text: str, job: LayoutJob) -> LayoutCost:
    """The prediction for a layout; PlanError if it does not fit."""
    layout = replace(parse_layout(text), order=job.order)
    if layout.find(Pipeline) is not None:
        return _pipeline(text, layout, job)
    _check_room(text, layout, job)
    share = job.batch / job.workers
    compute_s = max(sum(job.times_s(rank, share)) for rank in range(job.workers))
    hidden_s = _HIDDEN * compute_s if job.exchange.hides else 0.0
    sharded = layout.find(Sharded)
    ranks = tuple(range(job.workers))
    size = sum(job.trained_bytes)
    if sharded is None:
        exchange_s = max(0.0, job.exchange.reduce_s(size, ranks, job.workers) - hidden_s)
        return LayoutCost(text=text, step_s=compute_s + exchange_s + job.apply_s, compute_s=compute_s)
    exchange_s = _sharded_s(layout, sharded, job, size, hidden_s)
    part = max(len(line) for line in lines(layout, job.workers, Sharded))
    return LayoutCost(text=text, step_s=compute_s + exchange_s + job.apply_s / part, compute_s=compute_s)


def _sharded_s(layout: Layout, sharded: Sharded, job: LayoutJob, size: float, hidden_s: float) -> float:
    """Sums and gathers of slices, each half of an all-reduce, and sums between sets of shards."""
    group = lines(layout, job.workers, Sharded)[0]
    exchange = job.exchange
    half_s = exchange.reduce_s(size, group, job.workers) / 2
    if len(group) == job.workers and exchange.slices_bytes_per_s:
        half_s = (exchange.reduce_latency_s + size / exchange.slices_bytes_per_s) / 2
    between = lines(layout, job.workers, Replicas)[0]
    across_s = job.exchange.reduce_s(size / len(group), between, job.workers)
    if sharded.level == 1:
        return 2 * half_s + across_s
    if sharded.level == 2:
        return max(0.0, half_s - hidden_s) + half_s + across_s
    layers = sum(1 for one in job.trained_bytes if one)
    calls_s = 3 * layers * job.exchange.reduce_latency_s / 2
    return max(0.0, 3 * half_s - hidden_s) + calls_s + across_s


def _check_room(text: str, layout: Layout, job: LayoutJob) -> None:
    """PlanError if a worker has too little memory, with the activations of its share."""
    activations = sum(job.yielded_bytes) * job.batch / job.workers
    rooms = [room - activations for room in job.rooms]
    missing = missing_memory(layout, job.model, rooms)
    if missing is not None:
        raise PlanError(
            f"{show_memory(missing.size)} of memory are missing on rank {missing.ranks[0]}",
            where=f"parallel {text}",
        )


def _pipeline(text: str, layout: Layout, job: LayoutJob) -> LayoutCost:
    pipeline = layout.find(Pipeline)
    assert pipeline is not None
    mesh = mesh_of(layout, job.workers)
    per_replica = job.batch / mesh.replicas
    micro = pipeline.count(max(1, int(per_replica)))
    needs = memory_needs(layout, job.workers, job.model)
    chunks = pipeline.parts
    cuts = [_cuts(text, ranks, chunks, job, per_replica / micro, micro, needs) for ranks in mesh.ranks]
    found = [
        _replica_s(pipeline, ranks, cut, job, per_replica, micro)
        for ranks, cut in zip(mesh.ranks, cuts, strict=True)
    ]
    summed_s, apply_s = _stages_s(mesh, cuts[0], job)
    compute_s = max(compute for _, compute in found)
    sharded = layout.find(Sharded)
    if sharded is not None:
        apply_s /= len(lines(layout, job.workers, Sharded)[0])
    if sharded is not None and sharded.level == 3:  # gathers, forward and backward of each micro-batch
        hidden_s = _HIDDEN * compute_s if job.exchange.hides else 0.0
        gathers_s = micro * summed_s + 2 * micro * job.layers * job.exchange.reduce_latency_s / 2
        summed_s = summed_s / 2 + max(0.0, gathers_s - hidden_s)
    step_s = max(took for took, _ in found) + summed_s + apply_s
    return LayoutCost(text=text, step_s=step_s, compute_s=min(step_s, compute_s))


def _cuts(
    text: str,
    ranks: Sequence[int],
    chunks: int,
    job: LayoutJob,
    samples: float,
    micro: int,
    needs: Sequence[MemoryNeed],
) -> tuple[int, ...]:
    """The best cuts of a replica; PlanError if none fits."""
    if chunks * len(ranks) > job.layers - len(job.closed):
        raise PlanError(f"{job.layers} layers are too few", where=f"parallel {text}")
    copies = sum(needs[rank].total for rank in ranks) / max(1.0, sum(job.trained_bytes))
    sizes = [
        copies * trained + min(micro, 2 * len(ranks)) * samples * yielded
        for trained, yielded in zip(job.trained_bytes, job.yielded_bytes, strict=True)
    ]
    cost = ChainCost(
        times_s=[job.times_s(rank, samples) for rank in ranks] * chunks,
        sizes_bytes=sizes,
        limits_bytes=[job.rooms[rank] for rank in ranks] * chunks,
        closed=job.closed,
    )
    return best_cuts(cost, micro) if chunks == 1 else best_chunk_cuts(cost, micro, len(ranks))


def _replica_s(
    pipeline: Pipeline,
    ranks: Sequence[int],
    cuts: Sequence[int],
    job: LayoutJob,
    rows: float,
    micro: int,
) -> tuple[float, float]:
    """The time of all passes of a replica, by its schedule, and of the computing in it."""
    samples, edges = rows / micro, [0, *cuts, job.layers]
    turn = [*ranks] * pipeline.parts  # who has each run of layers
    parts = [
        sum(job.times_s(rank, samples)[begin:end])
        for rank, begin, end in zip(turn, edges[:-1], edges[1:], strict=True)
    ]
    wires = [
        job.exchange.message_s(samples * job.yielded_bytes[cut - 1], one, other)
        for cut, one, other in zip(cuts, turn[:-1], turn[1:], strict=True)
    ]
    if not job.exchange.hides:  # who sends and who receives copy
        padded = [0.0, *wires, 0.0]
        parts = [took + padded[at] + padded[at + 1] for at, took in enumerate(parts)]
    loads = [sum(parts[at :: len(ranks)]) for at in range(len(ranks))]
    compute_s = sum(loads) + (micro - 1) * max(loads)
    took_s = schedule_s(pipeline, micro, parts, wires)
    output_s = sum(
        job.exchange.message_s(rows * job.yielded_bytes[-1], ranks[-1], rank) for rank in ranks[:-1]
    )
    return took_s + output_s, compute_s


def _stages_s(mesh: Mesh, cuts: Sequence[int], job: LayoutJob) -> tuple[float, float]:
    """The longest sum of a stage's gradients over the replicas, and the longest update of a stage."""
    edges = [0, *cuts, job.layers]
    total = max(1.0, sum(job.trained_bytes))
    runs = [sum(job.trained_bytes[begin:end]) for begin, end in pairwise(edges)]
    stages = len(mesh.ranks[0])
    sizes = [sum(runs[stage::stages]) for stage in range(stages)]
    summed_s = max(
        job.exchange.reduce_s(size, mesh.peers(stage), job.workers) for stage, size in enumerate(sizes)
    )
    return summed_s, job.apply_s * max(sizes) / total


@dataclass(frozen=True, slots=True)
class RankedLayouts:
    """Layouts that fit, the best first, and why others were left out."""

    costs: tuple[LayoutCost, ...]
    left_out: Mapping[str, str]

    @property
    def worth_trying(self) -> list[str]:
        """Those that are not hopeless: of layouts that differ in the schedule only, the best one first."""
        limit_s = _HOPELESS * min((one.step_s for one in self.costs), default=math.inf)
        texts = [one.text for one in self.costs if one.step_s <= limit_s]
        firsts: dict[object, str] = {}
        for text in texts:
            firsts.setdefault(_form(text), text)
        return [*firsts.values(), *(text for text in texts if text not in firsts.values())]


def _form(text: str) -> object:
    """What a layout divides, without the order in which a pipeline computes."""
    return tuple(
        (one.name, one.extent, one.level if isinstance(one, Sharded) else 0)
        for one in parse_layout(text).dimensions
    )


def ranked_layouts(texts: Sequence[str], job: LayoutJob) -> RankedLayouts:
    """Rank layouts, given from the simplest on: one that comes later has to be clearly faster."""
    found: list[LayoutCost] = []
    left_out: dict[str, str] = {}
    for text in texts:
        try:
            found.append(layout_cost(text, job))
        except EchelonError as error:
            left_out[text] = error.message
    best: LayoutCost | None = None
    for one in found:
        if best is None or one.step_s < _CLEARLY * best.step_s:
            best = one
    ordered = sorted(found, key=lambda one: (one is not best, one.step_s))
    return RankedLayouts(tuple(ordered), left_out)
