"""A whole run: folder, plan, lab, workers, faults, summary.

prepare: check the settings before anything is created
start:   create the run folder, the emulated cluster if one is asked for, and the workers
watch:   show the leader's output and all events, inject faults, notice the first failure and Ctrl-C
end:     leave no worker, namespace or control group behind; write the summary
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil  # type: ignore[import-untyped]

from echelon.checkpoint.retention import Best
from echelon.cluster.cores import pinned
from echelon.cluster.delay import DELAYS
from echelon.cluster.lab.lab import Lab, Seat
from echelon.cluster.lab.needs import has_netem
from echelon.cluster.lab.spec import LabSpec, NodeSpec, read_lab
from echelon.cluster.machine import usable_cores
from echelon.codec.codec import CODECS
from echelon.codec.fitting import refuse_momentum
from echelon.comm.meet import secret
from echelon.comm.meet.place import PORT_VARIABLE, SERVERS_VARIABLE
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.config.units import show_bytes
from echelon.errors import ConfigError, LaunchError
from echelon.membership.slow import NOBODY, SlowRule
from echelon.observe.events import (
    LAUNCHER,
    RunStarted,
)
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import Summary, whole_summary, write_summary
from echelon.plan.groups import by_site, parse_groups
from echelon.plan.placed import placed
from echelon.plan.plan import Plan, PlanRequest, WorkerPlan, make_plan
from echelon.plan.told import topology_of_lab
from echelon.start import recorded_command, remote
from echelon.start.agents.board import AgentBoard
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.auto_plan import planned_by_itself
from echelon.start.command import WorkerCommand
from echelon.start.control import WORKER_BYTES, RunControl
from echelon.start.earlier_run import keep_job, script_job
from echelon.start.failure import Failure, alike, read_failures
from echelon.start.further import ScriptDigest, why_nobody_joins
from echelon.start.further_machines import FurtherMachines
from echelon.start.lab_course import LabCourse
from echelon.start.member_board import FileBoard
from echelon.start.members import Members
from echelon.start.planned import NO_PLAN, by_plan, in_order_of_plan
from echelon.start.processes import WorkerProcesses
from echelon.start.recorded_command import RecordedCommand
from echelon.start.ring_form import in_ring_form
from echelon.start.watching import RunWatch, Watcher, stop_signals
from echelon.sync.cluster import planned_cluster
from echelon.sync.detector import DETECTORS
from echelon.sync.policies.none import NoSync
from echelon.train.checks import check_plan, refuse_losses

_LAB_PORT = 29400
_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended. `code` is the exit code for the launcher's own process.

    `alike` are the other workers that failed with the same error as `failure`. `unrecorded` says why the
    record is not complete. `checkpoints` is the folder that the run saves to by itself.
    """

    folder: RunFolder
    code: int
    workers: int
    summary: Summary
    failure: Failure | None = None
    alike: tuple[int, ...] = ()
    node: str = ""
    log_tail: str = ""
    unrecorded: str = ""
    checkpoints: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the workers run: a script or a module, and its arguments.

    `call` is a pickled call, which the module `echelon.start.call` carries out. `plans`: a plan is made
    before the start, if machines and job are known.
    """

    argv: Sequence[str]
    name: str
    call: bytes = b""
    plans: bool = False


def run(
    resolved: Resolved[RunSettings], target: Target, watcher: Watcher, notes: Sequence[str] = ()
) -> RunResult:
    """Carry out a whole run; `notes` are shown and recorded at its start."""
    if resolved.settings.plan == NO_PLAN:
        resolved = Resolved(replace(resolved.settings, plan=None), resolved.origins)
        target = replace(target, plans=False)
    resolved = in_order_of_plan(resolved)
    with remote.connected(resolved.settings) as agents:
        return _run(resolved, target, watcher, agents, notes)


def _run(
    resolved: Resolved[RunSettings],
    target: Target,
    watcher: Watcher,
    agents: Sequence[ConnectedAgent],
    given_notes: Sequence[str],
) -> RunResult:
    settings = resolved.settings
    spec = read_lab(settings.lab) if settings.lab else None
    notes: list[str] = []
    if settings.sync != "full" and not agents:
        resolved, notes = in_ring_form(resolved, _count_workers(settings, spec))
        settings = resolved.settings
    job = script_job(settings, target.argv) if target.plans and not settings.plan else None
    if settings.plan:
        resolved, plan = _by_plan(resolved, spec, agents)
        settings = resolved.settings
    else:
        plan = _plan(settings, spec, remote.nodes(agents))
        if agents:
            plan = remote.with_threads(plan, agents, settings.threads)
        if job is not None:
            plan, planned = planned_by_itself(resolved, plan, spec, job)
            notes += planned
    if spec is not None:
        emulated = spec.wants_latency and has_netem()
        plan = placed(plan, topology_of_lab(spec, latency_emulated=emulated))
    if settings.port is not None and spec is None and not agents:
        _check_port(settings.port)
    if settings.checkpoint_best is not None:
        Best.parse(settings.checkpoint_best, where="--checkpoint-best")
    if settings.saves and settings.checkpoint is None and agents:
        raise ConfigError(
            "workers on other machines have no run folder that stays, so there is no place for checkpoints",
            where="--checkpoint-every",
            fix="name a folder of the first machine with --checkpoint",
        )
    _check_losses(settings, plan)
    folder = RunFolder.create(Path(settings.runs), settings.name or target.name)
    resolved = _with_checkpoints(resolved, folder, agents)
    settings = resolved.settings
    plan = replace(plan, run=folder.name)
    _write(folder.config, resolved.to_toml())
    _write(folder.plan, plan.to_toml())
    _keep_command(folder, settings, target)
    if target.call:
        folder.results.mkdir()
    with ExitStack() as stack:
        recorder = stack.enter_context(Recorder(folder.events_of(LAUNCHER)))
        recorder.emit(
            RunStarted(
                t=time.time(),
                rank=LAUNCHER,
                run=folder.name,
                command=[os.fsencode(word).decode(errors="backslashreplace") for word in sys.argv],
                world_size=len(plan.workers),
                sync=plan.sync,
            )
        )
        stopped = stack.enter_context(stop_signals())
        lab = stack.enter_context(Lab.up(spec, folder.name)) if spec else None
        # The job of `echelon train` is known to train; another script may never join, or never train.
        bounded = not isinstance(settings, TrainSettings)
        course = None
        if lab is not None:
            workers = len(plan.workers)
            course = stack.enter_context(LabCourse(lab, folder, workers, bounded=bounded, seed=plan.seed))
        watch = RunWatch(folder, plan, course, recorder, watcher, stopped, saves=settings.saves)
        for note in [*given_notes, *notes, *(lab.notes if lab else ())]:
            watch.note(note)
        board = AgentBoard() if agents and _may_lose(settings, plan) else None
        members = _members(settings, plan, folder, board)
        if members is not None:
            stack.callback(members.close)
            script = ScriptDigest(target.argv)
            obstacle = why_nobody_joins(plan, saves=settings.saves, elsewhere=bool(agents))
            door = FurtherMachines(folder, plan, settings, target.argv, agents, members) if agents else None
            invitations = door.invitations if door is not None and not target.call else None
            control = RunControl(folder, members, script, obstacle, invitations)
            stack.callback(control.close)
            watch.members = members
            if door is not None:
                stack.callback(door.close)
                watch.joiners = door.joiners
        if agents:
            failure, code = watch.run(
                lambda: remote.start(
                    agents, plan, settings, target.argv, folder, target.call, members=members, board=board
                )
            )
        else:
            if target.call:
                folder.call.write_bytes(target.call)
                stack.callback(folder.call.unlink, missing_ok=True)
            commands = _commands(plan, settings, target, folder, lab, members)
            watch.last_command = commands[len(plan.workers) - 1]
            failure, code = watch.run(lambda: WorkerProcesses(folder, commands, saves=settings.saves))
    if job is not None and code == 0:
        keep_job(job, plan, folder)
    tail = b""
    if failure is not None and folder.log_of(failure.rank).exists():
        tail = folder.log_of(failure.rank).read_bytes()[-_TAIL_BYTES:]
    summary, unrecorded = _summary(folder)
    return RunResult(
        folder=folder,
        code=code,
        workers=len(plan.workers),
        summary=summary,
        unrecorded=unrecorded,
        checkpoints=Path(settings.checkpoint) if settings.checkpoint else None,
        failure=failure,
        alike=alike(failure, read_failures(folder)) if failure else (),
        node=_node_of(plan, failure.rank) if failure else "",
        log_tail=tail.decode(errors="replace"),
    )


def _node_of(plan: Plan, rank: int) -> str:
    """Where a worker or server ran; those that have joined run where the last one does."""
    nodes = [*(worker.node for worker in plan.workers), *plan.servers]
    return nodes[min(rank, len(nodes) - 1)]


def _with_checkpoints(
    resolved: Resolved[RunSettings], folder: RunFolder, agents: Sequence[ConnectedAgent]
) -> Resolved[RunSettings]:
    """Settings that name the folder of checkpoints so that it is found from anywhere."""
    settings = resolved.settings
    if not settings.saves or (agents and settings.checkpoint):
        return resolved
    root = Path(settings.checkpoint).absolute() if settings.checkpoint else folder.checkpoints
    return Resolved(replace(settings, checkpoint=str(root)), resolved.origins)


def _keep_command(folder: RunFolder, settings: RunSettings, target: Target) -> None:
    kind: Literal["run", "train", "function"] = "train" if isinstance(settings, TrainSettings) else "run"
    command = RecordedCommand(
        kind="function" if target.call else kind,
        argv=list(target.argv),
        name=target.name,
        cwd=str(Path.cwd()),
    )
    recorded_command.keep(folder, command)


def _summary(folder: RunFolder) -> tuple[Summary, str]:
    """The run's figures, and why they could not be written; a full disk is no failure of the run."""
    try:
        return write_summary(folder), ""
    except ConfigError as error:
        return whole_summary(folder), error.message


