"""What was found about sites and links, in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median

from echelon.config.units import show_bytes, show_seconds
from echelon.plan.fit import LIMITED, Measurements
from echelon.plan.topology import Node, Topology, Uplink

_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_SLOW = 0.6  # of the usual link of a site
_NUMBERED = re.compile(r"(.*?)(\d+)")


def reasons(topology: Topology, measured: Measurements) -> tuple[str, ...]:
    """One sentence about the sites, one for each uplink, one for each node that stands out."""
    said = [_sites(topology, measured)]
    if len(topology.sites) > 2:
        said += [_uplink(topology, uplink) for uplink in topology.uplinks]
    rates: dict[tuple[str, str], list[float]] = {}
    for (sender, receiver), rate in measured.alone.items():
        rates.setdefault((topology.node(sender).site, topology.node(receiver).site), []).append(rate)
    for uplink in topology.uplinks:
        said += _one_way(uplink, rates)
    for site in topology.sites:
        said += _slow([node for node in topology.nodes if node.site == site])
    return tuple(said)


def show_names(names: Sequence[str]) -> str:
    """Names as text, runs of numbers shortened: `east-0..3, west-1`."""
    runs: list[tuple[str, list[int]]] = []
    for name in names:
        match = _NUMBERED.fullmatch(name)
        begin, number = (match.group(1), int(match.group(2))) if match else (name, -1)
        if match and runs and runs[-1][0] == begin and runs[-1][1][-1:] == [number - 1]:
            runs[-1][1].append(number)
        else:
            runs.append((begin, [number] if match else []))
    return ", ".join(
        begin + (f"{numbers[0]}..{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers)))
        for begin, numbers in runs
    )


def _sites(topology: Topology, measured: Measurements) -> str:
    inside, between = _rates(topology, measured)
    count = len(topology.sites)
    if count == 1:
        text = f"{show_names([node.name for node in topology.nodes])} are on one network"
        return f"{text}: {_rate(inside)} between two of them."
    names = [
        show_names([node.name for node in topology.nodes if node.site == site]) for site in topology.sites
    ]
    number = _NUMBERS[count] if count < len(_NUMBERS) else str(count)
    text = f"{'; '.join(names[:-1])} and {names[-1]} are {number} sites: "
    text += f"inside {_rate(inside)}, " if inside else ""
    if count == 2:
        return text + "between " + _line(topology, topology.uplinks[0]) + "."
    low, high = min(between), max(between)
    many = f"{_rate([low])} to {_rate([high])}" if high > 1.3 * low else _rate(between)
    return f"{text}between {many}."


def _uplink(topology: Topology, uplink: Uplink) -> str:
    return f"{uplink.between[0]} and {uplink.between[1]} are joined by {_line(topology, uplink)}."


def _line(topology: Topology, uplink: Uplink) -> str:
    several = min(sum(node.site == site for node in topology.nodes) for site in uplink.between) > 1
    shared = " shared" if several else ""
    late = f", {show_seconds(uplink.latency_s)} one way" if uplink.latency_s >= 0.5e-3 else ""
    return f"{_rate([uplink.bytes_per_s])}{shared}{late}"


def _one_way(uplink: Uplink, rates: Mapping[tuple[str, str], list[float]]) -> list[str]:
    """If one direction is slower: the uplink has the rate of the slower one."""
    ways = [
        (median(rates.get((start, stop), [0.0])), start, stop)
        for start, stop in (uplink.between, uplink.between[::-1])
    ]
    (slow, start, stop), (fast, _, _) = sorted(ways)
    if not slow or slow > LIMITED * fast:
        return []
    return [f"From {start} to {stop} it is slower than back: {_rate([slow])} against {_rate([fast])}."]


def _slow(nodes: Sequence[Node]) -> list[str]:
    """Nodes whose link has much less than is usual in their site."""
    said = []
    for way, rates in (
        ("sends", [node.up_bytes_per_s for node in nodes]),
        ("receives", [node.down_bytes_per_s for node in nodes]),
    ):
        usual = median(rates)
        said += [
            f"{node.name} {way} at {_rate([rate])}, where {_rate([usual])} is usual: its own link is slow."
            for node, rate in zip(nodes, rates, strict=True)
            if rate < _SLOW * usual
        ]
    return said


def _rates(topology: Topology, measured: Measurements) -> tuple[list[float], list[float]]:
    """Of pairs inside sites, and of pairs between sites."""
    inside: list[float] = []
    between: list[float] = []
    for (sender, receiver), rate in measured.alone.items():
        same = topology.node(sender).site == topology.node(receiver).site
        (inside if same else between).append(rate)
    return inside, between


def _rate(rates: Sequence[float]) -> str:
    return f"{show_bytes(median(rates))}/s" if rates else "unknown"
