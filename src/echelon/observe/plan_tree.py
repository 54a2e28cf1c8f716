"""A plan as a tree of lines for the terminal: levels, groups, workers with shares, speeds and links."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.observe.plan_view import MOST_BLOCKS, MOST_NODES, BlockView, NodeView, PlanView, number, spread


def tree_lines(view: PlanView) -> list[str]:
    """The lines of the tree."""
    nodes = view.nodes
    batch = f", batch {view.batch}" if view.batch is not None else ""
    chosen = "".join(f", {choice}" for choice in view.choices)
    lines = [f"{len(nodes)} worker{'s' if len(nodes) > 1 else ''}{batch}{chosen}"]
    widths = _Widths(view)
    parts: list[tuple[str, list[str]]] = [_block(view.top, widths, whole=len(nodes) > MOST_NODES)]
    if view.uplinks:
        parts.append(
            (
                "links between sites",
                [f"{one} - {other}  {text}" for one, other, text in view.uplinks[:MOST_NODES]],
            )
        )
    if view.servers:
        parts.append(("servers", list(view.servers)))
    if view.left_out:
        parts.append(("left out", [f"{name}: {why}" for name, why in _first(view.left_out)]))
    return lines + _branches(parts)


class _Widths:
    """The columns of all workers, so that they line up."""

    def __init__(self, view: PlanView) -> None:
        nodes = view.nodes
        self._view = view
        self._rank = max(len(str(node.rank)) for node in nodes)
        self._name = max(len(node.name) for node in nodes)
        self._share = max(len(view.shares([node])) for node in nodes)
        self._speed = max(len(number(node.speed)) for node in nodes)

    def line(self, node: NodeView) -> str:
        """One worker."""
        share = f"{self._view.shares([node]):>{self._share}}"
        speed = f"speed {number(node.speed):<{self._speed}}"
        return (
            f"{node.rank:>{self._rank}}  {node.name:<{self._name}}  {share}  {speed}  {node.link}".rstrip()
        )

    def summed(self, nodes: Sequence[NodeView]) -> str:
        """Many workers in one line."""
        speeds = spread([node.speed for node in nodes], number)
        names = f"{nodes[0].name} ... {nodes[-1].name}" if len(nodes) > 1 else nodes[0].name
        link = f", {nodes[0].link}" if nodes[0].link and len({node.link for node in nodes}) == 1 else ""
        return f"{len(nodes)} nodes, {names}: {self._view.shares(nodes)} each, speed {speeds}{link}"


def _block(block: BlockView, widths: _Widths, *, whole: bool) -> tuple[str, list[str]]:
    """A block's title, and its lines."""
    title = f"{block.title}: {block.how}" if block.how else block.title
    if block.inside:
        shown = block.inside[:MOST_BLOCKS]
        lines = _branches([_block(one, widths, whole=whole) for one in shown])
        left = len(block.inside) - len(shown)
        return title, lines + ([f"... and {left} more"] if left else [])
    if whole:
        return title, [widths.summed(block.nodes)]
    return title, [widths.line(node) for node in block.nodes]


def _branches(parts: Sequence[tuple[str, list[str]]]) -> list[str]:
    lines = []
    for at, (title, below) in enumerate(parts):
        last = at == len(parts) - 1
        lines.append(f"{'└─' if last else '├─'} {title}")
        lines += [f"{'  ' if last else '│ '} {line}" for line in below]
    return lines


def _first(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    shown = list(pairs[:MOST_NODES])
    return shown if len(shown) == len(pairs) else [*shown, ("...", f"and {len(pairs) - len(shown)} more")]
