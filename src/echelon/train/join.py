"""How a script becomes a worker: find out who and where it is, meet the others, open the record.

Under `echelon run` the launcher has made a run folder with a plan in it and says where in
ECHELON_RUN. Under any other launcher the leader makes both. Without a launcher the script is alone.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch

from echelon.cluster.delay import DELAYS
from echelon.cluster.machine import usable_cores
from echelon.cluster.pace import Pace
from echelon.codec.codec import CODECS
from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Meeting, meet
from echelon.comm.open import open_group, open_solo
from echelon.comm.wire.summing import KEEP, SERVERS_DO, SUM
from echelon.config.units import show_bytes, show_seconds
from echelon.errors import ConfigError, EchelonError
from echelon.observe.events import LinkMeasured, RunStarted, WorkerJoined
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan, PlanRequest, make_plan
from echelon.reduce.packing import sizes
from echelon.sync.policy import POLICIES
from echelon.train.clock import StepClock
from echelon.train.families.choose import needs_parameter_servers
from echelon.train.session import Session

RUN_VARIABLE = "ECHELON_RUN"
_log = logging.getLogger(__name__)


def join(
    *,
    name: str | None = None,
    seed: int | None = None,
    shares: Sequence[float] | None = None,
    timeout_s: float | None = None,
    round_timeout_s: float | None = None,
    transport: str | None = None,
    collective: str | None = None,
    overlap: str | None = None,
    factors: str | None = None,
    sync: str | None = None,
    codec: str | None = None,
    runs: str | Path = "runs",
    record: bool = True,
) -> Session:
    """Become a worker of the run that this process was started in, or a run of one.

    name             what the run's folder is called; the script's name otherwise
    seed             fixes the order of the data
    shares           each worker's part of a batch, by rank; equal otherwise
    timeout_s        how long to wait for all workers to join
    round_timeout_s  how long a worker may keep the others waiting at a round
    transport        how bytes move: auto, shm, tcp or c10d
    collective       how gradients are summed, by name; auto otherwise
    overlap          what hides communication: backward, or step (see `Session.prepare`)
    factors          whether linear layers send factors of their gradients: auto, always or never
    sync             when workers agree: a policy by name, see `echelon list sync`; full otherwise
    codec            how gradients are written: a codec by name, see `echelon list codec`; none otherwise
    runs             where the run's folder is made
    record           whether there is a record at all
    """
    place = Place.from_environment(os.environ)
    given = os.environ.get(RUN_VARIABLE)
    launched = Plan.read(RunFolder(Path(given)).plan) if given else None
    asked = PlanRequest(
        shares=",".join(f"{share:g}" for share in shares) if shares is not None else "equal",
        seed=seed or 0,
        transport=transport or (launched.transport if launched else "auto"),
        collective=collective or (launched.collective if launched else "auto"),
        overlap=overlap or (launched.overlap if launched else "backward"),
        factors=factors or (launched.factors if launched else "auto"),
        sync=sync or (launched.sync if launched else "full"),
        codec=codec or (launched.codec if launched else "none"),
        join_timeout_s=timeout_s or (launched.join_timeout_s if launched else 60.0),
        round_timeout_s=round_timeout_s or (launched.round_timeout_s if launched else 300.0),
    )
    if launched is None:  # what cannot work is refused before anybody waits for it
        make_plan("", [""] * place.world_size, asked, cores=1)
    host = socket.gethostname()
    node = launched.workers[place.rank].node if launched and place.rank < len(launched.workers) else host
    policy = POLICIES.build(asked.sync, where="sync").resolved()
    CODECS.build(asked.codec, where="codec")
    group, meeting = _connect(place, node, host, asked, sums=not needs_parameter_servers(policy))
    links = group.measure_links()
    folder = _folder(group, given, name, Path(runs)) if record else None
    plan = launched or make_plan(
        folder.name if folder else "unrecorded",
        [member.node for member in meeting.members] if meeting else [node],
        asked,
        cores=usable_cores(),
    )
    if launched:
        plan = _overrule(launched, seed, shares, asked)
    _check_plan(plan, group)
    recorder = Recorder(folder.events_of(group.rank) if folder else None)
    if folder and group.rank == 0 and not given:
        folder.plan.write_text(plan.to_toml())
        recorder.emit(
            RunStarted(
                t=time.time(),
                rank=0,
                run=folder.name,
                command=sys.argv,
                world_size=group.size,
                sync=plan.sync,
            )
        )
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    recorder.emit(
        WorkerJoined(
            t=time.time(),
            rank=group.rank,
            node=node,
            host=host,
            pid=os.getpid(),
            threads=torch.get_num_threads(),
            device=str(device),
        )
    )
    mine = plan.workers[group.rank]
    clock = StepClock(
        recorder,
        group.rank,
        pace=Pace(mine.speed) if mine.speed < 1 else None,
        delay=DELAYS.build(mine.delay) if mine.delay else None,
        seed=plan.seed,
    )
    try:
        session = Session(group, meeting, plan, clock, recorder, folder, device, links)
    except EchelonError as error:  # what was asked for does not go together: all workers find so
        if meeting is not None:
            meeting.say_goodbye(f"{type(error).__name__}: {error.message}")
        group.close()
        if meeting is not None:
            meeting.linger()
        raise
    if links is not None:
        _tell_links(session, links, recorder, group)
    _leave_at_exit(session)
    return session


def _connect(
    place: Place, node: str, host: str, asked: PlanRequest, *, sums: bool
) -> tuple[Group, Meeting | None]:
    if place.world_size == 1:
        return open_solo(), None
    meeting = meet(place, node=node, host=host, pid=os.getpid(), timeout_s=asked.join_timeout_s)
    try:
        if place.rank == 0 and place.servers:
            meeting.tell(SERVERS_DO, SUM if sums else KEEP)
        group = open_group(
            meeting,
            place,
            transport=asked.transport,
            collective=asked.collective,
            deadline_s=asked.round_timeout_s,
            timeout_s=asked.join_timeout_s,
            sums=sums,
        )
    except EchelonError as error:
        meeting.say_goodbye(f"{type(error).__name__}: {error.message}")
        meeting.linger()
        raise
    return group, meeting


def _tell_links(session: Session, links: Links, recorder: Recorder, group: Group) -> None:
    for (rank, peer), bytes_per_s in links.bytes_per_s.items():
        if rank == group.rank:
            latency_s = links.latency_s[rank, peer]
            recorder.emit(
                LinkMeasured(
                    t=time.time(), rank=rank, peer=peer, latency_s=latency_s, bytes_per_s=bytes_per_s
                )
            )
    slowest = links.slowest
    first_bytes, bucket_bytes = sizes(slowest, group.size)
    rate = f"{show_bytes(1 / slowest.seconds_per_byte)}/s and {show_seconds(slowest.latency_s)} of latency"
    session.explain(
        "links",
        f"measured between neighbours; the slowest one has {rate}",
        tell=f"links were measured: the slowest one has {rate}; the plan says what follows from it",
    )
    session.explain(
        "buckets",
        f"at most {show_bytes(bucket_bytes)}, the first {show_bytes(first_bytes)}: latency stays below a "
        "twentieth of their time on the wire; smaller ones for a small model, so that there are several",
    )
    session.explain("collective", group.reason(bucket_bytes))


def _folder(group: Group, given: str | None, name: str | None, root: Path) -> RunFolder:
    if given:
        return RunFolder(Path(given)).with_subfolders()
    path = ""
    if group.rank == 0:
        path = str(RunFolder.create(root, name or Path(sys.argv[0]).stem or "run").path)
    return RunFolder(Path(group.broadcast_bytes(path.encode()).decode())).with_subfolders()


def _overrule(launched: Plan, seed: int | None, shares: Sequence[float] | None, asked: PlanRequest) -> Plan:
    """What the script says in `join` counts more than what the launcher planned."""
    workers = launched.workers
    if shares is not None and len(shares) == len(workers):
        workers = tuple(replace(w, weight=float(s)) for w, s in zip(workers, shares, strict=True))
    return replace(
        launched,
        workers=workers,
        seed=launched.seed if seed is None else seed,
        transport=asked.transport,
        collective=asked.collective,
        overlap=asked.overlap,
        factors=asked.factors,
        sync=asked.sync,
        codec=asked.codec,
    )


def _check_plan(plan: Plan, group: Group) -> None:
    if len(plan.workers) != group.size:
        raise ConfigError(
            f"the plan is for {len(plan.workers)} workers, but {group.size} joined",
            where="plan.toml",
            fix="start as many workers as were planned",
        )


def _leave_at_exit(session: Session) -> None:
    """Close the session when the script ends, and tell the others why if it ends badly."""
    before = sys.excepthook
    known = weakref.ref(session)  # a closed session, with all that it prepared, can go

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        left = known()
        if left is not None:
            left.close(f"{kind.__name__}: {error}".strip().partition("\n")[0])

    sys.excepthook = tell
    atexit.register(session.close)
