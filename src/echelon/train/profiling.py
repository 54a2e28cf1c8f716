"""What kind of job is this run? The leader profiles its first model in the first steps, and writes it down.

If several workers reduce gradients in every step, and there is a record, the run's folder gets a file
`cluster.toml`: the machines with the links that were measured when workers joined, and the job, for
`echelon plan --cluster`. The plan gets a reason, `job`: what limits this job on these machines. A run that
ends before its first steps are over has neither. Nothing here ends a run: what fails is told in a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from echelon.comm.meet.links import Links
from echelon.comm.meet.rendezvous import Member
from echelon.comm.memory.rails import machines
from echelon.config.call import parse_call
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.observe.run_folder import RunFolder
from echelon.plan.arrange import topology_of_links
from echelon.plan.bound import classify
from echelon.plan.cluster_file import write_cluster
from echelon.plan.job import JobProfile
from echelon.plan.plan import Plan
from echelon.plan.predict.predict import predict
from echelon.plan.topology import Node, Topology
from echelon.train.clock import StepClock
from echelon.train.first_steps import StepProfiler
from echelon.train.linear import is_compiled
from echelon.train.loader import SharedLoader
from echelon.train.script_log import ScriptLog


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """What a profile needs of the run.

    folder   None if nothing is recorded
    links    None if they were not measured
    loaders  those that are prepared; more may come
    """

    log: ScriptLog
    plan: Plan
    folder: RunFolder | None
    members: Sequence[Member]
    links: Links | None
    clock: StepClock
    loaders: Sequence[SharedLoader]


class JobProfiling:
    """Profiles one model of a run, the first one. Without a run it does nothing."""

    def __init__(self, run: ProfiledRun | None) -> None:
        wanted = run is not None and run.folder is not None and parse_call(run.plan.sync).name == "full"
        self._run = run if wanted else None
        self._profiler: StepProfiler | None = None

    def preparing(self, models: Sequence[nn.Module]) -> None:
        """These models are about to be prepared, and have no hooks yet."""
        run = self._run
        if run is None or self._profiler is not None or not models:
            return
        if any(_is_translated(module) for module in models[0].modules()):
            self._run = None  # hooks would make torch translate it again
            return
        with _noted(run):
            self._profiler = StepProfiler(
                models[0],
                name=type(models[0]).__name__,
                batch=1,
                done=lambda profile: _written(run, profile),
                failed=lambda error: _tell(run, error),
                waited_s=lambda: run.clock.waited_s,
                share=lambda: _share(run.loaders),
            )

    def prepared(self) -> None:
        """The models are prepared: watch the first one."""
        if self._profiler is not None and self._run is not None:
            run, self._run = self._run, None
            with _noted(run):
                self._profiler.attach()

    def called(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        """A prepared model is called."""
        if self._profiler is not None and self._profiler.attached:
            self._profiler.called(module, given)

    def end(self) -> None:
        """Stop watching."""
        self._run = None
        if self._profiler is not None:
            self._profiler.detach()


def machine_topology(plan: Plan, hosts: Sequence[Sequence[int]], links: Links | None) -> Topology:
    """The machines by the plan's names; `hosts` are the ranks of each machine's workers.

    A machine with several workers has their speeds and cores together. Speeds are those that the plan
    states, relative to the leader's worker, which is profiled.
    """
    if links is not None and len(hosts) > 1:
        found = topology_of_links(links.latency_s, links.bytes_per_s, hosts)
    else:
        found = Topology(nodes=tuple(Node(name=str(ranks[0])) for ranks in hosts), known="not measured")
    unit = plan.workers[0].speed * plan.workers[0].node_speed
    names = [plan.workers[ranks[0]].node for ranks in hosts]
    nodes = []
    for node, name, ranks in zip(found.nodes, names, hosts, strict=True):
        workers = [plan.workers[rank] for rank in ranks]
        nodes.append(
            replace(
                node,
                name=name if names.count(name) == 1 else f"{name}-{ranks[0]}",
                speed=sum(worker.speed * worker.node_speed for worker in workers) / unit,
                cores=float(sum(worker.threads for worker in workers)),
            )
        )
    return replace(found, nodes=tuple(nodes))


def _written(run: ProfiledRun, profile: JobProfile) -> None:
    """Write the profile into the run's folder, and say in the plan what kind of job it is."""
    trained = [loader for loader in run.loaders if loader.trains or loader.draws_to_train]
    if not trained or run.folder is None:  # the script reads data of its own
        return
    if not trained[0].global_batch_size:
        run.log.note("no profile of the job could be made: a sampler decides how large batches are")
        return
    job = replace(profile, batch=trained[0].global_batch_size)
    topology = machine_topology(run.plan, machines(run.members), run.links)
    kind = classify(topology, job, predict=predict)
    try:
        write_whole(run.folder.cluster, write_cluster(topology, job).encode(), option="")
    except ConfigError as error:  # a record never ends a run
        run.log.note(f"no profile of the job was kept: {error.message}")
        return
    run.log.explain("job", f"{kind.bound}-bound: {kind.why}")


def _share(loaders: Sequence[SharedLoader]) -> int:
    """This worker's share of a full batch; 0 if no loader says it."""
    return next((int(getattr(loader, "batch_size", 0) or 0) for loader in loaders), 0)


def _tell(run: ProfiledRun, error: Exception) -> None:
    run.log.note(f"no profile of the job could be made: {type(error).__name__}: {error}")


@contextmanager
def _noted(run: ProfiledRun) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, training does not need it
        _tell(run, error)


def _is_translated(module: nn.Module) -> bool:
    return is_compiled(module) or isinstance(module, torch.jit.ScriptModule)
