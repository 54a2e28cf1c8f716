"""What every worker does for `echelon probe`: measure links with the others, then what computing costs.

In this order, because a lab's CPU quotas come into force when workers begin to train, and computing is to
be measured under them:

    warm up                 a pass that is not timed: the first one loads code
    join, exchange facts    which workers share a machine
    links, clocks           all workers together (comm/meet/flows.py, clocks.py), or from the leader's cache
    quota                   wait for it, in a lab
    computing, reducing     all workers at the same time, as in training, or from this machine's cache

Computing is a model's forward and backward (profile_job.py), or, without a model, a fixed small training
step: two convolutions and two matrix products of a batch of 32, the same on every machine and version.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec
import torch
from torch import Tensor, nn

from echelon.cluster import probe_cache
from echelon.cluster.allowance import (
    Allowance,
    ReduceSpeed,
    allowance,
    boot_id,
    reduce_speed,
    wait_for_quota,
)
from echelon.cluster.machine import usable_cores
from echelon.cluster.probe import fingerprint
from echelon.comm.group import Group
from echelon.comm.meet.clocks import ClockOffset, measure_clocks
from echelon.comm.meet.flows import FlowRates, Together, measure_flows
from echelon.comm.meet.links import Pair, Wired
from echelon.config.allowed import allow_names_in
from echelon.config.units import show_bytes
from echelon.errors import ConfigError
from echelon.observe.readiness import WorkerPhase, tell
from echelon.plan.cluster_file import read_cluster, write_cluster
from echelon.plan.job import JobProfile
from echelon.plan.measured import PairMeasured
from echelon.plan.sites import worthwhile_flows, worthwhile_pairs
from echelon.plan.topology import Node, Topology
from echelon.train.join import join
from echelon.train.profile_job import profile_model
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS
from echelon.zoo.task import cross_entropy

LINKS_LIMIT_S = 2.3
COMPUTE_LIMIT_S = 1.0
QUOTA_WITHIN_S = 8.0
PROGRESS = "probe: "  # how the leader's progress lines begin
_STEP_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAsked:
    """The model to profile, as on the command line, for samples of a data set."""

    model: str
    sample: SampleSpec
    batch: int
    optimizer: str = "sgd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What to measure.

    quotas      of a lab's nodes, in cores: they must be in force while computing is measured
    links_key   what else than nodes and addresses the links depend on: a lab's description
    fresh       whether to measure again what the cache has
    """

    model: ModelAsked | None = None
    quotas: Mapping[str, float] = field(default_factory=dict)
    links_key: str = ""
    fresh: bool = False
    links_limit_s: float = LINKS_LIMIT_S
    compute_limit_s: float = COMPUTE_LIMIT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """What one worker found.

    step_s     of the fixed small step; 0 if a model was to be profiled and does not fit
    profile    the job's cost here; None without a model, or if it does not fit
    misfit     why the model does not fit here; else empty
    ages_s     how old what came from the cache is, by what it is: links, compute
    flows      the same on all workers
    """

    rank: int
    node: str
    allowed: Allowance
    threads: int
    reduce: ReduceSpeed
    clock: ClockOffset
    flows: FlowRates
    step_s: float = 0.0
    profile: JobProfile | None = None
    misfit: str = ""
    notes: tuple[str, ...] = ()
    ages_s: Mapping[str, float] = field(default_factory=dict)
    took_s: float = 0.0


def probe_worker(request: ProbeRequest) -> NodeProbe:
    """Join the run, measure, and return what was found; called on every worker."""
    if request.model is not None:
        allow_names_in(request.model.model)  # the launcher was given it, and has built it
    warm_up(request.model)
    with join() as session:
        say = _say if session.is_leader else _silent
        # The probe measures below what a session offers to scripts.
        return _probe(session._group, session.node, request, say)


