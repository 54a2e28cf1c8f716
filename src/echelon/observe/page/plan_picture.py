"""The picture of a plan as SVG text: levels and groups as frames, workers as boxes, links between sites.

Frames are below each other, so that any number of them fits; lines on the left join the sites of uplinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from echelon.observe.page.charts import shortened, svg, svg_text
from echelon.observe.page.markup import safe
from echelon.observe.plan_view import MOST_BLOCKS, MOST_NODES, BlockView, NodeView, PlanView, number, spread

_WIDTH = 918
_BOX_W, _BOX_H, _SPACE = 122, 64, 8
_PAD, _TITLE_H = 10, 22
_LANE_W = 16
_LINE_H = 18
_MOST_LANES = 8  # more uplinks than this are listed, not drawn
_NAME_CHARS, _WHY_CHARS = 15, 118


def plan_picture(view: PlanView) -> str:
    """The drawing of a whole plan."""
    drawing = _Drawing(view=view, left=4 + _LANE_W * _lanes(view))
    bottom = drawing.block(view.top, drawing.left, 4.0, _WIDTH - 4.0 - drawing.left)
    bottom = drawing.uplinks(bottom)
    bottom = drawing.left_out(bottom)
    count = len(view.nodes)
    label = f"the plan's {count} worker{'s' if count > 1 else ''}, their groups and links"
    return svg(drawing.parts, _WIDTH, round(bottom + 4), label)


@dataclass(slots=True, kw_only=True)
class _Drawing:
    view: PlanView
    left: float
    parts: list[str] = field(default_factory=list)
    middles: dict[str, tuple[float, float]] = field(default_factory=dict)  # of each site's first frame

    @property
    def _whole(self) -> bool:
        return len(self.view.nodes) > MOST_NODES

    def block(self, block: BlockView, x: float, y: float, width: float) -> float:
        """Draw a frame and what is inside; returns its lower edge."""
        at = len(self.parts)
        title = f"{block.title}: {block.how}" if block.how else block.title
        below = y + _TITLE_H
        self.parts.append(svg_text(x + _PAD, y + 15, shortened(title, 120), "label", tip=title))
        if block.inside:
            for one in block.inside[:MOST_BLOCKS]:
                below = self.block(one, x + _PAD, below + 2, width - 2 * _PAD) + 4
            left = len(block.inside) - MOST_BLOCKS
            if left > 0:
                below += _LINE_H
                self.parts.append(svg_text(x + _PAD, below - 4, f"and {left:,} more groups", "note"))
            below += _PAD - 4
        else:
            below = self._boxes(block.nodes, x + _PAD, below + 2, width - 2 * _PAD) + _PAD
            for site in dict.fromkeys(node.site for node in block.nodes):
                self.middles.setdefault(site, (x, (y + below) / 2))
        self.parts.insert(at, _rect("frame", x, y, width, below - y))
        return below

    def _boxes(self, nodes: Sequence[NodeView], x: float, y: float, width: float) -> float:
        """A box for each node, or one for all; returns the lower edge."""
        if self._whole:
            self._summed(nodes, x, y, width)
            return y + _BOX_H
        columns = max(1, int((width + _SPACE) // (_BOX_W + _SPACE)))
        for at, node in enumerate(nodes):
            row, column = divmod(at, columns)
            self._box(node, x + column * (_BOX_W + _SPACE), y + row * (_BOX_H + _SPACE))
        rows = -(-len(nodes) // columns)
        return y + rows * _BOX_H + (rows - 1) * _SPACE

    def _box(self, node: NodeView, x: float, y: float) -> None:
        most = max(one.share for one in self.view.nodes)
        tip = (
            f"rank {node.rank}, {node.name}\n{self.view.shares([node])} of each batch\n"
            f"speed {number(node.speed)}" + (f"\nlink {node.link}" if node.link else "")
        )
        speed = f"speed {number(node.speed)}"
        self.parts += [
            _rect("box", x, y, _BOX_W, _BOX_H, tip),
            _rect("fill compute", x + 1, y + _BOX_H - 6, (_BOX_W - 2) * node.share / most, 5),
            svg_text(x + 8, y + 16, shortened(node.name, _NAME_CHARS), "label", tip=tip),
            svg_text(x + 8, y + 32, self.view.shares([node]), "note"),
            svg_text(
                x + 8, y + 48, shortened(f"{speed} · {node.link}" if node.link else speed, 20), "note"
            ),
        ]

    def _summed(self, nodes: Sequence[NodeView], x: float, y: float, width: float) -> None:
        shares = [node.share for node in nodes]
        names = f"{nodes[0].name} … {nodes[-1].name}" if len(nodes) > 1 else nodes[0].name
        speeds = spread([node.speed for node in nodes], number)
        links = sorted({node.link for node in nodes if node.link})
        link = f" · {links[0]}" if len(links) == 1 else " · links differ" if links else ""
        together = sum(node.share for node in self.view.nodes)
        self.parts += [
            _rect("box", x, y, width, _BOX_H),
            _rect("fill compute", x + 1, y + _BOX_H - 6, (width - 2) * sum(shares) / together, 5),
            svg_text(x + 8, y + 16, f"{len(nodes):,} nodes: {shortened(names, 60)}", "label"),
            svg_text(
                x + 8,
                y + 32,
                f"{self.view.shares(nodes)} each, {number(sum(shares))} together",
                "note",
            ),
            svg_text(x + 8, y + 48, f"speed {speeds}{link}", "note"),
        ]

    def uplinks(self, bottom: float) -> float:
        """A line for each link between sites, in a lane of its own; its text is below the frames."""
        for at, (one, other, text) in enumerate(self.view.uplinks[:MOST_BLOCKS]):
            ends = [self.middles[site] for site in (one, other) if site in self.middles]
            lane = self.left - _LANE_W * at - _LANE_W / 2
            tip = safe(f"{one} to {other}: {text}")
            if len(ends) == 2 and at < _lanes(self.view):
                (x0, y0), (x1, y1) = ends
                points = f"{x0:.1f},{y0:.1f} {lane:.1f},{y0:.1f} {lane:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
                self.parts.append(f'<polyline class="uplink" points="{points}" data-tip="{tip}"/>')
                mark = safe(str(at + 1))
                middle = (y0 + y1) / 2
                self.parts.append(f'<circle class="uplink-mark" cx="{lane:.1f}" cy="{middle:.1f}" r="7"/>')
                self.parts.append(
                    svg_text(lane, middle, mark, "inside on-compute", anchor="middle", middle=True)
                )
            bottom += _LINE_H
            self.parts.append(svg_text(self.left, bottom, f"{at + 1}  {one} to {other}: {text}", "note"))
        left = len(self.view.uplinks) - MOST_BLOCKS
        if left > 0:
            bottom += _LINE_H
            self.parts.append(svg_text(self.left, bottom, f"and {left:,} more links", "note"))
        return bottom + (6 if self.view.uplinks else 0)

    def left_out(self, bottom: float) -> float:
        """The nodes without a worker, greyed, with the reasons."""
        nodes = self.view.left_out
        if not nodes:
            return bottom
        top, x = bottom + 6, self.left
        shown = nodes[:MOST_NODES]
        height = _TITLE_H + (_LINE_H + 4) * len(shown) + 6 + (_LINE_H if len(shown) < len(nodes) else 0)
        self.parts.append(_rect("frame out", x, top, _WIDTH - 4 - x, height))
        self.parts.append(svg_text(x + _PAD, top + 15, "left out", "label"))
        y = top + _TITLE_H
        for name, why in shown:
            self.parts += [
                _rect("box out", x + _PAD, y, _BOX_W, _LINE_H, why),
                svg_text(x + _PAD + 8, y + 13, shortened(name, _NAME_CHARS), "note", tip=name),
                svg_text(x + _PAD + _BOX_W + 10, y + 13, shortened(why, _WHY_CHARS), "note", tip=why),
            ]
            y += _LINE_H + 4
        if len(shown) < len(nodes):
            self.parts.append(svg_text(x + _PAD, y + 13, f"and {len(nodes) - len(shown):,} more", "note"))
        return top + height


def _lanes(view: PlanView) -> int:
    return len(view.uplinks) if len(view.uplinks) <= _MOST_LANES else 0


def _rect(look: str, x: float, y: float, width: float, height: float, tip: str = "") -> str:
    hover = f' data-tip="{safe(tip)}"' if tip else ""
    corner = "" if look.startswith("fill") else ' rx="6"'
    return (
        f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.7):.1f}" '
        f'height="{height:.1f}"{corner}{hover}/>'
    )
