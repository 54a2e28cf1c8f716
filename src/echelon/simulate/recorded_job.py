"""Which machines, links and job does a recorded run show? A pure fold over its events.

Computing comes from the steps: a fixed part and a part for each sample, by worker; the fixed part is known
only where shares varied. Gradients come from the buckets, with the moment at which each was ready. Links
come from the plan where it has their rates (a lab's file), else from what the workers measured. Shares and
collective are those that the run ended with, and the time of a step is that of the steps with them, if
there are enough.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from echelon.config.call import Call, parse_call
from echelon.config.units import duration_s, rate_bytes_per_s
from echelon.errors import ConfigError
from echelon.observe.events import (
    AnyEvent,
    BucketReduced,
    CollectiveChanged,
    LinkMeasured,
    SharesChanged,
    StepEnded,
)
from echelon.observe.plan_view import measured_step_s
from echelon.observe.step_cost import CostTally, StepCost
from echelon.plan.groups import Groups
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.plan import Plan, WorkerPlan
from echelon.plan.strategy import RunStrategy
from echelon.plan.topology import Node, Topology, Uplink

_CHOSEN = re.compile(r"([a-z-]+(?:\(.*?\))?): ")
_BUCKETS_KEPT = 400  # of one worker, for medians
_ENOUGH_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """What a run shows. `notes` say what its record does not tell, and what is assumed."""

    topology: Topology
    job: JobProfile
    strategy: RunStrategy
    measured_s: float
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    costs: CostTally = field(default_factory=CostTally)
    begins: dict[int, float] = field(default_factory=dict)  # of rank 0, by step
    shares: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    batches: Counter[int] = field(default_factory=Counter)
    apply_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    sent: list[int] = field(default_factory=list)
    spans: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # of rank 0: compute's begin and length
    buckets: dict[int, list[BucketReduced]] = field(default_factory=lambda: defaultdict(list))
    links: dict[tuple[int, int], LinkMeasured] = field(default_factory=dict)
    shared: SharesChanged | None = None  # the last one, of rank 0
    arranged: CollectiveChanged | None = None

    def step_s(self) -> float | None:
        """The time of a step; of those after the last change, if there are enough."""
        last = max((event.step for event in (self.shared, self.arranged) if event is not None), default=-1)
        after = [begin for step, begin in self.begins.items() if step > last]
        return measured_step_s(after if len(after) >= _ENOUGH_STEPS else list(self.begins.values()))


def recorded_job(events: Iterable[AnyEvent], plan: Plan, *, name: str = "recorded") -> RecordedJob:
    """Rebuild topology, job and strategy; ConfigError if the run is too short to say anything."""
    seen = _fold(events)
    costs = seen.costs.costs()
    measured_s = seen.step_s()
    if measured_s is None or len(costs) != len(plan.workers):
        raise ConfigError(
            f"run {name} is too short: {len(seen.begins)} steps of rank 0, and "
            f"{len(costs)} of {len(plan.workers)} workers with steps",
            where=name,
            fix="give a run in which every worker made at least three steps",
        )
    names = _names(plan.workers)
    fastest = min(costs, key=lambda cost: cost.usual_s / cost.share)
    own = {
        names[cost.rank]: ComputeCost(
            fixed_s=cost.fixed_s,
            per_sample_s=cost.per_sample_s,
            apply_s=median(seen.apply_s[cost.rank]),
        )
        for cost in costs
    }
    layers, notes = _layers(seen, len(names))
    if not all(cost.fixed_known for cost in costs):
        notes.append("no worker's share varied, so a step's cost counts as proportional to the share")
    job = JobProfile(
        name=name,
        batch=seen.batches.most_common(1)[0][0],
        cost=own[names[fastest.rank]],
        layers=tuple(layers),
        costs=own,
    )
    collective, groups = _arrangement(plan, seen.arranged)
    topology, said = _topology(replace(plan, groups=groups), names, costs, seen)
    strategy = RunStrategy(
        nodes=tuple(names),
        shares=_shares(seen, [cost.rank for cost in costs], job.batch),
        groups=groups,
        collective=collective,
        codec=plan.codec,
        overlap=plan.overlap,
        factors=any(bucket.how == "factors" for kept in seen.buckets.values() for bucket in kept),
        sync=plan.sync,
        servers=len(plan.servers),
    )
    return RecordedJob(
        topology=topology, job=job, strategy=strategy, measured_s=measured_s, notes=(*notes, *said)
    )


def _shares(seen: _Seen, ranks: Sequence[int], batch: int) -> tuple[int, ...]:
    """The last ones of a full batch, if they changed; else each worker's most frequent one."""
    if seen.shared is not None and sum(seen.shared.shares) == batch:
        return tuple(seen.shared.shares)
    return tuple(seen.shares[rank].most_common(1)[0][0] for rank in ranks)


