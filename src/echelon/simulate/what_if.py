"""What would a recorded run take if something were different? A node more or less, another link or codec.

The recorded run is predicted as it was, and as it would be. What was measured, divided by the prediction of
the recorded run, is the calibration: the changed run is expected to take its own prediction times that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.config.call import Call, parse_call
from echelon.config.units import rate_bytes_per_s, show_seconds
from echelon.errors import ConfigError, UnknownName
from echelon.plan.groups import Groups
from echelon.plan.job import JobProfile
from echelon.plan.optimal_shares import best_shares
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Topology
from echelon.simulate.recorded_job import RecordedJob

Predictor = Callable[[Topology, JobProfile, RunStrategy], Prediction]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfChanges:
    """What is to be different.

    add     nodes to add, each like one that is there; `node-a:3` adds three
    drop    nodes to leave out
    links   `east/west=1gbit` for the line between two sites, `node-a=100mbit` for a node's own
    chosen  other choices of the strategy, by name: codec, collective, sync, overlap
    """

    add: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    chosen: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Both predictions. `expected_s` is the changed one, calibrated by the recorded run."""

    recorded: Prediction
    changed: Prediction
    topology: Topology
    strategy: RunStrategy
    measured_s: float
    reason: str

    @property
    def calibration(self) -> float:
        """What was measured, divided by what was predicted."""
        return self.measured_s / self.recorded.step_s

    @property
    def expected_s(self) -> float:
        """What a step of the changed run is expected to take."""
        return self.changed.step_s * self.calibration


def what_if(run: RecordedJob, changes: WhatIfChanges, predict: Predictor) -> WhatIf:
    """Predict a recorded run as it was, and with the changes."""
    topology, job, strategy = changed(run, changes)
    before = predict(run.topology, run.job, run.strategy)
    after = predict(topology, job, strategy)
    return WhatIf(
        recorded=before,
        changed=after,
        topology=topology,
        strategy=strategy,
        measured_s=run.measured_s,
        reason=_reason(before, after, run.strategy, strategy),
    )


def changed(run: RecordedJob, changes: WhatIfChanges) -> tuple[Topology, JobProfile, RunStrategy]:
    """Topology, job and strategy with the changes; UnknownName names the nearest node or link."""
    topology = _relinked(run.topology, changes.links)
    members = {name: at for at, name in enumerate(run.strategy.nodes)}
    order: list[tuple[str, int]] = [(name, _group(run.strategy.groups, at)) for name, at in members.items()]
    costs = dict(run.job.costs)
    for text in changes.add:
        like, count = _counted(text)
        _check(like, members, "--add")
        group = _group(run.strategy.groups, members[like])
        for _ in range(count):
            topology, name = _with_one_like(topology, like)
            near = max(at for at, (known, _) in enumerate(order) if known.partition("+")[0] == like)
            order.insert(near + 1, (name, group))  # neighbours of one site stay neighbours
            if like in costs:
                costs[name] = costs[like]
    for name in changes.drop:
        _check(name, members, "--drop")
        order = [(known, group) for known, group in order if known != name]
    if not order:
        raise ConfigError("no worker would be left", where="--drop", fix="drop fewer")
    job = replace(run.job, costs=costs)
    strategy = _rearranged(run, topology, job, order, same=not changes.add and not changes.drop)
    return topology, job, replace(strategy, **dict(changes.chosen))


def _rearranged(
    run: RecordedJob, topology: Topology, job: JobProfile, order: list[tuple[str, int]], *, same: bool
) -> RunStrategy:
    """The strategy for other nodes: groups stay together, and shares fit the nodes again."""
    if same:
        return run.strategy
    if job.batch < len(order):
        raise ConfigError(
            f"a batch of {job.batch} cannot be shared by {len(order)} workers",
            where="--add",
            fix=f"add at most {max(0, job.batch - len(run.strategy.nodes))}",
        )
    if run.strategy.groups:
        order = sorted(order, key=lambda one: one[1])  # ranks of a group are neighbours
    names = tuple(name for name, _ in order)
    shares = best_shares([job.cost_on(topology.node(name)) for name in names], job.batch)
    groups: Groups = ()
    if run.strategy.groups:
        found: dict[int, list[int]] = {}
        for rank, (_, group) in enumerate(order):
            found.setdefault(group, []).append(rank)
        groups = tuple(tuple(ranks) for ranks in found.values())
    collective = _resized(run.strategy.collective, [len(group) for group in groups])
    collective = _reweighed(collective, run.strategy.nodes, names)
    return replace(run.strategy, nodes=names, shares=shares, groups=groups, collective=collective)


