"""The plan: the whole assignment of a run, written before it starts and kept with it.

A plan is complete and frozen; `reasons` explains its decisions. On disk it is TOML that a person can
read and edit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from echelon.config.choices import Choices
from echelon.config.schema import RunSettings
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker's assignment. `weight` is its part of every batch, relative to the other workers'.

    `speed` below 1 is emulated. `site`, `node_speed` (how fast its node computes, relative to others) and
    `link` (as text, with units) are what the plan was made from, for pictures; `memory` is what the worker
    may use, as text. Empty if unknown.
    """

    rank: int
    node: str
    weight: float = 1.0
    threads: int = 1
    speed: float = 1.0
    delay: str = ""
    site: str = ""
    node_speed: float = 1.0
    link: str = ""
    memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUplink:
    """The line between two sites that the plan was made for: its rate and latency as text, with units."""

    between: tuple[str, str]
    rate: str = ""
    latency: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A node that gets no worker, and why."""

    node: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """What a step is expected to take.

    compute_s   forward and backward of the slowest worker
    exposed_s   communication that computing does not hide
    efficiency  samples per second, divided by the sum of what the chosen nodes compute alone
    bottleneck  what a faster part would help most
    """

    step_s: float
    samples_per_s: float
    efficiency: float
    compute_s: float
    exposed_s: float
    bottleneck: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """What a worker needs: with the model, and for each sample of its share; as text, with units."""

    worker: str
    sample: str = "0B"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate:
    """Another way that was considered: in words, its predicted step, and why it was not chosen."""

    text: str
    step_s: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Choices):
    """Who does how much, and how they communicate.

    `servers` are the nodes of the servers, if any. `adapt_shares`: the weights are those of the first
    steps, and then follow the workers' measured speeds. `batch` is the global batch that the plan was made
    for, if it was searched for; then `left_out`, `predicted` and `candidates` say what the search found,
    and `memory` what the job needs, if it was measured.
    """

    run: str
    workers: tuple[WorkerPlan, ...]
    servers: tuple[str, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    adapt_shares: bool = False
    batch: int | None = None
    predicted_step_s: float | None = None
    predicted: PredictedStep | None = None
    left_out: tuple[LeftOut, ...] = ()
    candidates: tuple[PlanCandidate, ...] = ()
    memory: PlannedMemory | None = None
    uplinks: tuple[PlannedUplink, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def weights(self) -> list[float]:
        """Every worker's part of a batch, by rank."""
        return [worker.weight for worker in self.workers]

    def to_toml(self) -> str:
        """The plan as TOML text."""
        values = msgspec.to_builtins(self)
        return msgspec.toml.encode(_without_none({"run": self.run, **values})).decode()

    @classmethod
    def read(cls, file: Path) -> Plan:
        """Read a plan from a file; a ConfigError names what cannot be read."""
        try:
            return msgspec.toml.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"cannot read the plan: {error}", where=str(file)) from error
        except ConfigError as error:  # a value out of its range
            raise ConfigError(
                f"cannot read the plan: {error.message}", where=str(file), fix=error.fix
            ) from None


