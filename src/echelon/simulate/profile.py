"""How long a worker's gradient, the server's work and a transfer take; measured on this machine, or given.

    compute_s   a gradient of one batch, forward and backward, with one thread: the median of several
    queue_s     receiving a push: one copy of it, and adding it to an update
    apply_s     an update: the optimizer's step
    hand_s      sending weights: a clone of them, and one copy

A real server does more than these copies; its measured costs can be given instead. Measurements are cached
per machine in `simulate.json`, beside the file of `cluster/probe.py`. A link cannot be measured in one
process; its default is 1 Gb/s with 0.1 ms of latency.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from echelon.cluster.probe import fingerprint
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.zoo.locate import cache_folder

if TYPE_CHECKING:
    from echelon.simulate.learner import Problem
    from echelon.simulate.setting import Setting

_REPEATS = 15


def _check(where: str, name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise ConfigError(
            f"{name} is {value:g}, but must be {wanted}", where=f"{where}, {name}", fix=f"give {wanted}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that the server spends on receiving a push, on an update, and on sending weights."""

    queue_s: float = 0.0
    apply_s: float = 0.0
    hand_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("queue_s", "apply_s", "hand_s"):
            _check("costs", name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualLink:
    """A worker's link to the server and to other workers."""

    latency_s: float = 1e-4
    bytes_per_s: float = 125e6

    def __post_init__(self) -> None:
        _check("link", "latency_s", self.latency_s, 0 <= self.latency_s < math.inf, "0 or more")
        _check("link", "bytes_per_s", self.bytes_per_s, 0 < self.bytes_per_s < math.inf, "a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All durations of a virtual cluster."""

    compute_s: float
    costs: Costs = Costs()
    link: VirtualLink = VirtualLink()

    def __post_init__(self) -> None:
        # If computing took no time, a run would never end.
        _check("profile", "compute_s", self.compute_s, 0 < self.compute_s < math.inf, "a number above 0")


def measure(
    setting: Setting,
    problem: Problem | None = None,
    *,
    compute_s: float | None = None,
    costs: Costs | None = None,
    link: VirtualLink | None = None,
) -> Profile:
    """The profile of a setting on this machine; values that are not given are cached or measured.

    Measuring takes about a second, and longer if `problem` is not given and has to be loaded.
    """
    if compute_s is None or costs is None:
        known = _known(setting, problem)
        compute_s = known.compute_s if compute_s is None else compute_s
        costs = known.costs if costs is None else costs
    return Profile(compute_s=compute_s, costs=costs, link=link or VirtualLink())


def _known(setting: Setting, problem: Problem | None) -> _ProfileEntry:
    optimizer = f"{setting.optimizer}, momentum {setting.momentum:g}, decay {setting.weight_decay:g}"
    key = f"{fingerprint()}; {setting.model}, {setting.data}, batch {setting.batch}, {optimizer}"
    file = _cache_file()
    known = _read(file)
    entry = known.get(key)
    if entry is None:
        from echelon.simulate.learner import Problem

        entry = _measured(setting, problem or Problem(setting))
        if file is not None:
            with contextlib.suppress(ConfigError):
                write_whole(file, msgspec.json.format(msgspec.json.encode({**known, key: entry})))
    return entry


class _ProfileEntry(msgspec.Struct, frozen=True):
    """The measurements of one machine with one model."""

    compute_s: float
    costs: Costs


def _measured(setting: Setting, problem: Problem) -> _ProfileEntry:
    import torch

    from echelon.simulate.learner import Learner

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            learner = Learner(problem, 0)
            flat, indices = learner.initial(), torch.arange(setting.batch) % problem.samples
            compute_s = _median_s(lambda: learner.gradient_at(flat, indices))
            gradient, _ = learner.gradient_at(flat, indices)
            return _ProfileEntry(compute_s, _server_costs(setting, flat, gradient))
    finally:
        torch.set_num_threads(threads)


def _server_costs(setting: Setting, flat: Any, gradient: Any) -> Costs:
    from echelon.simulate.learner import optimizer_for
    from echelon.sync.families.serve import WeightedPush
    from echelon.sync.families.shard import Push, ShardState
    from echelon.sync.policies.asynchronous import Async

    shard = ShardState(Async(), flat, [flat], optimizer_for(setting, flat).step)

    def push(step: int) -> None:
        shard.push(0, step, Push(kind="gradient", flat=gradient.clone(), used=(True,)))

    def update(count: int) -> None:
        for step in range(count):
            push(step)
        shard.apply([WeightedPush(0, step, 1 / count) for step in range(count)])

    one_s, three_s = _median_s(lambda: update(1)), _median_s(lambda: update(3))
    queue_s = max((three_s - one_s) / 2, 0.0)
    hand_s = _median_s(lambda: shard.read(0).clone())
    return Costs(queue_s=queue_s, apply_s=max(one_s - queue_s, 0.0), hand_s=hand_s)


def _median_s(action: Callable[[], object]) -> float:
    """The median time of an action, without the first call, which warms up."""
    action()
    seconds = []
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begun)
    return max(statistics.median(seconds), 1e-9)


def _cache_file() -> Path | None:
    given = os.environ.get("ECHELON_CACHE", "")
    try:
        folder = Path(given).expanduser() if given else cache_folder()
    except RuntimeError:  # a user without a home folder
        return None
    return folder / "simulate.json"


def _read(file: Path | None) -> dict[str, _ProfileEntry]:
    """The file's valid entries."""
    if file is None:
        return {}
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    entries = {}
    for key, entry in found.items():
        with contextlib.suppress(msgspec.MsgspecError, ConfigError):
            entries[key] = msgspec.convert(entry, _ProfileEntry)
    return entries