def _probe(group: Group, node: str, request: ProbeRequest, say: Callable[[str], None]) -> NodeProbe:
    begun = time.perf_counter()
    facts = [msgspec.json.decode(each) for each in group.all_gather_bytes(_facts(node))]
    here = sum(each["boot"] == facts[group.rank]["boot"] for each in facts)
    flows, links_age_s = _links(group, facts, request, say)
    clocks = measure_clocks(_wired(group)) if group.size > 1 else [ClockOffset()]
    tell(WorkerPhase.TRAINING)  # a lab's quotas come into force
    notes = _under_quota(node, request.quotas)
    group.barrier()
    allowed = allowance(here)
    found = _computing(request, allowed, say)
    say("how fast sums are")
    found = replace(found, reduce=reduce_speed())
    group.barrier()
    ages_s = {**found.ages_s, **({} if links_age_s is None else {"links": links_age_s})}
    return replace(
        found,
        rank=group.rank,
        node=node,
        clock=clocks[group.rank],
        flows=flows,
        notes=tuple(notes),
        ages_s=ages_s,
        took_s=time.perf_counter() - begun,
    )


def _facts(node: str) -> bytes:
    return msgspec.json.encode(
        {"node": node, "host": platform.node(), "boot": boot_id() or platform.node()}
    )


def _under_quota(node: str, quotas: Mapping[str, float]) -> list[str]:
    """Wait for this node's quota, if it is to have one; a note if it did not come."""
    expected = quotas.get(node)
    if expected is None or wait_for_quota(expected, within_s=QUOTA_WITHIN_S):
        return []
    return [f"{node} was measured without its quota of {expected:g} cores, which was not in force in time"]


def warm_up(asked: ModelAsked | None) -> None:
    """A pass before anything is timed: the first one loads code, which takes long under a quota."""
    if asked is None:
        _fixed_step()()
    elif not missing_memory(asked, allowance().memory_bytes):
        model = MODELS.build(asked.model, where="--model").build(asked.sample)
        x, y = _batch(asked.sample, 2)
        cross_entropy(model(x), y).backward()
        _optimizer(model, asked).step()  # its first step imports much


# Links.


def _links(
    group: Group, facts: Sequence[Mapping[str, str]], request: ProbeRequest, say: Callable[[str], None]
) -> tuple[FlowRates, float | None]:
    """The links, and how old they are if the leader's cache has them."""
    if group.size == 1:
        return FlowRates(size=1), None
    key = links_key(facts, request.links_key)
    found = None
    if group.rank == 0 and not request.fresh:
        found = probe_cache.cached(key, within_s=probe_cache.LINKS_AGE_S)
    told = group.broadcast_bytes(b"" if found is None else msgspec.json.encode(found))
    if told:
        entry = msgspec.json.decode(told, type=probe_cache.CacheEntry)
        kept = _read_flows(entry.text, group.size)
        if kept is not None:
            return kept, max(0.0, time.time() - entry.at)
    names = [f"{rank}" for rank in range(group.size)]

    def propose(latency_s: Mapping[Pair, float], bytes_per_s: Mapping[Pair, float]) -> list[list[Pair]]:
        """The leader's choice: rounding on other processors must not lead to another one."""
        sets = _proposed(names, latency_s, bytes_per_s) if group.rank == 0 else []
        told = group.broadcast_bytes(msgspec.json.encode(sets))
        return msgspec.json.decode(told, type=list[list[tuple[int, int]]])

    def further(latency_s: Mapping[Pair, float], bytes_per_s: Mapping[Pair, float]) -> list[Pair]:
        found = []
        if group.rank == 0:
            pairs = worthwhile_pairs(names, measured_pairs(names, latency_s, bytes_per_s))
            found = [(names.index(sender), names.index(receiver)) for sender, receiver in pairs]
        told = group.broadcast_bytes(msgspec.json.encode(found))
        return msgspec.json.decode(told, type=list[tuple[int, int]])

    flows = measure_flows(
        _wired(group), limit_s=request.links_limit_s, further=further, propose=propose, say=say
    )
    if group.rank == 0 and flows.complete:
        probe_cache.keep(key, _written_flows(flows))
    return flows, None