def _resized(collective: str, sizes: Sequence[int]) -> str:
    """A hierarchical collective with the sizes of the groups as they are now."""
    call = parse_call(collective)
    if call.name != "hierarchical" or "sizes" not in call.options:
        return collective
    if len(sizes) < 2:
        return str(call.options.get("inner", "ring"))
    return str(Call(call.name, call.args, {**call.options, "sizes": list(sizes)}))


def _reweighed(collective: str, before: Sequence[str], now: Sequence[str]) -> str:
    """Weights of a collective are by rank: nodes keep theirs, and a new one has that of its like."""
    call = parse_call(collective)
    weights = call.options.get("weights")
    if not isinstance(weights, list) or len(weights) != len(before):
        return collective
    of = dict(zip(before, weights, strict=True))
    kept = [of[name.partition("+")[0]] for name in now]
    options = {name: value for name, value in call.options.items() if name != "weights"}
    return str(Call(call.name, call.args, {**options, "weights": kept} if any(kept) else options))


def _group(groups: Groups, rank: int) -> int:
    return next((at for at, group in enumerate(groups) if rank in group), 0)


def _counted(text: str) -> tuple[str, int]:
    name, colon, count = text.rpartition(":")
    if not colon:
        return text, 1
    if not count.isdigit() or int(count) < 1:
        raise ConfigError(f"{text!r} does not say how many", where="--add", fix="write node-a or node-a:3")
    return name, int(count)


def _check(name: str, known: dict[str, int], where: str) -> None:
    if name not in known:
        raise UnknownName("node", name, known, where=where)


def _with_one_like(topology: Topology, like: str) -> tuple[Topology, str]:
    """The topology with one more node, on the same site with an equal link."""
    taken = {node.name for node in topology.nodes}
    name = next(f"{like}+{at}" for at in range(1, len(taken) + 2) if f"{like}+{at}" not in taken)
    node = replace(topology.node(like), name=name)
    return replace(topology, nodes=(*topology.nodes, node)), name


def _relinked(topology: Topology, links: Sequence[str]) -> Topology:
    for text in links:
        name, equals, rate = text.partition("=")
        if not equals:
            raise ConfigError(
                f"{text!r} names no rate", where="--link", fix="write east/west=1gbit or node-a=100mbit"
            )
        bytes_per_s = rate_bytes_per_s(rate, where="--link")
        if bytes_per_s <= 0:
            raise ConfigError(f"nothing passes with {rate}", where="--link", fix="give a rate above 0")
        backwards = "/".join(reversed(name.split("/")))
        lines = [uplink for uplink in topology.uplinks if uplink.name in (name, backwards)]
        nodes = [node for node in topology.nodes if node.name == name]
        if not lines and not nodes:
            known = [uplink.name for uplink in topology.uplinks] + [node.name for node in topology.nodes]
            raise UnknownName("link", name, known, where="--link")
        topology = replace(
            topology,
            uplinks=tuple(
                replace(uplink, bytes_per_s=bytes_per_s) if uplink in lines else uplink
                for uplink in topology.uplinks
            ),
            nodes=tuple(
                replace(node, up_bytes_per_s=bytes_per_s, down_bytes_per_s=bytes_per_s)
                if node in nodes
                else node
                for node in topology.nodes
            ),
        )
    return topology


def _reason(before: Prediction, after: Prediction, was: RunStrategy, now: RunStrategy) -> str:
    """Which part of a step changes most, in a sentence."""
    parts = {
        "computing": (max(before.compute_s), max(after.compute_s)),
        "communication that computing does not hide": (before.exposed_s, after.exposed_s),
        "the optimizer": (before.apply_s, after.apply_s),
    }
    name, (old, new) = max(parts.items(), key=lambda item: abs(item[1][1] - item[1][0]))
    if abs(new - old) < 0.005 * before.step_s:
        return "no part of a step changes by more than half a percent"
    verb = "falls" if new < old else "grows"
    shares = ""
    if name == "computing" and len(was.nodes) != len(now.nodes):
        shares = f": the largest share is {max(now.shares)} instead of {max(was.shares)} samples"
    limit = f"; then {after.bottleneck} limits a step" if after.bottleneck else ""
    return f"{name} {verb} from {show_seconds(old)} to {show_seconds(new)}{shares}{limit}"
