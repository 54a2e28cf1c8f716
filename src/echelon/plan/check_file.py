"""What contradicts itself in a plan that was edited by hand? Everything at once, each with its line. Pure.

The text of the plan and what is known about the place where it is to run go in; contradictions come out.
Names of strategies are checked by the functions in `PlanSurroundings.strategies`, because the registries
that know them are not part of this room.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from echelon.config.call import parse_call
from echelon.config.registry import convert
from echelon.config.toml_text import read_toml
from echelon.config.units import show_bytes, size_bytes
from echelon.errors import ConfigError, nearest
from echelon.plan.job import JobProfile
from echelon.plan.plan import Plan, WorkerPlan
from echelon.plan.toml_lines import Path, line_of, lines_of

Builder = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Contradiction:
    """What is wrong on a line of a plan's file, and what to do."""

    line: int
    message: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSurroundings:
    """What is known about the place where a plan is to run.

    place         as errors call it: `lab two-sites`, `--hosts`
    nodes         how many workers each node may have, by name; empty if any name will do
    memory_bytes  what a worker may use on each node, as far as it is known
    job           what a share needs, if it is known
    strategies    functions that raise ConfigError for a wrong collective, codec or sync policy
    with_servers  whether a sync policy needs servers to keep parameters
    """

    place: str = ""
    nodes: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    job: JobProfile | None = None
    strategies: Mapping[str, Builder] = field(default_factory=dict)
    with_servers: Callable[[str], bool] | None = None