def _proposed(
    names: Sequence[str], latency_s: Mapping[Pair, float], bytes_per_s: Mapping[Pair, float]
) -> list[list[Pair]]:
    pairs = measured_pairs(names, latency_s, bytes_per_s)
    return [
        [(names.index(sender), names.index(receiver)) for sender, receiver in flows]
        for flows in worthwhile_flows(names, pairs)
    ]


def measured_pairs(
    names: Sequence[str], latency_s: Mapping[Pair, float], bytes_per_s: Mapping[Pair, float]
) -> list[PairMeasured]:
    """Latency and rate of each pair whose rate was measured, with the nodes' names."""
    return [
        PairMeasured(
            sender=names[sender],
            receiver=names[receiver],
            latency_s=latency_s.get((sender, receiver), 0.0),
            bytes_per_s=rate,
        )
        for (sender, receiver), rate in bytes_per_s.items()
    ]


def links_key(facts: Sequence[Mapping[str, str]], more: str) -> str:
    """What measured links depend on: the nodes in order, and what the launcher adds."""
    nodes = ", ".join(f"{each['node']} ({each['host']})" for each in facts)
    return f"links of {nodes}; {more}"


class _KeptFlows(msgspec.Struct, frozen=True):
    size: int
    pairs: list[tuple[int, int, float, float]]
    together: list[list[tuple[int, int, float]]]


def _written_flows(flows: FlowRates) -> str:
    kept = _KeptFlows(
        size=flows.size,
        pairs=[(*pair, flows.latency_s[pair], rate) for pair, rate in flows.bytes_per_s.items()],
        together=[
            [(*flow, rate) for flow, rate in zip(each.flows, each.bytes_per_s, strict=True)]
            for each in flows.together
        ],
    )
    return msgspec.json.encode(kept).decode()


def _read_flows(text: str, size: int) -> FlowRates | None:
    """What the cache has; None if it cannot be read, or is of another number of workers."""
    try:
        kept = msgspec.json.decode(text, type=_KeptFlows)
    except msgspec.MsgspecError:
        return None
    if kept.size != size:
        return None
    return FlowRates(
        size=size,
        latency_s={(one, other): latency_s for one, other, latency_s, _ in kept.pairs},
        bytes_per_s={(one, other): rate for one, other, _, rate in kept.pairs},
        together=tuple(
            Together(
                flows=tuple((one, other) for one, other, _ in each),
                bytes_per_s=tuple(rate for _, _, rate in each),
            )
            for each in kept.together
        ),
    )


# Computing.


def _computing(request: ProbeRequest, allowed: Allowance, say: Callable[[str], None]) -> NodeProbe:
    empty = NodeProbe(
        rank=0,
        node="",
        allowed=allowed,
        threads=torch.get_num_threads(),
        reduce=ReduceSpeed(),
        clock=ClockOffset(),
        flows=FlowRates(size=1),
    )
    if request.model is None:
        say("a small training step")
        return replace(empty, step_s=fixed_step_s())
    asked = request.model
    missing = missing_memory(asked, allowed.memory_bytes)
    if missing:
        return replace(empty, misfit=missing)
    # Quicker than without a model: it says nothing but how this machine compares with others.
    empty = replace(empty, step_s=fixed_step_s(_STEP_S / 2))
    key = profile_key(asked, allowed, empty.threads)
    if not request.fresh:
        known = cached_profile(key)
        if known is not None:
            return replace(empty, profile=known[0], ages_s={"compute": known[1]})
    say(f"forward and backward of {asked.model}")
    profile = _profile(asked, request.compute_limit_s)
    keep_profile(key, profile)
    return replace(empty, profile=profile)


def _profile(asked: ModelAsked, limit_s: float) -> JobProfile:
    torch.manual_seed(0)
    model = MODELS.build(asked.model, where="--model").build(asked.sample)
    optimizer = _optimizer(model, asked)

    def loss_of(count: int) -> Callable[[], Tensor]:
        x, y = _batch(asked.sample, count)
        return lambda: cross_entropy(model(x), y)

    return profile_model(asked.model, model, loss_of, optimizer, batch=asked.batch, limit_s=limit_s)


