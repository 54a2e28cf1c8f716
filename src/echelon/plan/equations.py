"""What do equations (1) to (5) of the first seed say: serial, or how many groups? As they are written.

Wang, Geng, Silva and Gaudiot, "Hierarchical Heterogeneous Cluster Systems for Scalable Distributed Deep
Learning", section III-A.1. Symbols:

m     jobs of the same workload, such as shares of a batch
M_i   nodes in group i; group 1 computes fastest, each next group is one order of magnitude slower
n     size of the data of a job, in bytes
T_r   cost of transferring a byte, the same between all nodes
N     cost of computing one job on a node of group 1

    serial   m N                                                on one node of group 1
    m < M_1  n T_r + N                                          one job on each of m nodes
    (1)      (n T_r + N) (m / M_1 + 1)
    (2)      (n T_r + N) m / (N M_1 + M_2)
    (3)      (n T_r + N) m / (N^2 M_1 + N M_2 + M_3)
    (4, 5)   (n T_r + N) m / (N^(p-1) M_1 + N^(p-2) M_2 + ... + M_p)

(4) and (5) are one equation on two lines. Costs are in units of time. N has two roles, a cost and the
factor between neighbouring groups, so the unit is given by it: one job on group 1 takes N units, where a
node of group 2 takes N times as long. `in_units` converts seconds, with N = 10 for decimal orders of
magnitude.

What is odd in them, and kept:
- (1) adds 1 to m / M_1, as if rounding up, so it counts a round too many where M_1 divides m. The others
  divide exactly.
- The first factor is the time of a round of group 1, but the divisor counts the jobs of a round of the
  *slowest* group: with M_2 = 0, (2) is N times less than (1) without its + 1. So each further group looks
  about N times cheaper, however few nodes it adds, and for N > 1 all groups are chosen nearly always.
- m = M_1 belongs to neither case in the text. Here it is a job for each node, n T_r + N.
- Transfers take n T_r for any number of nodes: links that are shared are not counted.
- The text puts m - M_1 jobs on group 2 and m - M_1 - n M_2 / N on group 3; the equations do not use that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.errors import ConfigError

_WHERE = "equations of the static choice"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticCosts:
    """m jobs of size n, T_r for each byte, N for computing one on group 1; in units of time.

    `ratio` is r_b = op_b / op_a: another operation of the same order of magnitude on the same node and data
    costs r_b N. It changes the cost of computing, not the factor N between groups.
    """

    jobs: float
    size: float
    transfer: float
    compute: float
    ratio: float = 1.0

    def __post_init__(self) -> None:
        for name in ("jobs", "compute", "ratio"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", where=_WHERE, fix="give a positive number"
                )
        for name in ("size", "transfer"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=_WHERE, fix="give 0 or more")

    @property
    def computing(self) -> float:
        """r_b N: one job on a node of group 1."""
        return self.ratio * self.compute

    @property
    def round(self) -> float:
        """n T_r + N: one job, with its transfer."""
        return self.size * self.transfer + self.computing


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticOption:
    """One way to do the jobs: on so many of the groups, 0 for one node alone."""

    groups: int
    cost: float
    equation: str

    @property
    def name(self) -> str:
        """`serial`, or the groups in use: `M1 M2`."""
        return " ".join(f"M{at + 1}" for at in range(self.groups)) or "serial"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticChoice:
    """The least costly option, and all of them: serial first, then one group more each time."""

    best: StaticOption
    options: tuple[StaticOption, ...]


def operation_ratio(op_a: float, op_b: float) -> float:
    """r_b: what operation b costs, divided by what operation a costs, on the same node and data."""
    if op_a <= 0 or op_b <= 0:
        raise ConfigError(
            f"operations cost {op_a} and {op_b}",
            where=_WHERE,
            fix="give two positive costs, measured alike",
        )
    return op_b / op_a


def serial(costs: StaticCosts) -> float:
    """m N: all jobs on one node of group 1, nothing to transfer."""
    return costs.jobs * costs.computing


def parallel_one(costs: StaticCosts, first: int) -> float:
    """On group 1: n T_r + N with a job or none for each node, otherwise equation (1)."""
    if costs.jobs <= first:
        return costs.round
    return costs.round * (costs.jobs / first + 1)


def parallel(costs: StaticCosts, groups: Sequence[int]) -> float:
    """Equations (2) to (5): on all given groups together. With one group it is not equation (1)."""
    divisor = sum(costs.compute ** (len(groups) - 1 - at) * members for at, members in enumerate(groups))
    return costs.round * costs.jobs / divisor


def cheapest(costs: StaticCosts, groups: Sequence[int]) -> StaticChoice:
    """Evaluate serial and the p equations for groups of M_1, ..., M_p nodes; equal costs: fewer groups."""
    if not groups or min(groups) < 1:
        raise ConfigError(
            f"groups have {list(groups)} nodes", where=_WHERE, fix="give at least one node in each group"
        )
    options = [StaticOption(groups=0, cost=serial(costs), equation="m N")]
    first = "n T_r + N" if costs.jobs <= groups[0] else "(1)"
    options.append(StaticOption(groups=1, cost=parallel_one(costs, groups[0]), equation=first))
    for count in range(2, len(groups) + 1):
        equation = {2: "(2)", 3: "(3)"}.get(count, "(4), (5)")
        cost = parallel(costs, groups[:count])
        options.append(StaticOption(groups=count, cost=cost, equation=equation))
    return StaticChoice(best=min(options, key=lambda option: option.cost), options=tuple(options))


def in_units(costs: StaticCosts, factor: float = 10.0) -> tuple[StaticCosts, float]:
    """Costs in seconds in units of time, where N is the factor between groups; and a unit in seconds."""
    unit_s = costs.compute / factor
    return replace(costs, transfer=costs.transfer / unit_s, compute=factor), unit_s
