"""One way to run a job on a topology: who takes part, with which share, and how they communicate.

A candidate of the search. `predict` says what it would take, `Plan` is what a run gets of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echelon.config.choices import Overlap
from echelon.plan.groups import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStrategy:
    """Who takes part, and how.

    nodes       names of the topology's nodes, by rank
    shares      samples of each worker, by rank; they sum to the job's batch
    groups      ranks that sum together first, in the order in which they are neighbours; empty without a
                hierarchy. With groups, `collective` is `hierarchical(...)` with their sizes
    collective  as on the command line: `ring`, `hierarchical(sizes=[4, 4], inner=ring, outer=ring)`
    codec       as on the command line; `none` is exact
    overlap     backward or step
    factors     whether linear layers may send factors
    sync        the sync policy; `full` is exact
    servers     how many of the nodes have a parameter server beside the worker
    """

    nodes: tuple[str, ...]
    shares: tuple[int, ...]
    groups: Groups = ()
    collective: str = "auto"
    codec: str = "none"
    overlap: Overlap = "backward"
    factors: bool = False
    sync: str = "full"
    servers: int = 0

    @property
    def batch(self) -> int:
        """The global batch."""
        return sum(self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a step of a strategy would take; by rank where it is a tuple.

    step_s         from one step's begin to the next's
    compute_s      forward and backward
    exposed_s      communication that backward does not hide, for the slowest worker
    apply_s        the optimizer, of the slowest worker
    wait_s         waiting for other workers
    efficiency     samples per second, divided by the sum of what the chosen nodes compute alone
    link_bytes     bytes in a step through each node's link (by the node's name) and each uplink
    memory_bytes   what each worker needs
    bottleneck     what a faster part would help most: `computing on west-1`, `the link east/west`, ...
    collectives    those that gradients travel by: what `auto` becomes, which may depend on the bucket
    """

    step_s: float
    compute_s: tuple[float, ...]
    exposed_s: float
    apply_s: float
    wait_s: tuple[float, ...]
    samples_per_s: float
    efficiency: float
    link_bytes: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: tuple[float, ...] = ()
    bottleneck: str = ""
    collectives: tuple[str, ...] = ()
