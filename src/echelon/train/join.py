"""How a script becomes a worker: find its place, check the plan, connect, open the record.

Under `echelon run` the launcher has made a run folder with a plan and names it in ECHELON_RUN. Under any
other launcher the leader makes both. If there are to be servers, the last processes become servers here,
and end here. Without a launcher the script is alone, and keeps no record unless it is asked to.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
import time
import typing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, cast

import msgspec
import torch

from echelon.cluster.delay import DELAYS
from echelon.cluster.machine import usable_cores
from echelon.cluster.pace import Pace
from echelon.comm.changing import ChangingGroup
from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.meet.place import RUN_VARIABLE, Place
from echelon.comm.meet.rendezvous import Member, Rendezvous, meet
from echelon.comm.meet.resolve import await_address
from echelon.comm.open import open_group, open_solo
from echelon.comm.returning import ReturningGroup
from echelon.comm.wire.summing import KEEP, SERVERS_DO, SUM
from echelon.config.allowed import allow_names_in
from echelon.config.choices import Choices, FactorRule, Integrity, Overlap, Transport, flag
from echelon.config.registry import convert
from echelon.config.units import show_bytes, show_seconds
from echelon.errors import ConfigError, EchelonError
from echelon.observe.events import LinkMeasured, WorkerJoined, WorkersAwaited
from echelon.observe.readiness import WorkerPhase, tell
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan, PlanRequest, check_weights, make_plan, with_further
from echelon.reduce.packing import sizes
from echelon.server.process import serve
from echelon.sync.cluster import carried_out, planned_cluster
from echelon.train import threads
from echelon.train.admission import AdmissionFlag
from echelon.train.changes import FIRST_KEY, MemberChanges
from echelon.train.checkpoint_settings import checkpoint_settings, save_as_asked
from echelon.train.checks import check_plan, needs_parameter_servers, refuse_losses, refuse_without_servers
from echelon.train.clock import StepClock
from echelon.train.freed_memory import keep_freed_memory
from echelon.train.progress import OwnProgress
from echelon.train.record import RunRecord
from echelon.train.service import (
    ADDRESS_VARIABLE,
    NODE_VARIABLE,
    RETURNS_VARIABLE,
    MemberService,
    ServiceStore,
)
from echelon.train.session import Session
from echelon.train.thread_times import ThreadTimes
from echelon.train.user_traceback import hide_wrappers

_HINTS = typing.get_type_hints(Choices)
_OPTION = re.compile(r"--([a-z-]+)")
_ANSWER_S = 10.0  # the launcher answers so much later than a round may take
_ARGUMENTS = {"join_timeout_s": "timeout_s"}  # where `join` has a shorter name


def join(
    *,
    name: str | None = None,
    seed: int | None = None,
    shares: Sequence[float] | Literal["auto", "equal"] | None = None,
    timeout_s: float | None = None,
    round_timeout_s: float | None = None,
    transport: Transport | None = None,
    integrity: Integrity | None = None,
    collective: str | None = None,
    parallel: str | None = None,
    overlap: Overlap | None = None,
    factors: FactorRule | None = None,
    sync: str | None = None,
    codec: str | None = None,
    verify: str | None = None,
    servers: int | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: str | None = None,
    checkpoint_keep: int | None = None,
    checkpoint_best: str | None = None,
    runs: str | Path = "runs",
    record: bool | None = None,
) -> Session:
    """Become a worker of the run that this process was started in, or the only worker of a run of its own.

    name             the name of the run's folder; default: the script's name
    seed             fixes the order of the data
    shares           each worker's part of a batch: one number by rank; auto (by measured speed, while the
                     run goes on) or equal
    timeout_s        how long to wait for all workers to join
    round_timeout_s  how long a worker may keep the others waiting at a round
    transport        how bytes move: auto, shm, tcp or c10d
    integrity        what guards bytes between machines: authenticated, or on trusted networks checksum
    collective       how gradients are summed, see `echelon list collective`
    parallel         how one model is spread over workers, such as "pipeline(stages=2) * data"; see `echelon
                     list parallel`
    overlap          what hides communication: backward, or step (see `Session.prepare`)
    factors          whether linear layers send factors of their gradients: auto, always or never
    sync             when workers synchronise, see `echelon list sync`
    codec            how gradients are encoded, see `echelon list codec`
    verify           checks against silent corruption, separated by semicolons, see `echelon list verify`
    servers          how many of the processes that another launcher started are parameter servers
    checkpoint       the folder of checkpoints: the session saves there by itself, and continues from the
                     newest one; default with checkpoint_every: checkpoints in the run's folder
    checkpoint_every how often: 5min, 500steps or 1epoch (the default)
    checkpoint_keep  how many checkpoints stay, the newest ones; default: 3
    checkpoint_best  one more stays, the best: loss, accuracy, or NAME:min, NAME:max
    runs             the folder in which the run's folder is made
    record           whether to keep a record; default: if a launcher started the run

    The default of a choice is how the run was started. A wrong value raises ConfigError at once.

    With servers, the last processes do not return from here: they serve, and end with the run. `echelon run
    --servers` starts servers by itself. The default is what ECHELON_SERVERS says. Example:

        session = echelon.join(seed=1)
    """
    choices = {
        "seed": seed,
        "join_timeout_s": timeout_s,
        "round_timeout_s": round_timeout_s,
        "transport": transport,
        "integrity": integrity,
        "collective": collective,
        "parallel": parallel,
        "overlap": overlap,
        "factors": factors,
        "sync": sync,
        "codec": codec,
        "verify": verify,
    }
    launched = _launchers_folder()
    allow_names_in(*choices.values())
    own = {
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "checkpoint_every": checkpoint_every,
        "checkpoint_keep": checkpoint_keep,
        "checkpoint_best": checkpoint_best,
    }
    with _naming_arguments({**choices, **own, "shares": shares, "servers": servers}):
        asked = convert(servers, int, where=flag("servers")) if servers is not None else None
        place = Place.from_environment(os.environ, parent=os.getppid(), servers=asked)
        plan = _plan(place, launched, choices, shares)
        sums = _check(plan, place)
        saving = checkpoint_settings(launched, own)
        if os.environ.get(ADDRESS_VARIABLE):
            refuse_losses(plan)
    kept = _is_kept(record, launched, place)
    if place.serves:
        _serve(place, plan, kept=kept)
    keep_freed_memory()
    group, rendezvous = _connect(place, plan, sums=sums)
    with _departing_on_error(group, rendezvous):
        links = _links(group)
        written = _record(rendezvous, launched, place, name, Path(runs)) if kept else _unrecorded(place)
        if launched is None:
            plan = _placed(plan, written.folder, rendezvous)
        if isinstance(group.changes, MemberChanges) and rendezvous is not None:
            rendezvous = replace(rendezvous, store=cast(Any, group.changes.store()))
        session = _session(group, rendezvous, plan, written, links, place)
        save_as_asked(session, saving)
        return session


def _is_kept(record: bool | None, launched: RunFolder | None, place: Place) -> bool:
    """Whether the run is recorded: as asked; otherwise if a launcher started it, echelon run or another."""
    return record if record is not None else launched is not None or bool(place.address)


def _launchers_folder() -> RunFolder | None:
    """The run folder that `echelon run` has made; None under another launcher."""
    path = os.environ.get(RUN_VARIABLE)
    return RunFolder(Path(path)) if path else None


@contextmanager
def _naming_arguments(given: Mapping[str, Any]) -> Iterator[None]:
    """Let an error about an option name the argument of `join` that it comes from."""
    try:
        yield
    except ConfigError as error:
        option = _OPTION.match(error.where)
        name = option.group(1).replace("-", "_") if option else ""
        if given.get(name) is not None:
            error.where = f"join({_ARGUMENTS.get(name, name)}={given[name]!r})"
        raise


def _plan(
    place: Place,
    launched: RunFolder | None,
    choices: Mapping[str, Any],
    shares: Sequence[float] | str | None,
) -> Plan:
    """The launcher's plan or a new one. The script's choices come before the launcher's."""
    given = {name: _typed(name, value) for name, value in choices.items() if value is not None}
    if launched is not None:
        plan = replace(Plan.read(launched.plan), **given)
    else:
        nodes = [socket.gethostname()] * place.world_size  # the others' are known when they have joined
        plan = make_plan("unrecorded", nodes, PlanRequest(**given), cores=usable_cores())
    if os.environ.get(RETURNS_VARIABLE):
        plan = with_further(plan, place.world_size, os.environ.get(NODE_VARIABLE, ""))
    if len(plan.workers) != place.world_size:
        raise ConfigError(
            f"the plan is for {len(plan.workers)} workers, but {place.world_size} were started",
            where="plan.toml",
            fix="start as many workers as were planned",
        )
    return plan if shares is None else _with_shares(plan, shares)


