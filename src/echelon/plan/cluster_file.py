"""Reads and writes cluster files: the TOML that says what machines, links and job there are.

    known = "measured by echelon probe"
    reference = "3.1ms"         # what a fixed small step takes at speed 1; for jobs measured elsewhere

    [[node]]
    name = "a"                  # with count: a-0, a-1, ...
    site = "east"               # nodes of a site share a switch; main if omitted
    speed = 1.0                 # how fast it computes; 0.25 takes four times as long
    cores = 0.4
    memory = "16GiB"            # what a worker may use; unlimited if omitted
    up = "1gbit"                # its link to the switch, each way; unlimited if omitted
    down = "1gbit"              # or link = "1gbit" for both
    latency = "0.1ms"           # one way between node and switch
    reduce = "4GB/s"            # how fast it adds received bytes
    cache = "2MiB"              # the second-level cache
    clock_offset = "-1.2ms"     # its clock minus the first node's

    [[uplink]]
    between = ["east", "west"]
    rate = "100mbit"            # each way, shared by all traffic across it; 0bit: nothing passes
    latency = "5ms"

    [job]                       # optional; costs are those of a node with speed 1
    name = "lenet"
    batch = 64                  # of all workers together
    fixed = "1.2ms"             # forward and backward: fixed + share * per_sample
    per_sample = "30us"
    apply = "0.2ms"             # the optimizer
    memory = "300MiB"           # model, gradients, optimizer
    memory_per_sample = "1MiB"
    exchanges = 0               # one forward and one backward for each BatchNorm layer

    [[job.layer]]               # in the order of the model
    name = "fc1"
    gradients = "120KiB"
    ready_at = 0.7              # when backward has them, as a fraction of forward and backward
    factors = [120, 256]        # outputs and inputs, if its gradient can travel as factors
    rows = 1

    [[job.cost]]                # of a node that was measured itself; it comes before speed
    node = "a-1"
    fixed = "5ms"
    per_sample = "120us"
    apply = "0.8ms"

    [measured]                  # what the figures above were found from; read by nobody

Every mistake is a ConfigError that names the file, the table and the key.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.cluster.lab.ends import check_joined, ends_of
from echelon.config.registry import build_options
from echelon.config.toml_text import read_toml
from echelon.config.units import duration_s, rate_bytes_per_s, size_bytes
from echelon.errors import ConfigError, UnknownName
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.topology import Node, Topology, Uplink

UNLIMITED = "unlimited"
_HEAD = """\
# Machines, links and the cost of a job, for `echelon plan --cluster FILE`. Edit what you know better.
# Rates: 1gbit, 120MB/s, each way; durations: 5ms, 2s; sizes: 64MB, 16GiB. What is omitted is unlimited.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """What a cluster file says; without a job, any job can be planned on it."""

    topology: Topology
    job: JobProfile | None = None