def contradictions(text: str, around: PlanSurroundings) -> tuple[Contradiction, ...]:
    """Everything that is wrong with a plan's text, in the order of lines."""
    try:
        values = read_toml(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = int(at.group(1)) if at else max(1, text.count("\n"))  # without a line, it ends too early
        return (Contradiction(line=line, message=f"not valid TOML: {error}", fix="correct that line"),)
    return tuple(sorted(set(_PlanCheck(values, lines_of(text), around).all())))


def listed(found: Sequence[Contradiction], file: str) -> ConfigError:
    """All contradictions as one error."""
    lines = [f"line {one.line}: {one.message}" + (f" ({one.fix})" if one.fix else "") for one in found]
    many = f"the plan contradicts itself in {len(found)} places" if len(found) > 1 else "the plan is wrong"
    return ConfigError("\n  ".join([f"{many}:", *lines]), where=file, fix="correct these lines")


class _PlanCheck:
    def __init__(self, values: dict[str, Any], lines: Mapping[Path, int], around: PlanSurroundings) -> None:
        self._values = values
        self._lines = lines
        self._around = around
        self._bad: set[Path] = set()  # what has the wrong type: it is left out of further checks
        self._workers: list[dict[str, Any]] = []

    def all(self) -> Iterator[Contradiction]:
        """Every contradiction: first of single values, then between values."""
        yield from self._types()
        given = self._values.get("workers")
        if not given or ("workers",) in self._bad:
            if ("workers",) not in self._bad:
                yield self._at((), "the plan has no workers", "add workers = [ { rank = 0, node = ... } ]")
            return
        self._workers = given
        yield from self._ranks()
        yield from self._nodes()
        yield from self._shares()
        yield from self._groups()
        yield from self._strategies()
        yield from self._servers()

    def _at(self, path: Path, message: str, fix: str = "") -> Contradiction:
        return Contradiction(line=line_of(self._lines, path), message=message, fix=fix)

    # Single values

    def _types(self) -> Iterator[Contradiction]:
        yield from self._fields(Plan, self._values, (), skip=("workers",))
        workers = self._values.get("workers")
        if workers is None:
            return
        if not isinstance(workers, list) or not all(isinstance(worker, dict) for worker in workers):
            self._bad.add(("workers",))
            yield self._at(
                ("workers",), "workers is not a list of tables", "write { rank = 0, node = ... } for each"
            )
            return
        for number, worker in enumerate(workers):
            yield from self._fields(WorkerPlan, worker, ("workers", number))
            if "node" not in worker:
                yield self._at(("workers", number), "the worker has no node", 'add node = "..."')

    def _fields(
        self, kind: type[Any], values: Mapping[str, Any], above: Path, skip: Sequence[str] = ()
    ) -> Iterator[Contradiction]:
        """Unknown keys, and values of a wrong type."""
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind)]
        for key, value in values.items():
            path = (*above, key)
            if key not in names:
                near = nearest(key, names)
                hint = f"did you mean {near}?" if near else f"known: {', '.join(names)}"
                yield self._at(path, f"unknown key {key!r}", hint)
            elif key not in skip:
                try:
                    convert(value, hints[key], where="")
                except ConfigError as error:
                    self._bad.add(path)
                    yield self._at(path, f"{key} is {error.message}", error.fix)
                except msgspec.ValidationError as error:
                    self._bad.add(path)
                    yield self._at(path, f"{key}: {error}")

    # Between values

    def _of(self, key: str, default: Any) -> list[tuple[int, Any]]:
        """The values of a key of all workers, by their place in the list, but for those of a wrong type."""
        return [
            (number, worker.get(key, default))
            for number, worker in enumerate(self._workers)
            if ("workers", number, key) not in self._bad
        ]

    def _ranks(self) -> Iterator[Contradiction]:
        ranks = [(number, worker.get("rank", number)) for number, worker in enumerate(self._workers)]
        ranks = [(number, rank) for number, rank in ranks if ("workers", number, "rank") not in self._bad]
        count = len(self._workers)
        seen: dict[int, int] = {}
        for number, rank in ranks:
            path = ("workers", number, "rank")
            if rank in seen:
                first = line_of(self._lines, ("workers", seen[rank], "rank"))
                yield self._at(
                    path, f"rank {rank} is given twice, first on line {first}", self._free(ranks, count)
                )
            elif not 0 <= rank < count:
                what = f"rank {rank} does not exist: {count} workers have ranks 0 to {count - 1}"
                yield self._at(path, what, self._free(ranks, count))
            seen.setdefault(rank, number)

    @staticmethod
    def _free(ranks: Sequence[tuple[int, int]], count: int) -> str:
        left = sorted(set(range(count)) - {rank for _, rank in ranks})
        return f"nobody has rank {left[0]}" if left else ""

    def _nodes(self) -> Iterator[Contradiction]:
        known = self._around.nodes
        if not known:
            return
        here = f"in {self._around.place}" if self._around.place else "here"
        placed: Counter[str] = Counter()
        for number, node in self._of("node", None):
            path = ("workers", number, "node")
            if node is None:
                continue
            placed[node] += 1
            if node not in known:
                yield self._at(path, f"there is no node {node!r} {here}", _nearest(node, known))
            elif placed[node] > known[node]:
                most = f"{known[node]:.0f} worker{'s' if known[node] > 1 else ''}"
                yield self._at(path, f"{node} has place for {most}", "give it more slots, or another node")
        servers = self._values.get("servers", []) if ("servers",) not in self._bad else []
        for number, node in enumerate(servers):
            if node not in known:
                yield self._at(
                    ("servers", number), f"there is no node {node!r} {here}", _nearest(node, known)
                )

    def _shares(self) -> Iterator[Contradiction]:
        weights = self._of("weight", 1.0)
        for number, weight in weights:
            if not 0 < weight < math.inf:
                yield self._at(
                    ("workers", number, "weight"),
                    f"the weight is {weight:g}: the worker would have nothing to compute"
                    if not weight > 0
                    else "the weight is infinite: nothing would be left for others",
                    "give it a positive number, or leave the worker out",
                )
        yield from self._speeds()
        batch = self._values.get("batch")
        if batch is None or ("batch",) in self._bad:
            return
        count = len(self._workers)
        if batch < count:
            yield self._at(
                ("batch",),
                f"a batch of {batch} cannot be shared by {count} workers",
                f"use a batch of at least {count}, or fewer workers",
            )
        total = sum(weight for _, weight in weights)
        if len(weights) == count and math.isfinite(total) and not math.isclose(total, batch):
            yield self._at(
                ("batch",),
                f"the weights sum to {total:g}, and the batch is {batch}",
                f"change weights or batch until they agree, or leave batch out: then weights {_PARTS}",
            )
        yield from self._memory(weights)

    def _speeds(self) -> Iterator[Contradiction]:
        for number, speed in self._of("speed", 1.0):
            if not 0 < speed <= 1:
                what = f"a speed of {speed:g} cannot be emulated"
                yield self._at(("workers", number, "speed"), what, "give a number in (0, 1]")
        for number, threads in self._of("threads", 1):
            if threads < 1:
                yield self._at(("workers", number, "threads"), f"{threads} threads", "give at least 1")

    def _memory(self, weights: Sequence[tuple[int, float]]) -> Iterator[Contradiction]:
        job = self._around.job
        try:
            base, each = (job.base_bytes, job.sample_bytes) if job is not None else self._needs()
            own = {number: text for number, text in self._of("memory", "") if text}
            limits = {number: float(size_bytes(text)) for number, text in own.items()}
        except ConfigError as error:
            yield self._at(("memory",), error.message, error.fix)
            return
        for number, share in weights:
            node = self._workers[number].get("node", "")
            there = min(self._around.memory_bytes.get(node, math.inf), limits.get(number, math.inf))
            needs = base + share * each
            if needs > there:
                fits = math.floor((there - base) / each) if each else 0
                fix = f"give it at most {fits} samples" if fits > 0 else "leave the node out"
                yield self._at(
                    ("workers", number, "weight"),
                    f"{share:g} samples need {show_bytes(needs)}, {node} has {show_bytes(there)}",
                    fix,
                )

    def _needs(self) -> tuple[float, float]:
        """What the file says a worker needs, and each sample; nothing if it does not say."""
        said = self._values.get("memory")
        if not isinstance(said, dict) or ("memory",) in self._bad:
            return 0.0, 0.0
        return float(size_bytes(said["worker"])), float(size_bytes(said.get("sample", "0B")))

    def _groups(self) -> Iterator[Contradiction]:
        groups = self._values.get("groups", [])
        if ("groups",) in self._bad or not groups:
            return
        count = len(self._workers)
        seen: dict[int, Path] = {}
        for at, group in enumerate(groups):
            if not group:
                yield self._at(("groups", at), f"group {at} has no workers", "remove it")
            for number, rank in enumerate(group):
                path: Path = ("groups", at, number)
                if rank in seen:
                    what = (
                        f"rank {rank} is in two groups" if seen[rank][1] != at else f"rank {rank} is twice"
                    )
                    yield self._at(path, f"{what} of groups", "name every worker once")
                elif not 0 <= rank < count:
                    yield self._at(
                        path, f"there is no rank {rank} for group {at}", f"ranks are 0 to {count - 1}"
                    )
                seen.setdefault(rank, path)
        missing = sorted(set(range(count)) - set(seen))
        if missing:
            who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
            are = "is" if len(missing) == 1 else "are"
            yield self._at(("groups",), f"{who} {are} in no group", "name every worker once")

    def _strategies(self) -> Iterator[Contradiction]:
        delay = self._around.strategies.get("delay")
        for number, text in self._of("delay", "") if delay is not None else ():
            try:
                _ = delay(text) if delay is not None and text else None
            except ConfigError as error:
                yield self._at(("workers", number, "delay"), error.message, error.fix)
        for key, build in self._around.strategies.items():
            value = self._values.get(key)
            if value is None or (key,) in self._bad:
                continue
            try:
                build(value)
            except ConfigError as error:
                yield self._at((key,), error.message, error.fix)
        yield from self._sizes()

    def _sizes(self) -> Iterator[Contradiction]:
        """The sizes of a hierarchical collective, against the workers and against the groups."""
        text = self._values.get("collective", "auto")
        try:
            call = parse_call(text) if isinstance(text, str) else None
        except ConfigError:
            return  # said already, by the function that builds it
        sizes = call.options.get("sizes") if call is not None and call.name == "hierarchical" else None
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            return
        numbers = [size for size in sizes if isinstance(size, int)]
        count = len(self._workers)
        if sum(numbers) != count:
            yield self._at(
                ("collective",),
                f"groups of {numbers} are {sum(numbers)} workers, but there are {count}",
                f"give sizes that sum to {count}, or leave them out",
            )
        groups = self._values.get("groups", [])
        if ("groups",) not in self._bad and groups and [len(group) for group in groups] != numbers:
            yield self._at(
                ("collective",),
                f"the collective has groups of {numbers}, `groups` has {[len(group) for group in groups]}",
                "make both the same",
            )

    def _servers(self) -> Iterator[Contradiction]:
        servers = self._values.get("servers", [])
        if ("servers",) in self._bad:
            return
        sync = self._values.get("sync", "full")
        collective = self._values.get("collective", "auto")
        if servers and len(self._workers) == 1:
            yield self._at(("servers",), "there is nothing to serve with one worker", "remove servers")
        keeps = self._around.with_servers
        if keeps is None or not isinstance(sync, str) or ("sync",) in self._bad:
            return
        try:
            kept = keeps(sync)
        except ConfigError:
            return  # said already
        if servers and not kept and collective not in ("auto", "ps"):
            yield self._at(
                ("servers",),
                f"sync {sync} with collective {collective} has no use for servers",
                "remove servers, or set collective to ps",
            )
        if kept and not servers and len(self._workers) > 1:
            yield self._at(("sync",), f"sync {sync} needs a server", 'add servers = ["..."] with a node')


_PARTS = "are parts relative to each other"


def _nearest(name: str, known: Mapping[str, float]) -> str:
    near = nearest(name, known)
    names = ", ".join(list(known)[:8]) + (", ..." if len(known) > 8 else "")
    return f"did you mean {near}?" if near else f"nodes: {names}"
