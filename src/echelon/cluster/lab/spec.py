"""Reads and checks lab files: the TOML that describes an emulated cluster.

    name = "two-sites"      # the file's name if omitted

    [[node]]
    name = "a"              # with count: a-0, a-1, ...
    count = 4
    site = "east"           # nodes of a site share a switch
    cpu = 0.4               # in cores; unlimited if omitted
    link = "1gbit"          # each way; unlimited if omitted
    latency = "1ms"         # one way between node and switch, if the kernel has netem
    jitter = "2ms"          # how much later or earlier than that
    loss = "1%"             # the fraction that is lost, or a number: 0.01

    [[uplink]]
    between = ["east", "west"]
    rate = "100mbit"        # each way, shared by all traffic across it
    latency = "5ms"         # jitter and loss, too

    [[fault]]
    at_s = 5                # or at_step = 100
    action = "kill"         # kill stop continue slow rate jitter loss cut restore
    node = "a-2"            # or link = "east/west", for rate, jitter, loss, cut and restore
    cpu = 0.1               # for slow
    rate = "10mbit"         # for rate; likewise jitter and loss

Every mistake is a ConfigError that names the file, the table and the key.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from echelon.cluster.lab.ends import check_joined, ends_of
from echelon.config.registry import build_options
from echelon.config.toml_text import read_toml
from echelon.config.units import duration_s, rate_bytes_per_s
from echelon.errors import ConfigError, UnknownName

Action = Literal["kill", "stop", "continue", "slow", "rate", "jitter", "loss", "cut", "restore"]
ACTIONS: tuple[str, ...] = get_args(Action)

# The kernel's limits: a quota is at least 1 ms, a period at most 1 s.
SLOWEST_CPU = 0.001
SLOWEST_BYTES_PER_S = 125.0
MOST_NODES = 256

_FILES = Path(__file__).parent / "files"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
_LINK_ACTIONS = ("rate", "jitter", "loss", "cut", "restore")
# The value that an action needs, and how it is written.
_VALUE_OF = {
    "cpu": ("slow", "cpu = 0.1"),
    "rate": ("rate", 'rate = "10mbit"'),
    "jitter": ("jitter", 'jitter = "5ms"'),
    "loss": ("loss", 'loss = "1%"'),
}
_MOST_LOSS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One emulated machine. None means unlimited."""

    name: str
    site: str
    cpu: float | None = None
    link_bytes_per_s: float | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkSpec:
    """The link between the switches of two sites; all traffic across it shares its rate."""

    between: tuple[str, str]
    rate_bytes_per_s: float | None = None
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0

    @property
    def name(self) -> str:
        """Its name in faults: 'east/west'."""
        return "/".join(self.between)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """A fault to inject once. Exactly one of `at_s` and `at_step` is set.

    Exactly one of `node` and `link` is set; for rate, jitter, loss and cut a node means its own link.
    """

    action: Action
    at_s: float | None = None
    at_step: int | None = None
    node: str | None = None
    link: str | None = None
    cpu: float | None = None
    rate_bytes_per_s: float | None = None
    jitter_s: float | None = None
    loss: float | None = None

    @property
    def target(self) -> str:
        """The node or uplink that the fault affects."""
        return self.node or self.link or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """A whole emulated cluster, with each node listed and every reference checked."""

    name: str
    nodes: tuple[NodeSpec, ...]
    uplinks: tuple[UplinkSpec, ...] = ()
    faults: tuple[FaultSpec, ...] = ()

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites, in the order in which nodes name them."""
        return tuple(dict.fromkeys(node.site for node in self.nodes))

    @property
    def wants_latency(self) -> bool:
        """Whether any link has a latency."""
        return any(n.latency_s > 0 for n in self.nodes) or any(u.latency_s > 0 for u in self.uplinks)

    @property
    def varies(self) -> bool:
        """Whether any link has jitter or loss, or gets some by a fault."""
        links: tuple[NodeSpec | UplinkSpec, ...] = (*self.nodes, *self.uplinks)
        given = any(link.jitter_s > 0 or link.loss > 0 for link in links)
        return given or any(fault.action in ("jitter", "loss") for fault in self.faults)

    @property
    def link_names(self) -> tuple[str, ...]:
        """The names of all links: of nodes, then of uplinks."""
        return (*(node.name for node in self.nodes), *(uplink.name for uplink in self.uplinks))

    def index_of(self, node: str) -> int:
        """A node's index in the order of the file; UnknownName names the nearest."""
        for index, known in enumerate(self.nodes):
            if known.name == node:
                return index
        raise UnknownName("node", node, [n.name for n in self.nodes], where=f"lab {self.name}")

    def notes(self, *, cores: int, netem: bool, kept: bool = False) -> tuple[str, ...]:
        """Warnings about this cluster on a machine with `cores` cores, with netem or without it."""
        out = []
        if self.varies and not netem:
            when = "; only while `echelon lab exec` runs, for a lab that is kept" if kept else ""
            out.append(
                "jitter is emulated by varying rates, loss by short cuts, because this kernel has no netem"
                + when
            )
        if self.wants_latency and not netem:
            out.append(
                "latency is not emulated, because this kernel has no netem; rates and CPU speeds are"
            )
        total = sum(node.cpu for node in self.nodes if node.cpu is not None)
        if total > cores:
            out.append(
                f"the CPU speeds add up to {total:.3g} cores, but this machine has {cores}: "
                "nodes will be slower than stated when all compute at once"
            )
        return tuple(out)


