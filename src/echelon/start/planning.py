"""Which machines and which job is to be planned? From a lab, hosts, a cluster file, a run, or this machine.

`machines_and_job` finds both; `timed_best` times the best candidates of a search for a few steps each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.cluster.lab.needs import has_netem
from echelon.cluster.lab.spec import read_lab
from echelon.cluster.machine import usable_cores
from echelon.config.schema import TrainSettings
from echelon.errors import ConfigError
from echelon.observe.run_folder import RunFolder
from echelon.plan.cluster_file import read_cluster
from echelon.plan.job import JobProfile
from echelon.plan.make import plan_of
from echelon.plan.placed import placed
from echelon.plan.plan import Plan, PlanRequest
from echelon.plan.plan_file import plan_text
from echelon.plan.search import SearchResult
from echelon.plan.told import topology_of_lab
from echelon.plan.topology import Topology
from echelon.plan.trials import SearchCandidate
from echelon.simulate.recorded_cluster import recorded_run
from echelon.start.few_steps import profile_script, timed_step_s
from echelon.start.run import Target

Say = Callable[[str], None]
TIMED_STEPS = 25
_SOURCES = ("cluster", "lab", "hosts", "run", "workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningAsked:
    """What the user asks to be planned: machines by one of the first five, a job by one of the others."""

    cluster: str | None = None
    lab: str | None = None
    hosts: str | None = None
    run: str | None = None
    workers: int | None = None
    runs: str = "runs"
    probe: bool = False
    script: str | None = None
    args: tuple[str, ...] = ()
    model: str | None = None
    data: str = "digits"
    batch: int | None = None

    def check(self) -> None:
        """Refuse machines that are told in two ways, and a job that is."""
        given = [f"--{name}" for name in _SOURCES if getattr(self, name)]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)} both say which machines there are",
                where=given[1],
                fix="give one of them",
            )
        if self.script and self.model:
            raise ConfigError(
                "a script and --model both say what is trained", where="--model", fix="give one of them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Machines and job, and how they are known."""

    topology: Topology
    job: JobProfile
    notes: tuple[str, ...] = ()


def machines_and_job(asked: PlanningAsked, say: Say) -> Known:
    """Read or measure the machines and the job; `say` is told what takes a while."""
    asked.check()
    if asked.run:
        return _recorded(asked)
    if asked.cluster:
        return _from_file(asked, say)
    if asked.lab and not asked.probe:
        spec = read_lab(asked.lab)
        emulated = spec.wants_latency and has_netem()
        topology = topology_of_lab(spec, cores=usable_cores(), latency_emulated=emulated)
        return Known(topology=topology, job=_job(asked, say, threads=1))
    if asked.script:
        job = _job(asked, say, threads=1)
        topology, _, notes = _probed(replace(asked, script=None), say)
        return Known(topology=topology, job=job.on_topology(topology.reference_s), notes=notes)
    topology, found, notes = _probed(asked, say)
    if found is None:
        raise _no_job()
    return Known(topology=topology, job=found, notes=notes)


def _recorded(asked: PlanningAsked) -> Known:
    folder = RunFolder.find(asked.run or "latest", Path(asked.runs))
    found = recorded_run(folder)
    job = replace(found.job, batch=asked.batch or found.job.batch)
    return Known(topology=found.topology, job=job, notes=found.notes)


def _from_file(asked: PlanningAsked, say: Say) -> Known:
    file = asked.cluster or ""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read the cluster file: {reason}",
            where=file,
            fix="make one with echelon probe -o cluster.toml",
        ) from None
    found = read_cluster(text, file)
    if asked.model or asked.script:
        job = _job(asked, say, threads=None)
        return Known(topology=found.topology, job=job.on_topology(found.topology.reference_s))
    if found.job is None:
        raise _no_job()
    return Known(topology=found.topology, job=replace(found.job, batch=asked.batch or found.job.batch))


