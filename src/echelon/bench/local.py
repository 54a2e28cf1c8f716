"""How many samples/s does this machine train in each way, and how does that compare with torch as it is?

The table of the second seed, Lerat et al., for one machine: one thread, torch's own threads, replicas in
threads, processes, both; besides them chunks that fit the cache, and pinned cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from echelon.bench.workloads import workload
from echelon.errors import ConfigError, LaunchError
from echelon.parallel.local_way import LocalWay, as_it_is, table_ways
from echelon.start.local_trial import LocalTrial, MeasuredWay, my_cores, take_turns
from echelon.train.local_messages import LocalJob

Progress = Callable[[str, float], None]
TIMES_OF_WORKLOAD = 4  # the default batch: workloads name the batch of one of several workers
_TURN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRow:
    """One way: samples/s of its median turn, of its slowest and its quickest; or why it was left out."""

    way: LocalWay
    rate: float = 0.0
    least: float = 0.0
    most: float = 0.0
    left_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTable:
    """All ways for one model. `cores` are those that this process may use."""

    model: str
    batch: int
    cores: int
    numa_nodes: int
    turns: int
    rows: tuple[LocalRow, ...]

    @property
    def usual(self) -> LocalRow:
        """Torch as it is."""
        return next(row for row in self.rows if row.way == as_it_is(self.cores))

    def ratio(self, row: LocalRow) -> float:
        """Samples/s against torch as it is."""
        return row.rate / self.usual.rate

    @property
    def best(self) -> LocalRow:
        """The row with the most samples/s."""
        return max(self.rows, key=lambda row: row.rate)


def measure_local(
    model: str,
    *,
    batch: int | None,
    turns: int,
    progress: Progress,
    ways: Sequence[LocalWay] | None = None,
) -> LocalTable:
    """Train a model in every way, in turns."""
    cores = my_cores()
    count = batch or TIMES_OF_WORKLOAD * workload(model).batch
    if count < 2 or turns < 1:
        name, value, least = ("--batch", count, 2) if count < 2 else ("--turns", turns, 1)
        raise ConfigError(f"{value} is too few", where=name, fix=f"give at least {least}")
    chosen = list(ways or table_ways(len(cores), count, numa_nodes=numa_nodes()))
    job = LocalJob(
        name=model,
        maker="echelon.bench.workloads:trial_model",
        options={"workload": model},
        batch=count,
    )
    progress(f"{model}: starting processes for {len(chosen)} ways", 0.0)
    with LocalTrial(job, sum(way.processes for way in chosen), cores) as trial:
        progress(f"{model}: making models", 0.0)
        opened = trial.open(chosen)
        progress(f"{model}: warming up", 0.0)
        take_turns(
            trial,
            opened,
            batch=count,
            turns=turns,
            turn_s=_TURN_S,
            told=lambda part: progress(f"{model}: training in turns", part),
        )
    table = LocalTable(
        model=model,
        batch=count,
        cores=len(cores),
        numa_nodes=numa_nodes(),
        turns=turns,
        rows=tuple(_row(one, count) for one in opened),
    )
    if table.usual.left_out:
        raise LaunchError(
            f"{model} cannot be trained here: {table.usual.left_out}",
            where="echelon bench local",
            fix="give a smaller --batch, or echelon doctor looks for what is wrong with this machine",
        )
    return table


def _row(one: MeasuredWay, batch: int) -> LocalRow:
    if one.failed:
        return LocalRow(way=one.way, left_out=one.failed)
    rates = [batch / step_s for step_s in one.seconds[batch]]
    return LocalRow(way=one.way, rate=median(rates), least=min(rates), most=max(rates))


def numa_nodes(root: Path = Path("/")) -> int:
    """How many NUMA nodes the machine has; 1 if the system does not tell."""
    return max(1, len(list((root / "sys/devices/system/node").glob("node[0-9]*"))))