def _typed(name: str, value: Any) -> Any:
    """The value as the choice's type; Choices itself refuses an unknown word."""
    hint = _HINTS[name]
    return value if typing.get_origin(hint) is Literal else convert(value, hint, where=flag(name))


def _with_shares(plan: Plan, shares: Sequence[float] | str) -> Plan:
    adapts = shares == "auto"
    if adapts or shares == "equal":
        shares = [1.0] * len(plan.workers)
    try:
        weights = [float(share) for share in shares]
    except (TypeError, ValueError):  # a text, most likely
        raise ConfigError(
            f"{shares!r} is not one number for each worker",
            where="--shares",
            fix="give numbers by rank, such as (2, 1, 1), or auto; `echelon run --shares` has by-speed too",
        ) from None
    check_weights(weights, len(plan.workers))
    workers = tuple(replace(w, weight=s) for w, s in zip(plan.workers, weights, strict=True))
    return replace(
        plan, workers=workers, adapt_shares=adapts, reasons={**plan.reasons, "shares": "as asked"}
    )


def _check(plan: Plan, place: Place) -> bool:
    """Refuse a plan that cannot work before any worker waits; returns whether servers only sum."""
    if not place.launched:
        refuse_without_servers(plan, place.world_size, place.servers)
    assumed = (1.0,) * place.world_size  # links are measured when workers have joined
    cluster = planned_cluster(plan, servers=place.servers, links=assumed, lr=1.0)
    return not needs_parameter_servers(check_plan(plan, cluster))