def _arrangement(plan: Plan, last: CollectiveChanged | None) -> tuple[str, Groups]:
    """The collective and the groups that the run ended with; a hierarchical one has the groups' sizes."""
    if last is None:
        return _collective(plan), plan.groups
    call = parse_call(last.collective)
    if call.name == "auto":
        return "auto", plan.groups
    groups = tuple(tuple(group) for group in last.groups) or plan.groups
    if call.name != "hierarchical" or "sizes" in call.options:
        return last.collective, groups
    if len(groups) < 2:  # recorded before events had groups
        return _collective(plan), groups
    return str(Call(call.name, call.args, {"sizes": [len(g) for g in groups], **call.options})), groups


def _collective(plan: Plan) -> str:
    """What `auto` became in the run, which the plan's reasons begin with: `direct: 8 workers, ...`."""
    found = _CHOSEN.match(plan.reasons.get("collective", ""))
    return found.group(1) if found is not None and plan.collective == "auto" else plan.collective


def _fold(events: Iterable[AnyEvent]) -> _Seen:
    seen = _Seen()
    for event in events:
        match event:
            case StepEnded():
                seen.costs.add(event)
                seen.shares[event.rank][event.share] += 1
                seen.apply_s[event.rank].append(event.apply_s)
                if event.rank == 0:
                    seen.begins[event.step] = event.start
                    seen.batches[event.batch] += 1
                    seen.sent.append(event.sent_bytes)
                    seen.spans[event.step] = (event.start + event.data_s, event.compute_s)
            case BucketReduced(rank=0):
                if len(seen.buckets[event.index]) < _BUCKETS_KEPT:
                    seen.buckets[event.index].append(event)
            case SharesChanged(rank=0):
                seen.shared = event
            case CollectiveChanged(rank=0):
                seen.arranged = event
            case LinkMeasured():
                seen.links[event.rank, event.peer] = event
            case _:
                pass
    return seen


def _names(workers: Sequence[WorkerPlan]) -> list[str]:
    """A name for each worker: its node's; with a number where several share a node."""
    count = Counter(worker.node for worker in workers)
    seen: Counter[str] = Counter()
    names = []
    for worker in workers:
        names.append(worker.node if count[worker.node] == 1 else f"{worker.node}-{seen[worker.node]}")
        seen[worker.node] += 1
    return names


def _layers(seen: _Seen, workers: int) -> tuple[list[Layer], list[str]]:
    """A layer for each bucket, in the order of the model: the last bucket holds the first layers."""
    if not seen.buckets:
        sent = median(seen.sent) if seen.sent else 0
        if workers < 2 or not sent:
            return [], ["the run exchanged no gradients, so their size is unknown"]
        size = round(sent * workers / (2 * (workers - 1)))
        return [Layer(name="gradients", size_bytes=size)], ["no buckets were recorded: one is assumed"]
    layers = []
    for index, kept in sorted(seen.buckets.items(), reverse=True):
        ready = [
            (bucket.start - seen.spans[bucket.step][0]) / seen.spans[bucket.step][1]
            for bucket in kept
            if bucket.step in seen.spans and seen.spans[bucket.step][1] > 0
        ]
        at = min(1.0, max(0.0, median(ready))) if ready else 1.0
        size = round(median(bucket.size_bytes for bucket in kept))
        layers.append(Layer(name=f"bucket {index}", size_bytes=size, ready_at=at))
    return layers, []