def _optimizer(model: nn.Module, asked: ModelAsked) -> torch.optim.Optimizer:
    if asked.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters())
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _batch(sample: SampleSpec, count: int) -> tuple[Tensor, Tensor]:
    """Random samples of that kind: what they hold does not change what they cost."""
    shape = (count, *sample.shape)
    x = torch.randint(sample.classes, shape) if sample.dtype == "int64" else torch.randn(shape)
    targets = shape if sample.task == "next-token" else (count,)
    return x, torch.randint(sample.classes, targets)


def missing_memory(asked: ModelAsked, memory_bytes: float) -> str:
    """Why a worker with so much memory cannot train the model; empty if it can.

    It needs the weights, their gradients, the gradients where they are reduced, and the optimizer's state.
    """
    states = 2 if asked.optimizer == "adamw" else 1
    with torch.device("meta"):
        model = MODELS.build(asked.model, where="--model").build(asked.sample)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    need = (3 + states) * weights
    if need <= memory_bytes:
        return ""
    return (
        f"{asked.model} needs {show_bytes(need)} for weights, gradients and the optimizer alone; "
        f"{show_bytes(memory_bytes)} are free: {show_bytes(need - memory_bytes)} are missing"
    )


def fixed_step_s(limit_s: float = _STEP_S, *, threads: int | None = None) -> float:
    """Seconds of wall time of a small training step, the same everywhere; with so many threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(threads or usual)
    try:
        return _timed_s(_fixed_step(), limit_s)
    finally:
        torch.set_num_threads(usual)


def _timed_s(step: Callable[[], None], limit_s: float) -> float:
    step()
    rounds: list[float] = []
    begun = time.perf_counter()
    while not rounds or time.perf_counter() - begun < limit_s:
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < limit_s / 5:  # several periods of a quota
            step()
            count += 1
        rounds.append((time.perf_counter() - started) / count)
    return median(rounds)


def _fixed_step() -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 3, 16, 16, generator=generator)
    y = torch.randint(10, (32,), generator=generator)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 6 * 6, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


# The cache of profiles.


def profile_key(asked: ModelAsked, allowed: Allowance, threads: int) -> str:
    """What a profile depends on: machine, quota, neighbours, threads, torch, model and batch."""
    quota = "no quota" if allowed.quota is None else f"quota {allowed.quota:.4g}"
    return (
        f"profile on {platform.node()}, {fingerprint()}, {quota}, {usable_cores()} usable cores, "
        f"{threads} threads, {allowed.workers_here} workers here; {asked.model} for {asked.sample}, "
        f"batch {asked.batch}, {asked.optimizer}"
    )


def cached_profile(key: str) -> tuple[JobProfile, float] | None:
    """The profile of that key, and its age in seconds; None if it has to be measured."""
    entry = probe_cache.cached(key, within_s=probe_cache.COMPUTE_AGE_S)
    if entry is None:
        return None
    try:
        job = read_cluster(entry.text, "cache").job
    except ConfigError:
        return None
    return None if job is None else (job, max(0.0, time.time() - entry.at))


def keep_profile(key: str, profile: JobProfile) -> None:
    """Let `cached_profile` find it."""
    here = Topology(nodes=(Node(name=platform.node() or "here"),), known=key)
    probe_cache.keep(key, write_cluster(here, profile))


def _wired(group: Group) -> Wired:
    """Groups on Echelon's own transport run any schedule, and the probe asks for that transport."""
    return group  # type: ignore[return-value]


def _say(text: str) -> None:
    """For the launcher, which shows it."""
    sys.stdout.write(f"{PROGRESS}{text}\n")
    sys.stdout.flush()


def _silent(text: str) -> None:
    """Only the leader tells."""


def shown_ages(ages_s: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The greatest age of each thing that came from a cache."""
    found: dict[str, float] = {}
    for each in ages_s:
        for what, age_s in each.items():
            found[what] = max(age_s, found.get(what, 0.0))
    return found