def _connect(place: Place, plan: Plan, *, sums: bool) -> tuple[Group, Rendezvous | None]:
    if place.world_size == 1:
        return open_solo(), None
    if os.environ.get(RETURNS_VARIABLE):
        return _returning(place, plan)
    rendezvous = _meet(place, plan, plan.workers[place.rank].node)
    with _departing_on_error(None, rendezvous):
        if place.rank == 0 and place.servers:
            rendezvous.publish(SERVERS_DO, SUM if sums else KEEP)
        group = open_group(
            rendezvous,
            place,
            transport=plan.transport,
            collective=plan.collective,
            deadline_s=plan.round_timeout_s,
            timeout_s=plan.join_timeout_s,
            sums=sums,
            integrity=plan.integrity,
            silent_s=MemberService.silent_s(os.environ),
        )
        service = MemberService.from_environment(os.environ, place.rank, plan.round_timeout_s + _ANSWER_S)
        if service is not None:
            group = _changing(group, service, rendezvous, place, plan)
    return group, rendezvous


def _changing(
    group: Group, service: MemberService, rendezvous: Rendezvous, place: Place, plan: Plan
) -> Group:
    """The group as one that goes on when workers are lost."""
    flag = AdmissionFlag.from_environment(os.environ)
    progress = OwnProgress.from_environment(os.environ, place.rank)
    changes = MemberChanges(service, rendezvous, _opener(place, plan), flag, progress)
    made = ChangingGroup(group, changes)
    changes.opened(made)
    return made


def _links(group: Group) -> Links | None:
    """What links there are; a worker that was started again takes what was measured without it."""
    changes = group.changes
    if not isinstance(changes, MemberChanges):
        return group.measure_links()
    if changes.returns:
        return changes.first_links()
    links = group.measure_links()
    changes.keep_links(links)
    return links


