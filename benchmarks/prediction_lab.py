"""Workers for `prediction.py`: one start of a lab, several measurements one after the other.

The driver calls `measured(lab, settings)`. In the nodes the same file runs again, with RANK set: for every
setting rank 0 asks for CPU quotas on its standard output, waits for a line on its standard input, and
prints a line of JSON with what was measured. Starting torch takes longer than a measurement, so quotas are
lifted meanwhile.

    profile  what the model costs on one worker
    alone    steps of one worker, by share and quota
    reduce   all-reduces of one buffer, one after the other
    train    steps of all workers
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import LabSpec
from echelon.comm.schedule.collectives.auto import AutoCollective
from echelon.plan.plan import PlanRequest, make_plan

Setting = dict[str, Any]
_DEADLINE_S = 300.0

# The models, as the zoo names them, and what they are given.
MODELS = {
    "lenet": ("lenet", (1, 28, 28)),
    "cnn": ("cnn", (3, 32, 32)),
    "cnn-narrow": ("cnn(width=12)", (3, 32, 32)),
    "mlp-8": ("mlp(width=8, depth=1)", (1, 8, 8)),
    "mlp-8x8": ("mlp(width=8, depth=8)", (1, 8, 8)),
    "mlp-256": ("mlp(width=256, depth=2)", (1, 28, 28)),
    "mlp-512": ("mlp(width=512, depth=3)", (1, 28, 28)),
    "mlp-1024": ("mlp(width=1024, depth=3)", (1, 28, 28)),
}


def measured(lab: LabSpec, settings: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Run all settings in one lab; what rank 0 found, in order."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        up = stack.enter_context(Lab.up(lab, uuid.uuid4().hex))
        up.lift_quotas()
        names = [seat.node for seat in up.seats]
        (folder / "plan.toml").write_text(make_plan("benchmark", names, PlanRequest(), cores=1).to_toml())
        (folder / "settings.json").write_text(json.dumps(list(settings)))
        processes = [_start(up, rank, folder) for rank in range(len(names))]
        try:
            for line in _answers(processes[0], len(settings)):
                if "ask" in line:
                    for name, cpu in zip(names, line["ask"], strict=True):
                        up.set_cpu(name, cpu)
                    for link, rate in line["rates"].items():
                        for name in names if link == "nodes" else [link]:
                            up.set_rate(name, rate)
                    assert processes[0].stdin is not None
                    processes[0].stdin.write("\n")
                    processes[0].stdin.flush()
                else:
                    yield line
            up.lift_quotas()
            for process in processes:
                process.wait(timeout=30)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _answers(process: subprocess.Popen[str], count: int) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    while count:
        text = process.stdout.readline()
        if not text:
            raise SystemExit(f"rank 0 of the lab ended with {process.wait()}")
        line = json.loads(text)
        count -= "ask" not in line
        yield line


def _start(up: Lab, rank: int, folder: Path) -> subprocess.Popen[str]:
    seats = up.seats
    env = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(seats)),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": seats[0].address,
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "ECHELON_RUN": str(folder),
    }
    return subprocess.Popen(
        [*seats[rank].prefix, sys.executable, str(Path(__file__).resolve()), str(folder / "settings.json")],
        env=env,
        stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        text=True,
    )


# In the workers --------------------------------------------------------------------------------------


class Worker:
    """One worker of a lab."""

    def __init__(self) -> None:
        import torch

        import echelon

        torch.set_num_threads(1)
        logging.disable(logging.INFO)
        self.session = echelon.join(
            collective="ring", shares="equal", record=False, round_timeout_s=120, timeout_s=120
        )
        self.group = self.session._group
        self.rank, self.size = self.session.rank, self.session.world_size
        self.link: Any = None

    def quotas(self, cpus: Sequence[float | None], rates: Mapping[str, float] | None = None) -> None:
        """Let the driver set quotas and links, and wait until it has."""
        if self.rank == 0:
            print(json.dumps({"ask": list(cpus), "rates": rates or {}}), flush=True)
            sys.stdin.readline()
        self.barrier()

    def links(self, rates: Mapping[str, float] | None) -> None:
        """Let the driver set links, and measure them as `join` does."""
        if rates is None:
            return
        self.quotas([None] * self.size, rates)
        self.group.arrange("auto")
        links = self.group.measure_links() if self.size > 1 else None
        if links is not None:
            self.link = links.slowest
            vars(self.session._synchronizer)["_link"] = links.slowest

    def barrier(self) -> None:
        """All workers meet."""
        if self.size > 1:
            self.session.barrier()

    def do(self, setting: Setting) -> dict[str, Any]:
        """Carry out one setting."""
        options = {key: value for key, value in setting.items() if key not in ("do", "rates")}
        action: Callable[..., dict[str, Any]] = getattr(self, f"do_{setting['do']}")
        self.links(setting.get("rates"))
        found = action(**options)
        self.quotas([None] * self.size)
        return found

    def choose(self, collective: str) -> None:
        """Models that are prepared from now on use this collective."""
        measured = collective == "auto" and self.link is not None
        self.group.arrange(str(AutoCollective.measured(self.link)) if measured else collective)

    def do_profile(self, model: str, batch: int, limit_s: float = 1.0) -> dict[str, Any]:
        """What the model costs here, without quotas; all workers but the first do nothing."""
        if self.rank:
            return {}
        import torch

        from echelon.train.profile_job import profile_model

        net, draw = build(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

        def loss_of(size: int) -> Callable[[], Any]:
            x, y = draw(size)
            return lambda: torch.nn.functional.cross_entropy(net(x), y)

        found = profile_model(model, net, loss_of, optimizer, batch=batch, limit_s=limit_s)
        return dataclasses.asdict(found)

    def do_alone(
        self, model: str, shares: Sequence[int], cpus: Sequence[float | None], seconds: float = 1.0
    ) -> dict[str, Any]:
        """Whole steps of every worker for itself, all at the same time."""
        step = stepping(self.session, model, shares[self.rank], None)
        step()
        self.quotas(cpus)
        walls = []
        begun = time.perf_counter()
        cpu = time.process_time()
        while time.perf_counter() - begun < seconds or len(walls) < 3:
            step_begun = time.perf_counter()
            step()
            walls.append(time.perf_counter() - step_begun)
        took, spent = time.perf_counter() - begun, time.process_time() - cpu
        found = {"wall_s": self.all_of(took / len(walls)), "cpu_s": self.all_of(spent / len(walls))}
        self.barrier()
        return found

    def do_reduce(
        self, size_bytes: int, cpus: Sequence[float | None], collective: str = "auto", seconds: float = 0.5
    ) -> dict[str, Any]:
        """All-reduces, one after the other."""
        import torch

        self.choose(collective)
        buffer = torch.zeros(size_bytes // 4)
        self.quotas(cpus)
        found = self.timed(lambda: self.group.all_reduce(buffer).wait(), seconds)
        return {**found, "step_s": min(found["rounds_s"])}  # other programs only make it longer

    def do_train(
        self,
        model: str,
        shares: Sequence[int],
        collective: str,
        overlap: str,
        cpus: Sequence[float | None],
        seconds: float = 2.5,
    ) -> dict[str, Any]:
        """Steps of all workers."""
        self.choose(collective)
        step = stepping(self.session, model, shares[self.rank], overlap)
        for _ in range(3):
            step()
        self.quotas(cpus)
        for _ in range(2):
            step()
        return self.timed(step, seconds)

    def timed(self, step: Callable[[], object], seconds: float) -> dict[str, Any]:
        """Seconds of a step, wall and CPU of every worker: the median of three parts of one run.

        Nobody meets between the parts: with overlap="step" work of the last step is still under way.
        """
        self.barrier()
        begun = time.perf_counter()
        for _ in range(3):
            step()
        self.barrier()
        took = self.most((time.perf_counter() - begun) / 3)
        count = max(6, int(seconds / 3 / took))
        step()
        walls, cpus = [], []
        for _ in range(3):
            begun, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                step()
            walls.append((time.perf_counter() - begun) / count)
            cpus.append((time.process_time() - cpu) / count)
        all_cpus = self.all_of(statistics.median(cpus))
        return {"step_s": statistics.median(walls), "rounds_s": walls, "cpu_s": all_cpus}

    def all_of(self, value: float) -> list[float]:
        """Every worker's value, by rank."""
        import torch

        mine = torch.tensor([value], dtype=torch.float64)
        return [float(one) for one in self.group.all_gather(mine)] if self.size > 1 else [value]

    def most(self, value: float) -> float:
        """The largest of all workers' values."""
        import torch

        whole = torch.tensor([value], dtype=torch.float64)
        return value if self.size == 1 else float(self.group.all_reduce(whole, "max").wait())


def build(model: str) -> tuple[Any, Callable[[int], tuple[Any, Any]]]:
    """A model, and a function that draws a batch."""
    import torch

    from echelon.zoo.dataset import SampleSpec
    from echelon.zoo.model import MODELS as ZOO

    text, shape = MODELS[model]
    torch.manual_seed(0)
    net = ZOO.build(text).build(SampleSpec(shape=shape, dtype="float32", classes=10, task="classify"))
    return net, lambda size: (torch.randn(size, *shape), torch.randint(10, (size,)))


def stepping(session: Any, model: str, share: int, overlap: str | None) -> Callable[[], None]:
    """One step of training on a share."""
    import torch

    net, draw = build(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    x, y = draw(share)
    if overlap is not None:
        net, optimizer = session.prepare(net, optimizer, overlap=overlap, factors="never")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def main() -> None:
    """In every worker: all settings in order."""
    worker = Worker()
    settings: list[Mapping[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
    for setting in settings:
        found = worker.do(dict(setting))
        if worker.rank == 0:
            print(json.dumps(found), flush=True)
    worker.barrier()
    worker.session.close()


if __name__ == "__main__":
    main()