def _by_plan(
    resolved: Resolved[RunSettings], spec: LabSpec | None, agents: Sequence[ConnectedAgent]
) -> tuple[Resolved[RunSettings], Plan]:
    """The plan of a file, and settings that agree with it; raises ConfigError if it cannot work."""
    machines, threads_on = remote.nodes(agents), remote.threads_on(agents)
    resolved, plan = by_plan(resolved, spec, machines, threads_on=threads_on, cores=usable_cores())
    if not agents:
        _check_memory(len(plan.workers) + len(plan.servers))
    _check_sync(plan, resolved.settings)
    return resolved, plan


def _plan(settings: RunSettings, spec: LabSpec | None, machines: Sequence[str] = ()) -> Plan:
    """The plan that the settings ask for; raises ConfigError if it cannot work."""
    if settings.delay:
        DELAYS.build(settings.delay, where="--delay")
    count = len(machines) or _count_workers(settings, spec)
    if not machines:
        _check_memory(count + settings.servers)
    workers, servers = _places(settings, spec, count)
    if settings.groups:
        groups = parse_groups(settings.groups, count)
    else:
        groups = by_site([node.site for node in workers])
    host = socket.gethostname()
    asked = PlanRequest(
        shares=settings.shares,
        speeds=settings.speeds,
        delay=settings.delay or "",
        delayed=settings.delayed,
        groups=groups,
        threads=settings.threads or (1 if spec else None),
        **settings.choices.chosen(),
    )
    plan = make_plan(
        "",
        [node.name for node in workers] or list(machines) or [host] * count,
        asked,
        cores=usable_cores(),
        rated=[node.cpu or 1.0 for node in workers],
    )
    by_machine = list(dict.fromkeys(machines)) or [host]
    spread = [by_machine[at % len(by_machine)] for at in range(settings.servers)]
    names = [node.name for node in servers] or spread
    plan = replace(plan, servers=tuple(names))
    _check_sync(plan, settings)
    return plan