def _job(asked: PlanningAsked, say: Say, *, threads: int | None) -> JobProfile:
    """The cost of the job on this machine without a quota: speed 1 is this machine's."""
    if asked.script:
        say(f"running a few steps of {asked.script} here")
        found = profile_script(asked.script, asked.args)
        from echelon.train.probe_job import fixed_step_s  # imports torch

        return replace(found, batch=asked.batch or found.batch, reference_s=fixed_step_s(threads=1))
    if asked.model is None:
        raise _no_job()
    from echelon.start.probe import ProbeAsked, probe  # imports torch

    say(f"profiling {asked.model} here")
    alone = ProbeAsked(
        workers=1, threads=threads, model=asked.model, data=asked.data, batch=asked.batch or 64
    )
    job = probe(alone, say).job
    if job is None:
        raise ConfigError(
            f"{asked.model} does not fit this machine",
            where="--model",
            fix="give a cluster file with [job]",
        )
    return replace(job, costs={})


def _probed(asked: PlanningAsked, say: Say) -> tuple[Topology, JobProfile | None, tuple[str, ...]]:
    if not asked.hosts and not asked.lab and not asked.workers:
        raise ConfigError(
            "no machines are given",
            where="echelon plan",
            fix="give --lab L, --hosts a:2,b:4, --cluster FILE, --run RUN, or --workers N for this machine",
        )
    if asked.model is None and not asked.batch and not asked.lab and not asked.hosts and not asked.workers:
        raise _no_job()
    from echelon.start.probe import ProbeAsked, probe

    found = probe(
        ProbeAsked(
            workers=asked.workers,
            hosts=asked.hosts,
            lab=asked.lab,
            model=asked.model or "",
            data=asked.data,
            batch=asked.batch or 64,
        ),
        say,
    )
    left = tuple(f"{name} is planned without: {why}" for name, why in found.left_out.items())
    return found.topology, found.job, (*left, *found.reasons, *found.notes)


def _no_job() -> ConfigError:
    return ConfigError(
        "no job is given, so there is nothing to plan for",
        where="echelon plan",
        fix="give a script, --model M --data D --batch B, a cluster file with [job], or --run RUN",
    )


def made_plan(known: Known, result: SearchResult, asked: PlanRequest | None = None) -> Plan:
    """The plan of a search's best candidate, with what is known about machines and links.

    Its shares are those of the first steps; as in any run, they then follow measured speeds, unless `asked`
    says otherwise.
    """
    request = asked or PlanRequest()
    return placed(plan_of(result, known.topology, known.job, request, run=""), known.topology)


def timed_best(
    asked: PlanningAsked, known: Known, result: SearchResult, say: Say
) -> tuple[SearchResult, list[tuple[SearchCandidate, float]]]:
    """Time the best candidates for a few steps each; the result with the fastest as best."""
    if asked.model is None or not (asked.lab or asked.hosts or asked.workers):
        raise ConfigError(
            "only a built-in model on a lab, on hosts or on this machine can be timed",
            where="--time-best",
            fix="give --model, and --lab, --hosts or --workers; or leave it out",
        )
    timed: list[tuple[SearchCandidate, float]] = []
    for number, candidate in enumerate(result.top, start=1):
        say(f"timing {number} of {len(result.top)}: predicted {candidate.step_s * 1e3:.1f} ms")
        # Candidates are compared by the shares that they were predicted with.
        plan = made_plan(known, replace(result, best=candidate), PlanRequest(shares="equal"))
        timed.append((candidate, _timed_s(asked, plan)))
    best = min(timed, key=lambda one: one[1])[0]
    return replace(result, best=best), timed


def _timed_s(asked: PlanningAsked, plan: Plan) -> float:
    with tempfile.TemporaryDirectory(prefix="echelon-plan-") as folder:
        file = Path(folder) / "plan.toml"
        file.write_text(plan_text(plan))
        given: dict[str, Any] = {
            "plan": str(file),
            "lab": asked.lab,
            "hosts": asked.hosts,
            "model": asked.model,
            "data": asked.data,
            "epochs": 1000,
        }
        target = Target(argv=["-m", "echelon.train.job"], name=asked.model or "")
        return timed_step_s(TrainSettings, given, target, TIMED_STEPS)