def _returning(place: Place, plan: Plan) -> tuple[Group, Rendezvous]:
    """The group of a worker that was started again; it becomes a member when its epochs begin."""
    tell(WorkerPhase.JOINING)
    service = MemberService.from_environment(os.environ, place.rank, plan.round_timeout_s + _ANSWER_S)
    assert service is not None
    store = ServiceStore(service, -1, ())
    first = msgspec.json.decode(store.get(FIRST_KEY), type=list[Member])
    role = min(place.rank, len(first) - 1)  # of one that joins: the last of the first workers'
    me = msgspec.structs.replace(first[role], rank=place.rank, pid=os.getpid())
    if node := os.environ.get(NODE_VARIABLE):
        me = Member(
            rank=place.rank,
            node=node,
            host=socket.gethostname(),
            pid=os.getpid(),
            leader_address=place.address,
            cores=threads.allowed_cores(),
            usable_cores=usable_cores(),
        )
    rendezvous = Rendezvous(cast(Any, store), me, tuple(first), plan.join_timeout_s)
    flag = AdmissionFlag.from_environment(os.environ)
    progress = OwnProgress.from_environment(os.environ, place.rank)
    changes = MemberChanges(service, rendezvous, _opener(place, plan), flag, progress, returns=True)
    names = dict(enumerate(rendezvous.names))
    made = ChangingGroup(ReturningGroup(role, len(first), names, plan.round_timeout_s), changes)
    changes.opened(made)
    return made, rendezvous


def _opener(place: Place, plan: Plan) -> Callable[[Rendezvous], Group]:
    """Connects the members of a view."""

    def open_view(meeting: Rendezvous) -> Group:
        if len(meeting.members) == 1:
            return open_solo()
        return open_group(
            meeting,
            place,
            transport=plan.transport,
            collective=plan.collective,
            deadline_s=plan.round_timeout_s,
            timeout_s=plan.join_timeout_s,
            silent_s=MemberService.silent_s(os.environ),
        )

    return open_view


def _meet(place: Place, plan: Plan, node: str) -> Rendezvous:
    usable = usable_cores()
    tell(WorkerPhase.JOINING)
    await_address(place.address, place.port, plan.join_timeout_s)
    return meet(
        place,
        node=node,
        host=socket.gethostname(),
        pid=os.getpid(),
        timeout_s=plan.join_timeout_s,
        cores=threads.allowed_cores(),
        usable_cores=usable,
        threads=threads.chosen(os.environ, usable),
    )


def _serve(place: Place, plan: Plan, *, kept: bool) -> NoReturn:
    """Be a server until the run ends; then end this process, and with it the script."""
    torch.set_num_threads(1)
    rendezvous = _meet(place, plan, socket.gethostname())
    records: list[RunRecord] = []

    def record() -> Recorder:
        records.append(RunRecord.of_other(rendezvous, place) if kept else _unrecorded(place))
        return records[0].recorder

    cause = ""
    try:
        with _departing_on_error(None, rendezvous):
            serve(rendezvous, place, plan, record)
        rendezvous.announce_departure()
    except EchelonError as error:
        cause = f"{type(error).__name__}: {error.message}"
        raise
    finally:
        for one in records:
            one.end(cause)
    raise SystemExit(0)


@contextmanager
def _departing_on_error(group: Group | None, rendezvous: Rendezvous | None) -> Iterator[None]:
    """Tell the other workers why this one fails while it joins."""
    try:
        yield
    except EchelonError as error:
        if rendezvous is not None:
            rendezvous.announce_departure(f"{type(error).__name__}: {error.message}")
        if group is not None:
            group.close()
        if rendezvous is not None:
            rendezvous.linger()
        raise