def _count_workers(settings: RunSettings, spec: LabSpec | None) -> int:
    """As many as asked for; otherwise one for each speed, or for each node of the lab without a server."""
    apart = 0 if settings.colocate_servers else settings.servers
    in_lab = max(1, len(spec.nodes) - apart) if spec else 1
    count = settings.workers or len(settings.speeds) or in_lab
    if isinstance(settings, TrainSettings) and count > settings.batch:
        raise ConfigError(
            f"a batch of {settings.batch} cannot be shared by {count} workers",
            where="--batch",
            fix=f"use a batch of at least {count}, or fewer workers",
        )
    if settings.servers and count == 1:
        raise ConfigError(
            "there is nothing to serve with one worker", where="--servers", fix="start several workers"
        )
    return count


def _places(
    settings: RunSettings, spec: LabSpec | None, count: int
) -> tuple[list[NodeSpec], list[NodeSpec]]:
    """The lab's nodes of workers and of servers; empty without a lab."""
    if spec is None:
        return [], []
    nodes = [spec.nodes[rank % len(spec.nodes)] for rank in range(count + settings.servers)]
    workers = nodes[:count]
    if settings.colocate_servers:
        return workers, [workers[server % count] for server in range(settings.servers)]
    return workers, nodes[count:]


def _check_sync(plan: Plan, settings: RunSettings) -> None:
    """Refuse, before anything is started, a policy or codec that cannot work."""
    several = len({worker.node for worker in plan.workers}) > 1
    cluster = planned_cluster(
        plan,
        links=(1.0,) * len(plan.workers) if several else (),  # measured when workers have joined
        lr=settings.lr if isinstance(settings, TrainSettings) else 1.0,
    )
    check_plan(plan, cluster)
    if isinstance(settings, TrainSettings):
        codec = CODECS.build(plan.codec, where="--codec")
        adam = settings.optimizer == "adamw"
        refuse_momentum(codec, 0.9 if adam else settings.momentum, "AdamW" if adam else "SGD")