def read_cluster(text: str, file: str) -> ClusterFile:
    """Parse a cluster file's text; `file` appears in errors."""
    try:
        tables = read_toml(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = at.group(1) if at else max(1, text.count("\n"))  # without a line, the text ends too early
        where = f"{file}, line {line}"
        raise ConfigError(f"not valid TOML: {error}", where=where, fix="correct that line") from None
    _check_lists(tables, ("node", "uplink"), file, "")
    top = build_options(_ClusterTables, tables, where=file)
    nodes = _nodes(top.node, file)
    sites = list(dict.fromkeys(node.site for node in nodes))
    reference_s = _duration(top.reference, f"{file}, reference")
    uplinks = _uplinks(top.uplink, sites, file)
    topology = Topology(nodes=nodes, uplinks=uplinks, known=top.known, reference_s=reference_s)
    job = None if top.job is None else _job(top.job, [node.name for node in nodes], file)
    return ClusterFile(topology=topology, job=job and replace(job, reference_s=reference_s))


def write_cluster(
    topology: Topology,
    job: JobProfile | None = None,
    *,
    measured: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> str:
    """A cluster file's text, which `read_cluster` reads back with six digits.

    `measured` are tables of raw measurements, each a list of rows; they are kept for people.
    """
    lines = [_HEAD + f"known = {_quoted(topology.known)}"]
    if topology.reference_s:
        lines += _quoted_lines([("reference", _shown_s(topology.reference_s))])
    for node in topology.nodes:
        lines += ["", "[[node]]", *_node_lines(node)]
    for uplink in topology.uplinks:
        ends = ", ".join(_quoted(site) for site in uplink.between)
        rate = [("rate", _shown_rate(uplink.bytes_per_s))] if uplink.bytes_per_s < math.inf else []
        latency = [("latency", _shown_s(uplink.latency_s))]
        lines += ["", "[[uplink]]", f"between = [{ends}]", *_quoted_lines(rate + latency)]
    if job is not None:
        lines += _job_lines(job)
    if measured:
        lines += ["", "[measured]  # what the figures above were found from; changing it changes nothing"]
        for name, rows in measured.items():
            lines += [f"{name} = [", *(f"  [{', '.join(map(_quoted, row))}]," for row in rows), "]"]
    return "\n".join(lines) + "\n"


def show_rate(bytes_per_s: float) -> str:
    """A rate as cluster files have it: '100mbit'; 'unlimited' for infinity."""
    return UNLIMITED if math.isinf(bytes_per_s) else _shown_rate(bytes_per_s)


# What a file may hold. Quantities are `Any`: their own parsers give better errors than a type would.


@dataclass(frozen=True, kw_only=True)
class _ClusterTables:
    known: str = ""
    reference: Any = 0.0
    node: list[dict[str, Any]] = field(default_factory=list)
    uplink: list[dict[str, Any]] = field(default_factory=list)
    job: dict[str, Any] | None = None
    measured: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _NodeTable:
    name: str
    count: int | None = None
    site: str = "main"
    speed: float = 1.0
    cores: float = 1.0
    memory: Any = None
    link: Any = None
    up: Any = None
    down: Any = None
    latency: Any = 0.0
    reduce: Any = "4GB/s"
    cache: Any = 0
    clock_offset: Any = 0.0


@dataclass(frozen=True, kw_only=True)
class _UplinkTable:
    between: list[str]
    rate: Any = None
    latency: Any = 0.0


@dataclass(frozen=True, kw_only=True)
class _JobTable:
    name: str
    batch: int
    fixed: Any
    per_sample: Any
    apply: Any = 0.0
    memory: Any = 0
    memory_per_sample: Any = 0
    exchanges: int = 0
    layer: list[dict[str, Any]] = field(default_factory=list)
    cost: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _LayerTable:
    name: str
    gradients: Any
    ready_at: float = 1.0
    factors: list[int] = field(default_factory=lambda: [0, 0])
    rows: int = 1


@dataclass(frozen=True, kw_only=True)
class _CostTable:
    node: str
    fixed: Any
    per_sample: Any
    apply: Any = 0.0


def _nodes(tables: Iterable[Mapping[str, Any]], file: str) -> tuple[Node, ...]:
    nodes: dict[str, Node] = {}
    for number, given in enumerate(tables, start=1):
        where = f"{file}, [[node]] {number}"
        table = build_options(_NodeTable, given, where=where)
        _check_name(table.name, f"{where}, name")
        _check_name(table.site, f"{where}, site")
        if table.count is not None and table.count < 1:
            raise ConfigError(
                f"count cannot be {table.count}", where=f"{where}, count", fix="give 1 or more"
            )
        names = [table.name] if table.count is None else [f"{table.name}-{at}" for at in range(table.count)]
        for name in names:
            if name in nodes:
                raise ConfigError(f"two nodes are named {name!r}", where=f"{where}, name", fix="rename one")
            nodes[name] = _node(name, table, where)
    if not nodes:
        raise ConfigError("the cluster has no nodes", where=file, fix="describe each with a [[node]] table")
    return tuple(nodes.values())


def _node(name: str, table: _NodeTable, where: str) -> Node:
    return Node(
        name=name,
        site=table.site,
        speed=_positive(table.speed, "a speed", f"{where}, speed"),
        cores=_positive(table.cores, "a number of cores", f"{where}, cores"),
        memory_bytes=_size(table.memory, f"{where}, memory", otherwise=math.inf),
        up_bytes_per_s=_rate(table.link if table.up is None else table.up, f"{where}, up"),
        down_bytes_per_s=_rate(table.link if table.down is None else table.down, f"{where}, down"),
        latency_s=_duration(table.latency, f"{where}, latency"),
        reduce_bytes_per_s=_positive(_rate(table.reduce, f"{where}, reduce"), "a rate", f"{where}, reduce"),
        cache_bytes=round(_size(table.cache, f"{where}, cache", otherwise=0.0)),
        clock_offset_s=_signed_duration(table.clock_offset, f"{where}, clock_offset"),
    )


def _uplinks(tables: Iterable[Mapping[str, Any]], sites: list[str], file: str) -> tuple[Uplink, ...]:
    found: list[Uplink] = []
    for number, given in enumerate(tables, start=1):
        where = f"{file}, [[uplink]] {number}"
        table = build_options(_UplinkTable, given, where=where)
        ends = ends_of(table.between, sites, [other.between for other in found], where)
        found.append(
            Uplink(
                between=ends,
                bytes_per_s=_rate(table.rate, f"{where}, rate"),
                latency_s=_duration(table.latency, f"{where}, latency"),
            )
        )
    check_joined(
        sites, [uplink.between for uplink in found], file, otherwise='; rate = "0bit" if nothing passes'
    )
    return tuple(found)


def _job(given: Mapping[str, Any], nodes: Sequence[str], file: str) -> JobProfile:
    where = f"{file}, [job]"
    _check_lists(given, ("layer", "cost"), file, "job.")
    table = build_options(_JobTable, given, where=where)
    if table.batch < 1:
        raise ConfigError(f"batch cannot be {table.batch}", where=f"{where}, batch", fix="give 1 or more")
    if table.exchanges < 0:
        raise ConfigError(
            f"exchanges cannot be {table.exchanges}", where=f"{where}, exchanges", fix="give 0 or more"
        )
    costs: dict[str, ComputeCost] = {}
    for number, each in enumerate(table.cost, start=1):
        at = f"{file}, [[job.cost]] {number}"
        own = build_options(_CostTable, each, where=at)
        if own.node not in nodes:
            raise UnknownName("node", own.node, nodes, where=f"{at}, node")
        if own.node in costs:
            raise ConfigError(f"{own.node} has two costs", where=f"{at}, node", fix="remove one of them")
        costs[own.node] = _cost(own, at)
    return JobProfile(
        name=table.name,
        batch=table.batch,
        cost=_cost(table, where),
        layers=tuple(
            _layer(each, f"{file}, [[job.layer]] {number}")
            for number, each in enumerate(table.layer, start=1)
        ),
        base_bytes=_size(table.memory, f"{where}, memory", otherwise=0.0),
        sample_bytes=_size(table.memory_per_sample, f"{where}, memory_per_sample", otherwise=0.0),
        exchanges=table.exchanges,
        costs=costs,
    )


def _cost(table: _JobTable | _CostTable, where: str) -> ComputeCost:
    return ComputeCost(
        fixed_s=_duration(table.fixed, f"{where}, fixed"),
        per_sample_s=_duration(table.per_sample, f"{where}, per_sample"),
        apply_s=_duration(table.apply, f"{where}, apply"),
    )


def _layer(given: Mapping[str, Any], where: str) -> Layer:
    table = build_options(_LayerTable, given, where=where)
    if not 0 <= table.ready_at <= 1:
        raise ConfigError(
            f"ready_at cannot be {table.ready_at}",
            where=f"{where}, ready_at",
            fix="give a fraction from 0 to 1",
        )
    if len(table.factors) != 2 or min(table.factors) < 0:
        raise ConfigError(
            f"factors cannot be {table.factors}",
            where=f"{where}, factors",
            fix="give the layer's outputs and inputs, such as [120, 256], or leave it out",
        )
    if table.rows < 1:
        raise ConfigError(f"rows cannot be {table.rows}", where=f"{where}, rows", fix="give 1 or more")
    return Layer(
        name=table.name,
        size_bytes=round(_size(table.gradients, f"{where}, gradients", otherwise=0.0)),
        ready_at=table.ready_at,
        factors=(table.factors[0], table.factors[1]),
        rows=table.rows,
    )


def _check_lists(tables: Mapping[str, Any], keys: Sequence[str], file: str, above: str) -> None:
    for key in keys:
        if isinstance(tables.get(key), dict):
            raise ConfigError(
                f"[{above}{key}] must be a list of tables",
                where=f"{file}, {above}{key}",
                fix=f"write [[{above}{key}]] with double brackets, once for each",
            )


def _check_name(name: str, where: str) -> None:
    if not name or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"{name!r} is not a valid name", where=where, fix="use printable characters, such as node-a"
        )


def _positive(value: float, what: str, where: str) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{value:g} is not {what}", where=where, fix="give a number above 0")
    return value


def _rate(value: Any, where: str) -> float:
    if value is None or value == UNLIMITED:
        return math.inf
    if not isinstance(value, str):
        wanted = "a rate such as 100mbit or 12.5MB/s"
        raise ConfigError(f"{value!r} is not {wanted}", where=where, fix=f"write {wanted}, in quotes")
    return rate_bytes_per_s(value, where=where)


def _size(value: Any, where: str, *, otherwise: float) -> float:
    if value is None:
        return otherwise
    if value == UNLIMITED and math.isinf(otherwise):
        return math.inf
    wanted = "a size such as 64MB or 1GiB"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{value!r} is not {wanted}", where=where, fix=f"write {wanted}, in quotes")
    if isinstance(value, str):
        return float(size_bytes(value, where=where))
    return _from_zero(value, wanted, where)


def _duration(value: Any, where: str) -> float:
    wanted = "a duration such as 5ms or 2s"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{value!r} is not {wanted}", where=where, fix=f"write {wanted}, in quotes")
    return _from_zero(duration_s(value, where=where), wanted, where)


def _signed_duration(value: Any, where: str) -> float:
    if isinstance(value, str) and value.strip().startswith("-"):
        return -_duration(value.strip()[1:], where)
    if isinstance(value, int | float) and value < 0:
        return -_duration(-value, where)
    return _duration(value, where)


def _from_zero(value: float, wanted: str, where: str) -> float:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{value:g} is not {wanted}", where=where, fix="give 0 or more")
    return float(value)


def _node_lines(node: Node) -> list[str]:
    limits: list[tuple[str, float, Callable[[float], str]]] = [
        ("memory", node.memory_bytes, _shown_size),
        ("up", node.up_bytes_per_s, _shown_rate),
        ("down", node.down_bytes_per_s, _shown_rate),
    ]
    quantities = [(key, show(value)) for key, value, show in limits if value < math.inf]
    quantities += [("latency", _shown_s(node.latency_s)), ("reduce", _shown_rate(node.reduce_bytes_per_s))]
    if node.cache_bytes:
        quantities.append(("cache", _exact_size(node.cache_bytes)))
    if node.clock_offset_s:
        quantities.append(("clock_offset", _shown_s(node.clock_offset_s)))
    return [
        f"name = {_quoted(node.name)}",
        f"site = {_quoted(node.site)}",
        f"speed = {_number(node.speed)}",
        f"cores = {_number(node.cores)}",
        *_quoted_lines(quantities),
    ]


def _job_lines(job: JobProfile) -> list[str]:
    lines = ["", "[job]", f"name = {_quoted(job.name)}", f"batch = {job.batch}", *_cost_lines(job.cost)]
    memory = [("memory", job.base_bytes), ("memory_per_sample", job.sample_bytes)]
    lines += _quoted_lines([(key, _shown_size(size)) for key, size in memory])
    lines.append(f"exchanges = {job.exchanges}")
    for layer in job.layers:
        lines += ["", "[[job.layer]]", f"name = {_quoted(layer.name)}"]
        lines += [f'gradients = "{_exact_size(layer.size_bytes)}"', f"ready_at = {_number(layer.ready_at)}"]
        if layer.factors != (0, 0):
            lines += [f"factors = [{layer.factors[0]}, {layer.factors[1]}]", f"rows = {layer.rows}"]
    for node, cost in job.costs.items():
        lines += ["", "[[job.cost]]", f"node = {_quoted(node)}", *_cost_lines(cost)]
    return lines


def _cost_lines(cost: ComputeCost) -> list[str]:
    named = [("fixed", cost.fixed_s), ("per_sample", cost.per_sample_s), ("apply", cost.apply_s)]
    return _quoted_lines([(key, _shown_s(seconds)) for key, seconds in named])


def _quoted_lines(named: Iterable[tuple[str, str]]) -> list[str]:
    return [f'{key} = "{value}"' for key, value in named]


def _shown_rate(bytes_per_s: float) -> str:
    return _scaled(bytes_per_s * 8, (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("bit", 1.0)))


def _shown_size(count: float) -> str:
    return _scaled(count, (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0)))


def _exact_size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count and count % scale == 0:
            return f"{count // scale}{unit}"
    return f"{count}B"


def _shown_s(seconds: float) -> str:
    sign = "-" if seconds < 0 else ""
    return sign + _scaled(abs(seconds), (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)))


def _scaled(value: float, units: Sequence[tuple[str, float]]) -> str:
    for unit, scale in units:
        if value >= scale or unit == units[-1][0]:
            break
    return f"{_digits(value / scale)}{unit}"


def _digits(value: float) -> str:
    return f"{value:.6g}"


def _number(value: float) -> str:
    """A float as TOML writes it: with a point."""
    text = _digits(value)
    return text if any(mark in text for mark in ".en") else f"{text}.0"


def _quoted(text: str) -> str:
    kept = "".join(mark if mark.isprintable() else " " for mark in text)
    return '"' + kept.replace("\\", "\\\\").replace('"', '\\"') + '"'