def show_rate(bytes_per_s: float | None) -> str:
    """A rate in the notation of lab files: '100mbit'."""
    if bytes_per_s is None:
        return "unlimited"
    bits = bytes_per_s * 8
    for unit, scale in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if bits >= scale:
            return f"{bits / scale:.4g}{unit}"
    return f"{bits:.4g}bit"


def shipped_labs() -> list[str]:
    """The names of the lab files that ship with Echelon."""
    return sorted(file.stem for file in _FILES.glob("*.toml"))


def read_lab(path_or_name: str | Path) -> LabSpec:
    """Read a lab file, or the shipped file of that name."""
    path = Path(path_or_name)
    if not path.is_file() and path.name == str(path_or_name) and path.suffix != ".toml":
        if path.name not in shipped_labs():
            raise UnknownName("lab", path.name, shipped_labs(), where="neither a shipped lab nor a file")
        path = _FILES / f"{path.name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        close = difflib.get_close_matches(path.stem, shipped_labs(), n=1)
        shipped = f"did you mean the shipped {close[0]!r}?" if close else ", ".join(shipped_labs())
        raise ConfigError(
            f"cannot read the lab file: {reason}",
            where=str(path_or_name),
            fix=f"give the path of a TOML file, or a shipped lab: {shipped}",
        ) from None
    return parse_lab(text, file=str(path_or_name), name=path.stem)