def _check_losses(settings: RunSettings, plan: Plan) -> None:
    """Refuse --min-workers where a run cannot go on without a worker."""
    if settings.leave_out != NOBODY:
        _check_leaving_out(settings, plan)
    if settings.min_workers is None:
        return
    if settings.min_workers > len(plan.workers):
        raise ConfigError(
            f"{settings.min_workers} workers are needed, and {len(plan.workers)} are started",
            where="--min-workers",
            fix=f"give at most {len(plan.workers)}",
        )
    if settings.saves and (settings.hosts or settings.on != "local"):
        raise ConfigError(
            "a run on several machines that goes on when workers are lost cannot save by itself yet",
            where="--checkpoint",
            fix="leave --min-workers or --checkpoint out",
        )
    refuse_losses(plan)


def _check_leaving_out(settings: RunSettings, plan: Plan) -> None:
    """Refuse --leave-out where nobody can be left out."""
    DETECTORS.build(settings.leave_out, where="--leave-out")
    if settings.min_workers is None:
        raise ConfigError(
            "workers can be left out only of a run that goes on without them",
            where="--leave-out",
            fix="say how many workers are needed, with --min-workers",
        )
    missing = (
        f"--sync {plan.sync}"
        if plan.sync != "full"
        else f"--codec {plan.codec}"
        if plan.codec != "none"
        else "a run on several machines"
        if settings.hosts or settings.on != "local"
        else ""
    )
    if missing:
        raise ConfigError(
            f"{missing} cannot leave out slow workers yet",
            where="--leave-out",
            fix="leave --leave-out away, or use --sync full without a codec",
        )


def _may_lose(settings: RunSettings, plan: Plan) -> bool:
    return settings.min_workers is not None and len(plan.workers) > 1