def _without_none(value: object) -> object:
    """The value without entries that are None, which TOML cannot write."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


_SETTINGS = RunSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(Choices):
    """What the user asked for; `make_plan` turns it into a plan."""

    shares: str = _SETTINGS.shares
    speeds: tuple[float, ...] = ()
    delay: str = ""
    delayed: float = _SETTINGS.delayed
    groups: tuple[tuple[int, ...], ...] = ()
    threads: int | None = None


def make_plan(
    run: str, nodes: Sequence[str], asked: PlanRequest, *, cores: int, rated: Sequence[float] = ()
) -> Plan:
    """Make the plan for workers on the given nodes. A worker's rank is its index in `nodes`.

    `rated` is how fast the nodes are; `asked.speeds` are emulated on top of that.
    """
    count = len(nodes)
    speeds = _speeds(asked.speeds, count)
    rates = [speed * rate for speed, rate in zip(speeds, rated or (1.0,) * count, strict=True)]
    weights, why_shares = _weights(asked.shares, rates)
    threads = asked.threads or max(1, cores // count)
    delayed = _delayed_ranks(count, asked.delayed) if asked.delay else set()
    workers = tuple(
        WorkerPlan(
            rank=rank,
            node=nodes[rank],
            weight=weights[rank],
            threads=threads,
            speed=speeds[rank],
            delay=asked.delay if rank in delayed else "",
        )
        for rank in range(count)
    )
    why_threads = "as asked" if asked.threads else _over(cores, count)
    return Plan(
        run=run,
        workers=workers,
        groups=asked.groups,
        adapt_shares=asked.shares == "auto",
        reasons={"shares": why_shares, "threads": why_threads},
        **asked.chosen(),
    )


def _speeds(given: tuple[float, ...], count: int) -> tuple[float, ...]:
    """The emulated speeds, one for each worker."""
    speeds = given or (1.0,) * count
    if len(speeds) != count:
        raise ConfigError(
            f"{_count(len(speeds), 'speed')} for {_count(count, 'worker')}",
            where="--speed",
            fix="give one for each worker",
        )
    if any(not 0 < speed <= 1 for speed in speeds):
        raise ConfigError(
            f"speeds {list(speeds)} do not work: 1 is full speed, 0.25 a quarter of it",
            where="--speed",
            fix="give numbers in (0, 1]",
        )
    return speeds


def _weights(shares: str, speeds: Sequence[float]) -> tuple[list[float], str]:
    if shares == "auto":
        return [1.0] * len(speeds), "equal at first; they follow the workers' measured speeds"
    if shares == "equal":
        return [1.0] * len(speeds), "equal, as asked"
    if shares == "by-speed":
        return list(speeds), "in proportion to the workers' stated speeds"
    try:
        weights = [float(part) for part in shares.split(",")]
    except ValueError:
        raise ConfigError(
            f"{shares!r} is not a way to share a batch",
            where="--shares",
            fix="say equal, auto, by-speed, or one number for each worker: 4,2,1,1",
        ) from None
    check_weights(weights, len(speeds))
    return weights, "as asked"


def check_weights(weights: Sequence[float], workers: int) -> None:
    """Refuse shares that are not one positive number for each worker."""
    if len(weights) != workers:
        raise ConfigError(
            f"{_count(len(weights), 'share')} for {_count(workers, 'worker')}",
            where="--shares",
            fix="give one for each worker",
        )
    for rank, weight in enumerate(weights):
        if not 0 < weight < math.inf:
            why = "nothing would be left for others" if weight > 0 else "it would have nothing to compute"
            raise ConfigError(
                f"rank {rank} has a share of {weight:g}: {why}",
                where="--shares",
                fix="give it a positive number, or start one worker less",
            )


def _delayed_ranks(count: int, fraction: float) -> set[int]:
    """The highest ranks, so that the leader is delayed last; at least one if the fraction is above 0."""
    if not 0 <= fraction <= 1:
        raise ConfigError(
            f"{fraction:g} is not a fraction of the workers", where="--delayed", fix="give 0 to 1"
        )
    delayed = max(1, math.floor(fraction * count + 0.5)) if fraction > 0 else 0
    return set(range(count - delayed, count))


def _over(cores: int, workers: int) -> str:
    return f"{_count(cores, 'usable core')} over {_count(workers, 'worker')}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def with_further(plan: Plan, workers: int, node: str = "") -> Plan:
    """The plan with so many workers, if it has fewer: those that join later are as the last one.

    `node`: the machine that they join from, if it is another one.
    """
    last = plan.workers[-1]
    node = node or last.node
    further = tuple(replace(last, rank=rank, node=node) for rank in range(len(plan.workers), workers))
    return replace(plan, workers=(*plan.workers, *further))
