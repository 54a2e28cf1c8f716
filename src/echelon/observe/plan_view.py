"""What does a plan say that a reader wants to see? Workers in their groups, levels, links, who is left out.

The picture in the report and the tree in the terminal are both drawn from this. It is read from the values
of a plan's file, because a run's folder may be older than this version: what is missing or strange is left
out, and never an error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from echelon.config.call import Call, parse_call
from echelon.errors import ConfigError

MOST_NODES = 64
"""With more nodes than this, each group is summed up in one line or box."""
MOST_BLOCKS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One worker: `share` in samples if the batch is known, else its weight."""

    rank: int
    name: str
    share: float
    speed: float
    site: str = ""
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """Nodes, or other blocks, that sum together by the collective `how`."""

    title: str
    how: str
    nodes: tuple[NodeView, ...] = ()
    inside: tuple[BlockView, ...] = ()

    @property
    def groups(self) -> int:
        """How many groups of nodes this block has."""
        return sum(block.groups for block in self.inside) or 1

    @property
    def all_nodes(self) -> tuple[NodeView, ...]:
        """The nodes of this block and of those inside."""
        return self.nodes + tuple(node for block in self.inside for node in block.all_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A whole plan. `uplinks` are two sites and a text each, `left_out` a node and the reason each."""

    top: BlockView
    batch: int | None
    uplinks: tuple[tuple[str, str, str], ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()
    servers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    step_s: float | None = None
    samples_per_s: float | None = None
    efficiency: float | None = None
    bottleneck: str = ""

    @property
    def nodes(self) -> tuple[NodeView, ...]:
        """All nodes with a worker."""
        return self.top.all_nodes

    def shares(self, nodes: Sequence[NodeView]) -> str:
        """The shares of nodes, in words: samples if the batch is known."""
        text = spread([node.share for node in nodes], number)
        if self.batch is None:
            return f"weight {text}"
        return f"{text} sample" if text == "1" else f"{text} samples"


def view_of(values: Mapping[str, Any]) -> PlanView | None:
    """The view of a plan's values, None if they are not a plan's."""
    batch = values.get("batch") if isinstance(values.get("batch"), int) else None
    nodes = [_node(at, worker) for at, worker in enumerate(_tables(values, "workers"))]
    if not nodes:
        return None
    nodes.sort(key=lambda node: node.rank)
    predicted = values.get("predicted")
    predicted = predicted if isinstance(predicted, dict) else {}
    return PlanView(
        top=_blocks(nodes, values),
        batch=batch,
        uplinks=tuple(found for table in _tables(values, "uplinks") if (found := _uplink(table))),
        left_out=tuple(
            (str(table.get("node", "")), str(table.get("why", ""))) for table in _tables(values, "left_out")
        ),
        servers=tuple(str(name) for name in _list(values, "servers")),
        choices=tuple(_choices(values)),
        step_s=_positive(predicted.get("step_s") or values.get("predicted_step_s")),
        samples_per_s=_positive(predicted.get("samples_per_s")),
        efficiency=_positive(predicted.get("efficiency")),
        bottleneck=str(predicted.get("bottleneck", "")),
    )


def measured_step_s(begins: Sequence[float]) -> float | None:
    """The median time from one step's begin to the next's, without the first fifth, while all warms up.

    None with fewer than three steps.
    """
    kept = sorted(begins)[len(begins) // 5 :]
    lengths = [late - early for early, late in zip(kept, islice(kept, 1, None), strict=False)]
    return statistics.median(lengths) if len(lengths) >= 2 else None


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Equal values as one, others as `least to most`."""
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"


def number(value: float) -> str:
    """A share or a speed, with three digits at most."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# Blocks


def _blocks(nodes: Sequence[NodeView], values: Mapping[str, Any]) -> BlockView:
    """One block of all nodes, or groups, or sites, below as many levels as the collective has."""
    call = _call(values.get("collective"))
    flat = str(call) if call is not None else "auto"
    groups = _groups(nodes, values)
    if len(groups) < 2:
        return BlockView(title="all workers", how=flat, nodes=tuple(nodes))
    nested = call is not None and call.name == "hierarchical"
    inner = str(call.options.get("inner", "ring")) if call is not None and nested else ""
    blocks = [BlockView(title=title, how=inner, nodes=tuple(members)) for title, members in groups]
    if not nested:
        return BlockView(title="all workers", how=flat, inside=tuple(blocks))
    return _above(blocks, str(call.options.get("outer", "ring")) if call is not None else "ring")


def _above(blocks: list[BlockView], outer: str) -> BlockView:
    """The levels above blocks; an outer `hierarchical` groups them again."""
    call = _call(outer)
    if call is None or call.name != "hierarchical":
        return BlockView(title="between groups", how=outer, inside=tuple(blocks))
    sizes = call.options.get("sizes")
    each = call.options.get("group")
    if not isinstance(sizes, list):
        size = each if isinstance(each, int) and each > 0 else max(1, math.isqrt(len(blocks)))
        sizes = [min(size, len(blocks) - at) for at in range(0, len(blocks), size)]
    above, at = [], 0
    inner, first = str(call.options.get("inner", "ring")), 0
    for size in [size for size in sizes if isinstance(size, int)]:
        inside = tuple(blocks[at : at + size])
        at += size
        if inside:
            last = first + sum(block.groups for block in inside) - 1
            above.append(BlockView(title=f"groups {first} to {last}", how=inner, inside=inside))
            first = last + 1
    if at != len(blocks) or len(above) >= len(blocks):  # not what the plan means
        return BlockView(title="between groups", how=outer, inside=tuple(blocks))
    return _above(above, str(call.options.get("outer", "ring")))


def _groups(nodes: Sequence[NodeView], values: Mapping[str, Any]) -> list[tuple[str, list[NodeView]]]:
    """The plan's groups; else those that the collective forms of consecutive ranks; else the sites."""
    by_rank = {node.rank: node for node in nodes}
    groups = [ranks for ranks in _list(values, "groups") if isinstance(ranks, list)]
    known = [[rank for rank in ranks if isinstance(rank, int) and rank in by_rank] for ranks in groups]
    members = [[by_rank[rank] for rank in ranks] for ranks in known]
    if sorted(node.rank for group in members for node in group) == sorted(by_rank) and all(members):
        return [(_title(at, group), group) for at, group in enumerate(members)]
    formed = _formed(nodes, _call(values.get("collective")))
    if formed:
        return [(_title(at, group), group) for at, group in enumerate(formed)]
    sites: dict[str, list[NodeView]] = {}
    for node in nodes:
        sites.setdefault(node.site, []).append(node)
    return [(f"site {site}" if site else "no site", found) for site, found in sites.items()]


def _formed(nodes: Sequence[NodeView], call: Call | None) -> list[list[NodeView]]:
    """The groups of `hierarchical(sizes=[...])` or `hierarchical(group=...)`; none otherwise."""
    if call is None or call.name != "hierarchical":
        return []
    listed, each = call.options.get("sizes"), call.options.get("group")
    sizes = [size for size in listed if isinstance(size, int)] if isinstance(listed, list) else []
    if isinstance(each, int) and each > 0:
        sizes = [min(each, len(nodes) - at) for at in range(0, len(nodes), each)]
    if sum(sizes) != len(nodes) or min(sizes) < 1:
        return []
    rest = iter(nodes)
    return [list(islice(rest, size)) for size in sizes]


def _title(at: int, group: Sequence[NodeView]) -> str:
    sites = {node.site for node in group}
    one = next(iter(sites)) if len(sites) == 1 else ""
    return f"group {at}, site {one}" if one else f"group {at}"


# Values of a file, which may be anything


def _node(at: int, table: Mapping[str, Any]) -> NodeView:
    speed = _positive(table.get("node_speed")) or 1.0
    emulated = _positive(table.get("speed")) or 1.0
    rank = table.get("rank", at)
    return NodeView(
        rank=rank if isinstance(rank, int) else at,
        name=str(table.get("node", "")),
        share=_positive(table.get("weight")) or 1.0,
        speed=speed * emulated,
        site=str(table.get("site", "")),
        link=str(table.get("link", "")),
    )


def _uplink(table: Mapping[str, Any]) -> tuple[str, str, str] | None:
    ends = table.get("between")
    if not isinstance(ends, list | tuple) or len(ends) != 2:
        return None
    text = ", ".join(str(table[key]) for key in ("rate", "latency") if table.get(key)) or "unlimited"
    return str(ends[0]), str(ends[1]), text


def _choices(values: Mapping[str, Any]) -> list[str]:
    """What is not as by default."""
    shown = {"codec": "none", "sync": "full", "overlap": "backward", "factors": "auto"}
    return [f"{name} {values[name]}" for name, usual in shown.items() if values.get(name, usual) != usual]


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    found = values.get(key)
    return list(found) if isinstance(found, list | tuple) else []


def _tables(values: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    return [table for table in _list(values, key) if isinstance(table, dict)]


def _positive(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
    return float(value) if good and isinstance(value, int | float) else None


def _call(text: object) -> Call | None:
    try:
        return parse_call(text) if isinstance(text, str) else None
    except ConfigError:
        return None