def _members(
    settings: RunSettings, plan: Plan, folder: RunFolder, board: AgentBoard | None
) -> Members | None:
    """The service that workers ask when one of them is lost; None if a loss ends the run."""
    if not _may_lose(settings, plan):
        return None
    averages = plan.sync != NoSync.name  # else there is no moment at which one could come back
    return Members(
        len(plan.workers),
        settings.min_workers or 1,
        limit_s=plan.round_timeout_s,
        tries=settings.respawn if averages else 0,
        board=board or FileBoard(folder.path / "admission", local=settings.lab is None),
        slow=_slow(settings, plan),
    )


def _slow(settings: RunSettings, plan: Plan) -> SlowRule | None:
    """Who decides which workers are too slow; None if nobody is left out for that."""
    if settings.leave_out == NOBODY:
        return None
    detector = DETECTORS.build(settings.leave_out, where="--leave-out")
    return SlowRule(detector, adapts=plan.adapt_shares)


def _commands(
    plan: Plan,
    settings: RunSettings,
    target: Target,
    folder: RunFolder,
    lab: Lab | None,
    members: Members | None = None,
) -> list[WorkerCommand]:
    seats: dict[str, Seat] = {seat.node: seat for seat in lab.seats} if lab else {}
    address = seats[plan.workers[0].node].address if lab else "127.0.0.1"
    port = settings.port or (_LAB_PORT if lab else _free_port())
    torch_port = _free_port()
    known = secret.for_workers(os.environ)
    on_node: dict[str, int] = {}
    commands = []
    first = len(plan.workers)
    serving = [
        WorkerPlan(rank=rank, node=node, threads=1) for rank, node in enumerate(plan.servers, start=first)
    ]
    for worker in (*plan.workers, *serving):
        local_rank = on_node.get(worker.node, 0)
        on_node[worker.node] = local_rank + 1
        seat = seats.get(worker.node)
        env = {
            **os.environ,
            **known,
            SERVERS_VARIABLE: str(len(serving)),
            "RANK": str(worker.rank),
            "WORLD_SIZE": str(len(plan.workers)),
            "LOCAL_RANK": str(local_rank),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port + 1 if lab else torch_port),  # free for the script's torch.distributed
            PORT_VARIABLE: str(port),
            "OMP_NUM_THREADS": str(worker.threads),
            "MKL_NUM_THREADS": str(worker.threads),
            "PYTHONUNBUFFERED": "1",
            "ECHELON_RUN": str(folder.path),
            "ECHELON_LAUNCHER": str(os.getpid()),
            **(members.environment if members is not None else {}),
        }
        if worker not in serving:
            env |= pinned(settings.pin, local_rank, len(plan.workers))
        if seat is not None:
            env["GLOO_SOCKET_IFNAME"] = seat.interface
        prefix = seat.prefix if seat else ()
        what = ["-m", "echelon.server.process"] if worker in serving else target.argv
        argv = [*prefix, sys.executable, "-m", "echelon.start.worker", *what]
        # A worker of a lab must enter its namespace and control group before it is Python, and a server
        # is to be found by its command line: both are started by exec.
        by_fork = settings.start == "fork" and lab is None and worker not in serving
        program = what if by_fork else ()
        commands.append(
            WorkerCommand(rank=worker.rank, node=worker.node, argv=argv, env=env, program=program)
        )
    return commands


def _write(path: Path, text: str) -> None:
    try:
        path.write_bytes(text.encode(errors="backslashreplace"))
    except OSError as error:
        raise LaunchError(
            f"cannot write {path.name}: {error.strerror}",
            where=str(path.parent),
            fix="make room there, or give another place with --runs",
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_memory(workers: int) -> None:
    """Refuse more workers than memory allows: importing torch alone takes some for each."""
    available_bytes = psutil.virtual_memory().available
    if workers * WORKER_BYTES > available_bytes:
        raise LaunchError(
            f"{workers} workers need at least {show_bytes(workers * WORKER_BYTES)} of memory, "
            f"of which {show_bytes(available_bytes)} are available",
            where="--workers",
            fix=f"start at most {available_bytes // WORKER_BYTES}",
        )


def _check_port(port: int) -> None:
    """Refuse a port that another program uses."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used: {error.strerror}",
                where="--port",
                fix="give another one, or leave it out to have a free one chosen",
            ) from error