def parse_lab(text: str, *, file: str, name: str) -> LabSpec:
    """Parse a lab file's text; `file` appears in errors, `name` is the default name."""
    try:
        tables = read_toml(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"line (\d+)", str(error))
        line = at.group(1) if at else max(1, text.count("\n"))  # without a line, the text ends too early
        where = f"{file}, line {line}"
        raise ConfigError(f"not valid TOML: {error}", where=where, fix="correct that line") from None
    for key in ("node", "uplink", "fault"):
        if isinstance(tables.get(key), dict):
            raise ConfigError(
                f"[{key}] must be a list of tables",
                where=f"{file}, {key}",
                fix=f"write [[{key}]] with double brackets, once for each",
            )
    top = build_options(_File, tables, where=file)
    lab_name = _checked_name(top.name or re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_"), f"{file}, name")
    nodes = _nodes(top.node, file)
    sites = list(dict.fromkeys(node.site for node in nodes))
    uplinks = _uplinks(top.uplink, sites, file)
    faults = tuple(
        _fault(table, nodes, uplinks, f"{file}, [[fault]] {number}")
        for number, table in enumerate(top.fault, start=1)
    )
    return LabSpec(name=lab_name, nodes=nodes, uplinks=uplinks, faults=faults)


@dataclass(frozen=True, kw_only=True)
class _File:
    name: str | None = None
    node: list[dict[str, Any]] = field(default_factory=list)
    uplink: list[dict[str, Any]] = field(default_factory=list)
    fault: list[dict[str, Any]] = field(default_factory=list)


# Quantities are `Any` here, because their own parsers give better errors than a type would.
@dataclass(frozen=True, kw_only=True)
class _Node:
    name: str
    count: int | None = None
    site: str = "main"
    cpu: float | None = None
    link: Any = None
    latency: Any = 0.0
    jitter: Any = 0.0
    loss: Any = 0.0


@dataclass(frozen=True, kw_only=True)
class _Uplink:
    between: list[str]
    rate: Any = None
    latency: Any = 0.0
    jitter: Any = 0.0
    loss: Any = 0.0


@dataclass(frozen=True, kw_only=True)
class _Fault:
    action: str
    at_s: float | None = None
    at_step: int | None = None
    node: str | None = None
    link: str | None = None
    cpu: float | None = None
    rate: Any = None
    jitter: Any = None
    loss: Any = None


def _nodes(tables: Iterable[Mapping[str, Any]], file: str) -> tuple[NodeSpec, ...]:
    nodes: dict[str, NodeSpec] = {}
    for number, given in enumerate(tables, start=1):
        where = f"{file}, [[node]] {number}"
        table = build_options(_Node, given, where=where)
        _checked_name(table.name, f"{where}, name")
        _checked_name(table.site, f"{where}, site")
        if table.count is not None and not 1 <= table.count <= MOST_NODES:
            raise ConfigError(
                f"count cannot be {table.count}", where=f"{where}, count", fix=f"give 1 to {MOST_NODES}"
            )
        template = NodeSpec(
            name=table.name,
            site=table.site,
            cpu=_cpu(table.cpu, f"{where}, cpu"),
            link_bytes_per_s=_rate(table.link, f"{where}, link"),
            latency_s=_latency(table.latency, f"{where}, latency"),
            jitter_s=_latency(table.jitter, f"{where}, jitter"),
            loss=_loss(table.loss, f"{where}, loss"),
        )
        for name in _counted(table.name, table.count):
            if name in nodes:
                raise ConfigError(f"two nodes are named {name!r}", where=f"{where}, name", fix="rename one")
            nodes[name] = replace(template, name=name)
    if not 1 <= len(nodes) <= MOST_NODES:
        found = "the lab has no nodes" if not nodes else f"the lab has {len(nodes)} nodes"
        raise ConfigError(found, where=file, fix=f"describe 1 to {MOST_NODES} nodes with [[node]] tables")
    return tuple(nodes.values())


def _counted(name: str, count: int | None) -> list[str]:
    return [name] if count is None else [f"{name}-{index}" for index in range(count)]


def _uplinks(tables: Iterable[Mapping[str, Any]], sites: list[str], file: str) -> tuple[UplinkSpec, ...]:
    found: list[UplinkSpec] = []
    for number, given in enumerate(tables, start=1):
        where = f"{file}, [[uplink]] {number}"
        table = build_options(_Uplink, given, where=where)
        ends = ends_of(table.between, sites, [other.between for other in found], where)
        found.append(
            UplinkSpec(
                between=ends,
                rate_bytes_per_s=_rate(table.rate, f"{where}, rate"),
                latency_s=_latency(table.latency, f"{where}, latency"),
                jitter_s=_latency(table.jitter, f"{where}, jitter"),
                loss=_loss(table.loss, f"{where}, loss"),
            )
        )
    check_joined(sites, [uplink.between for uplink in found], file)
    return tuple(found)


def _fault(
    given: Mapping[str, Any], nodes: tuple[NodeSpec, ...], uplinks: tuple[UplinkSpec, ...], where: str
) -> FaultSpec:
    table = build_options(_Fault, given, where=where)
    if table.action not in ACTIONS:
        raise UnknownName("action", table.action, ACTIONS, where=f"{where}, action")
    _check_time(table, where)
    for key, (action, example) in _VALUE_OF.items():
        if (getattr(table, key) is not None) == (table.action == action):
            continue
        needed = table.action == action
        raise ConfigError(
            f"action {table.action} {'needs' if needed else 'does not take'} {key}",
            where=f"{where}, {key}",
            fix=f"add {example}" if needed else f"remove {key}, or use action {action}",
        )
    node, link = _target(table, nodes, uplinks, where)
    return FaultSpec(
        action=table.action,  # type: ignore[arg-type]  # one of ACTIONS, checked above
        at_s=table.at_s,
        at_step=table.at_step,
        node=node,
        link=link,
        cpu=_cpu(table.cpu, f"{where}, cpu"),
        rate_bytes_per_s=_rate(table.rate, f"{where}, rate"),
        jitter_s=None if table.jitter is None else _latency(table.jitter, f"{where}, jitter"),
        loss=None if table.loss is None else _loss(table.loss, f"{where}, loss"),
    )


def _check_time(table: _Fault, where: str) -> None:
    if (table.at_s is None) == (table.at_step is None):
        which = "neither at_s nor at_step" if table.at_s is None else "both at_s and at_step"
        raise ConfigError(f"{which} is given", where=where, fix="give exactly one of them")
    at = table.at_s if table.at_s is not None else table.at_step
    if at is None or not math.isfinite(at) or at < 0:
        key = "at_s" if table.at_s is not None else "at_step"
        raise ConfigError(f"{key} cannot be {at}", where=f"{where}, {key}", fix="give 0 or more")


def _target(
    table: _Fault, nodes: tuple[NodeSpec, ...], uplinks: tuple[UplinkSpec, ...], where: str
) -> tuple[str | None, str | None]:
    """The node or uplink that a fault names, in the file's spelling."""
    if (table.node is None) == (table.link is None):
        which = "neither node nor link" if table.node is None else "both node and link"
        raise ConfigError(f"{which} is given", where=where, fix="give exactly one of them")
    names = [node.name for node in nodes]
    if table.node is not None:
        if table.node not in names:
            raise UnknownName("node", table.node, names, where=f"{where}, node")
        return table.node, None
    if table.action not in _LINK_ACTIONS:
        raise ConfigError(
            f"action {table.action} applies to a node, not to a link",
            where=f"{where}, link",
            fix="give node in place of link",
        )
    for uplink in uplinks:
        if table.link in (uplink.name, "/".join(reversed(uplink.between))):
            return None, uplink.name
    if table.link in names:
        return table.link, None
    known = [uplink.name for uplink in uplinks] + names
    raise UnknownName("link", table.link or "", known, where=f"{where}, link")


def _checked_name(name: str, where: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid name",
            where=where,
            fix="use up to 40 letters, digits, - and _, beginning with a letter or digit",
        )
    return name


def _cpu(value: float | None, where: str) -> float | None:
    if value is not None and not (math.isfinite(value) and value >= SLOWEST_CPU):
        raise ConfigError(f"{value} is not a CPU speed", where=where, fix=f"give {SLOWEST_CPU} or more")
    return value


def _rate(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, str):
        wanted = "a rate such as 100mbit or 12.5MB/s"
        raise ConfigError(f"{value!r} is not {wanted}", where=where, fix=f"write {wanted}, in quotes")
    rate = rate_bytes_per_s(value, where=where)
    if not SLOWEST_BYTES_PER_S <= rate < math.inf:
        raise ConfigError(f"{value} is too slow to emulate", where=where, fix="give 1kbit or more")
    return rate


def _latency(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{value!r} is not a duration", where=where, fix='write a duration such as "5ms"')
    latency = duration_s(value, where=where)
    if not 0 <= latency <= 10:
        key = where.rpartition(", ")[2]
        raise ConfigError(f"{key} cannot be {value}", where=where, fix="give 0 to 10 s")
    return latency


def _loss(value: Any, where: str) -> float:
    """A fraction from a number or a percentage in text."""
    try:
        text = value.strip() if isinstance(value, str) else value
        percent = isinstance(text, str) and text.endswith("%")
        loss = math.nan if isinstance(value, bool) else float(text[:-1] if percent else text)
    except (TypeError, ValueError):
        loss, percent = math.nan, False
    loss = loss / 100 if percent else loss
    if not 0 <= loss <= _MOST_LOSS:
        raise ConfigError(
            f"{value!r} is not a loss",
            where=where,
            fix='give a fraction from 0 to 0.5, or a percentage such as "1%"',
        )
    return loss