def _record(
    rendezvous: Rendezvous | None, launched: RunFolder | None, place: Place, name: str | None, root: Path
) -> RunRecord:
    """The record in the launcher's folder, or in one that the leader makes for all."""
    if launched is not None:
        return RunRecord(launched.with_subfolders(), place.rank, owned=False)
    if rendezvous is not None and place.rank > 0:
        return RunRecord.of_other(rendezvous, place)
    return RunRecord.of_leader(root, name or Path(sys.argv[0]).stem or "run", rendezvous, place)


def _unrecorded(place: Place) -> RunRecord:
    return RunRecord(None, place.rank, owned=False)


def _placed(plan: Plan, folder: RunFolder | None, rendezvous: Rendezvous | None) -> Plan:
    """The plan with the run's name, every worker's node and threads, and the servers' nodes."""
    if rendezvous is not None:
        count = len(plan.workers)
        members, serving = rendezvous.members[:count], rendezvous.members[count:]
        workers = [
            replace(worker, node=member.node, threads=taken)
            for worker, member, taken in zip(plan.workers, members, threads.taken(members), strict=True)
        ]
        reasons = {**plan.reasons, "threads": threads.reason(members, os.environ)}
        nodes = tuple(member.node for member in serving)
        plan = replace(plan, workers=tuple(workers), servers=nodes, reasons=reasons)
        torch.set_num_threads(plan.workers[rendezvous.me.rank].threads)
    return replace(plan, run=folder.name) if folder else plan


def _session(
    group: Group,
    rendezvous: Rendezvous | None,
    plan: Plan,
    record: RunRecord,
    links: Links | None,
    place: Place,
) -> Session:
    """The session, with the events that begin its record; it closes when the script ends."""
    record.begin(plan)
    device = torch.device("cuda", place.local_rank) if torch.cuda.is_available() else torch.device("cpu")
    mine = plan.workers[place.rank]
    family, groups = carried_out(plan)
    record.emit(
        WorkerJoined(
            t=time.time(),
            rank=place.rank,
            node=mine.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            threads=torch.get_num_threads(),
            device=str(device),
            sync=plan.sync,
            family=family,
            groups=groups,
        )
    )
    record.flush()
    tell(WorkerPhase.JOINED)
    clock = StepClock(
        record.recorder,
        place.rank,
        pace=Pace(mine.speed) if mine.speed < 1 else None,
        delay=DELAYS.build(mine.delay) if mine.delay else None,
        seed=plan.seed,
        thread_times=ThreadTimes() if group.size > 1 and record.folder is not None else None,
        on_begun=partial(tell, WorkerPhase.TRAINING),
    )
    group.on_waiting(partial(_record_wait, record, clock, place.rank))
    try:
        session = Session(group, rendezvous, plan, clock, record, device, links)
    except EchelonError as error:
        record.end(f"{type(error).__name__}: {error.message}")
        raise
    if links is not None and not os.environ.get(RETURNS_VARIABLE):
        _record_links(session, links, record, group)
    _leave_at_exit(session)
    return session


def _record_wait(
    record: RunRecord, clock: StepClock, rank: int, awaited: list[int], since: float, doing: str
) -> None:
    """Record that this worker waits; at once, because nothing else may happen for a while."""
    record.emit(
        WorkersAwaited(t=time.time(), rank=rank, step=clock.step, since=since, awaited=awaited, doing=doing)
    )
    record.flush()


def _record_links(session: Session, links: Links, record: RunRecord, group: Group) -> None:
    """Record this worker's measured links, and in the plan what follows from them."""
    for (rank, peer), bytes_per_s in links.bytes_per_s.items():
        if rank == group.rank:
            latency_s = links.latency_s[rank, peer]
            record.emit(
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


def _leave_at_exit(session: Session) -> None:
    """Close the session when the script ends, and tell the other workers why if it fails."""
    before = sys.excepthook
    known = weakref.ref(session)  # weak: a closed session, and all that it prepared, can be freed

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if trace is error.__traceback__:
            hide_wrappers(error)
            trace = error.__traceback__
        before(kind, error, trace)
        left = known()
        if left is not None:
            left.close(f"{kind.__name__}: {error}".strip().partition("\n")[0])

    sys.excepthook = tell
    atexit.register(session.close)