def _topology(
    plan: Plan, names: Sequence[str], costs: Sequence[StepCost], seen: _Seen
) -> tuple[Topology, list[str]]:
    best_s = min(cost.usual_s / cost.share for cost in costs)
    told = any(worker.link for worker in plan.workers) or bool(plan.uplinks)
    nodes = []
    for rank, (name, worker) in enumerate(zip(names, plan.workers, strict=True)):
        up, down = _told(worker.link) if told else _measured(seen, rank)
        nodes.append(
            Node(
                name=name,
                site=worker.site or _group_of(plan, rank),
                speed=best_s / (costs[rank].usual_s / costs[rank].share),
                cores=worker.node_speed if told else 1.0,
                up_bytes_per_s=up,
                down_bytes_per_s=down,
                latency_s=0.0 if told else _latency_s(seen, rank),
            )
        )
    uplinks = _told_uplinks(plan) if told else _measured_uplinks(nodes, seen)
    known = "the plan's file" if told else "what the workers measured" if seen.links else ""
    notes = [] if known or len(names) == 1 else ["no link was measured: all count as unlimited"]
    return Topology(nodes=tuple(nodes), uplinks=uplinks, known=known), notes


def _group_of(plan: Plan, rank: int) -> str:
    for at, group in enumerate(plan.groups):
        if rank in group:
            return f"group-{at}"
    return "main"


def _told(link: str) -> tuple[float, float]:
    """Both rates of a link's text: `1gbit`, or `1gbit up, 100mbit down`."""
    rates = [part.strip().partition(" ")[0] for part in link.split(",")] if link else ["unlimited"]
    found = [math.inf if rate == "unlimited" else rate_bytes_per_s(rate) for rate in rates]
    return found[0], found[-1]


def _told_uplinks(plan: Plan) -> tuple[Uplink, ...]:
    return tuple(
        Uplink(
            between=uplink.between,
            bytes_per_s=rate_bytes_per_s(uplink.rate) if uplink.rate else math.inf,
            latency_s=duration_s(uplink.latency) if uplink.latency else 0.0,
        )
        for uplink in plan.uplinks
    )


def _measured(seen: _Seen, rank: int) -> tuple[float, float]:
    """The best rates from and to a worker: its own link is at least that fast."""
    up = [link.bytes_per_s for (one, _), link in seen.links.items() if one == rank]
    down = [link.bytes_per_s for (_, other), link in seen.links.items() if other == rank]
    return max(up, default=math.inf), max(down or up, default=math.inf)


def _latency_s(seen: _Seen, rank: int) -> float:
    """Half of the shortest way to another worker: the other half is its own."""
    found = [link.latency_s for ends, link in seen.links.items() if rank in ends]
    return min(found, default=0.0) / 2


def _measured_uplinks(nodes: Sequence[Node], seen: _Seen) -> tuple[Uplink, ...]:
    """Between each two sites, the best rate that was measured between them."""
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (one, other), link in seen.links.items():
        if other < len(nodes) and one < len(nodes) and nodes[one].site != nodes[other].site:
            ends = sorted((nodes[one].site, nodes[other].site))
            rates[ends[0], ends[1]].append(link.bytes_per_s)
    sites = sorted({node.site for node in nodes})
    for at, first in enumerate(sites):
        for second in sites[at + 1 :]:
            rates.setdefault((first, second), [math.inf])
    return tuple(Uplink(between=ends, bytes_per_s=max(found)) for ends, found in sorted(rates.items()))
