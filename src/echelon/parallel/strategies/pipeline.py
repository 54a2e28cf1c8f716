"""Stages: each worker has some of the layers, and batches go through them in micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from echelon.errors import ConfigError
from echelon.parallel.dimension import Dimension

ScheduleName = Literal["gpipe", "1f1b", "filled", "interleaved", "stale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline(Dimension):
    """Stages of consecutive layers, one worker each; 0 stages: as many as workers are left.

    With `interleaved` each worker has several such chunks, and a stage is a worker.

    schedule  the order of micro-batches (`schedule.py`)
    micro     into how many micro-batches a batch is cut
    samples   instead: how many samples a micro-batch has at most; 0: by `micro`
    chunks    with interleaved: how many runs of layers each worker has, not next to each other
    ahead     with 1f1b, filled and interleaved: micro-batches more in flight for each hop, for thin links
    delay     with stale: by how many batches gradients are late; 0: 1
    recompute a stage keeps only its inputs, and computes activations again in its backward passes
    cuts      the layers at which the second and later stages (chunks) begin, such as "3,7"; empty: by
              measured times
    """

    name: ClassVar[str] = "pipeline"
    stages: int = 0
    schedule: ScheduleName = "gpipe"
    micro: int = 4
    samples: int = 0
    chunks: int = 0
    ahead: int = 0
    delay: int = 0
    recompute: bool = False
    cuts: str = ""

    def __post_init__(self) -> None:
        if self.stages < 0:
            raise ConfigError(
                f"stages is {self.stages}", where="pipeline, stages", fix="give at least 1, or leave it out"
            )
        if self.micro < 1:
            raise ConfigError(f"micro is {self.micro}", where="pipeline, micro", fix="give at least 1")
        if self.samples < 0:
            raise ConfigError(f"samples is {self.samples}", where="pipeline, samples", fix="give 0 or more")
        if self.ahead < 0:
            raise ConfigError(f"ahead is {self.ahead}", where="pipeline, ahead", fix="give 0 or more")
        if self.recompute and self.schedule == "filled":
            raise ConfigError(
                "recompute saves the memory that schedule filled fills with weights to be computed later",
                where="pipeline, recompute",
                fix="use schedule=1f1b with recompute, or leave recompute out",
            )
        if self.chunks < 0 or (self.chunks > 1 and self.schedule != "interleaved"):
            raise ConfigError(
                f"chunks is {self.chunks} with schedule {self.schedule}",
                where="pipeline, chunks",
                fix="use schedule=interleaved with 2 or more chunks, or leave chunks out",
            )
        if self.delay < 0 or (self.delay and self.schedule != "stale"):
            raise ConfigError(
                f"delay is {self.delay} with schedule {self.schedule}",
                where="pipeline, delay",
                fix="use schedule=stale, which is not exact, or leave delay out",
            )
        if self.recompute and self.schedule == "stale":
            raise ConfigError(
                "with schedule stale a model has changed until its activations are computed again",
                where="pipeline, recompute",
                fix="use schedule=1f1b with recompute, or leave recompute out",
            )
        self._check_cuts()
        if self.schedule == "interleaved" and (self.chunks == 1 or self.extent == 1):
            raise ConfigError(
                "a worker's chunks are interleaved with those of others: both are at least 2",
                where="pipeline, schedule",
                fix="use pipeline(stages=2, chunks=2, schedule=interleaved), or schedule=1f1b",
            )

    def _check_cuts(self) -> None:
        found, wanted = len(self.cut_points) + 1, self.stages * self.parts
        if self.cuts and self.stages and found != wanted:
            what = "stages" if self.parts == 1 else f"chunks of layers, {self.parts} for each stage"
            raise ConfigError(
                f"{found - 1} cuts make {found} {what}, not {wanted}",
                where="pipeline, cuts",
                fix=f"give {wanted - 1} cuts, or leave them out",
            )
        if self.cuts and found % self.parts:
            raise ConfigError(
                f"{found - 1} cuts make {found} chunks, which are not {self.parts} for each stage",
                where="pipeline, cuts",
                fix=f"give cuts for a multiple of {self.parts} chunks",
            )

    @property
    def parts(self) -> int:
        """How many runs of layers each worker has."""
        return (self.chunks or 2) if self.schedule == "interleaved" else 1

    @property
    def late(self) -> int:
        """By how many batches gradients are late; 0: they are exact."""
        return (self.delay or 1) if self.schedule == "stale" else 0

    @property
    def extent(self) -> int:
        """The number of stages."""
        return (len(self.cut_points) + 1) // self.parts if self.cuts else self.stages

    def count(self, rows: int) -> int:
        """The number of micro-batches of a batch with so many samples."""
        return -(-rows // self.samples) if self.samples else min(self.micro, rows)

    @property
    def cut_points(self) -> tuple[int, ...]:
        """The numbers in `cuts`."""
        words = [word.strip() for word in self.cuts.split(",")] if self.cuts else []
        found = tuple(int(word) if word.isdecimal() else 0 for word in words)
        if any(later <= earlier for earlier, later in pairwise([0, *found])):
            raise ConfigError(
                f"cuts are {self.cuts!r}",
                where="pipeline, cuts",
                fix='give the numbers of layers in ascending order, from 1 on: cuts="3,7"',
            )
        return found
