"""Writes a run as Chrome-trace JSON, which opens in Perfetto: what each worker did, when.

There is one process per worker with one lane per activity, and one process for the run with its loss and
throughput. Faults, failures, checkpoints and evaluations are instants. Every slice carries its step. At
each round an arrow leads from the worker that arrived last to the one that waited longest. Below its
activities each worker has its buckets, from filling (encode) to the reduced result, and within that the
time until its own bytes were sent. Buckets in flight at the same time are in separate rows. A stage of a
pipeline has a lane with its passes, and its waits for other stages.

If workers do not step together there are no rounds, so there are no arrows and no throughput, but a counter
of gradients per update of the server.

Times are whole microseconds since the run began, never negative. Slices of a lane do not overlap; if a
clock was set back, the later slice is cut. Slices shorter than a microsecond are left out. If the workers'
clocks disagree, they are corrected, and `otherData` has the corrections.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from echelon.config.units import show_bytes
from echelon.errors import ConfigError
from echelon.observe.arrival import ObservedRound, basis, clock_offsets, contradicts, rounds_of, same_clock
from echelon.observe.atomic import write_whole
from echelon.observe.events import (
    LAUNCHER,
    AnyEvent,
    Arrived,
    BucketReduced,
    CheckpointLoaded,
    CheckpointSaved,
    CorruptionFound,
    Decided,
    Evaluated,
    FaultInjected,
    MembersChanged,
    Noted,
    PassesTimed,
    QuotasApplied,
    RunEnded,
    RunStarted,
    StageAssigned,
    StepEnded,
    WorkerFailed,
    WorkerJoined,
)
from echelon.observe.follow import read_run
from echelon.observe.run_folder import RunFolder
from echelon.observe.spans import ACTIVITIES, end_of, spans
from echelon.observe.stages import awaited_rank
from echelon.observe.sync import policy_of, steps_together

TraceEvent: TypeAlias = dict[str, Any]

_RUN_PID = 1
_STAGE_TID = 6
_INSTANTS_TID = 9
_BUCKETS_SORT = 5  # after the four activities
_ROW_TIDS = 1_000_000_000  # above the ids of all other lanes
_ROWS_PER_WORKER = 10_000
_TIMED = (StepEnded, BucketReduced, PassesTimed)


def chrome_trace(events: Iterable[AnyEvent], policy: str = "") -> dict[str, Any]:
    """The trace of these events; empty without events. `policy` is used if no event names one."""
    kept = list(events)
    together = _step_together(kept, policy)
    offsets = _offsets(kept) if together else {}
    if offsets:
        kept = [same_clock(event, offsets) if isinstance(event, _TIMED) else event for event in kept]
    start = min((_begin(event) for event in kept), default=0.0)
    steps = sorted((e for e in kept if isinstance(e, StepEnded)), key=lambda e: (e.start, e.rank))
    rounds = rounds_of(steps) if together else []
    lanes = _Lanes(start)
    for step in steps:
        lanes.add(step)
    rows = _BucketRows(start)
    for bucket in sorted(
        (e for e in kept if isinstance(e, BucketReduced)), key=lambda e: (e.start, e.rank)
    ):
        rows.add(bucket)
    traced = _names(kept) + lanes.slices + rows.names + rows.slices + _stages(kept, start)
    for round_ in rounds:
        traced += _counters(round_, start) + lanes.arrow(round_)
    if not together:
        traced += _losses(steps, start) + _updates(kept, start)
    traced += [mark for event in kept if (mark := _instant(event, start)) is not None]
    return {"traceEvents": traced, "displayTimeUnit": "ms", "otherData": _about(kept, offsets)}


def write_trace(folder: RunFolder, out: Path) -> Path:
    """Write the run's trace; it is compressed if `out` ends in .gz, which Perfetto reads too."""
    trace = chrome_trace(read_run(folder), policy_of(folder))
    if not trace["traceEvents"]:
        raise ConfigError(
            "the run has no events yet",
            where=str(folder.events),
            fix="wait until the run has begun, or read its log files in logs/",
        )
    data = msgspec.json.encode(trace)
    write_whole(out, gzip.compress(data, compresslevel=6) if out.suffix == ".gz" else data)
    return out


def _begin(event: AnyEvent) -> float:
    return min(event.start, event.t) if isinstance(event, _TIMED) else event.t


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def _pid(rank: int) -> int:
    # Perfetto takes 0 for the idle process. Steps of ten leave room for lanes, whose ids must be unique
    # too.
    return _RUN_PID if rank == LAUNCHER else 100 + 10 * rank


def _offsets(events: list[AnyEvent]) -> dict[int, float]:
    hosts = {event.host for event in events if isinstance(event, WorkerJoined)}
    rounds = rounds_of(event for event in events if isinstance(event, StepEnded))
    shared = [round_ for round_ in rounds if len(round_.workers) > 1]
    contradictions = sum(
        contradicts(round_, before) for round_, before in zip(shared, [None, *shared], strict=False)
    )
    by = basis(contradictions, len(shared), len(hosts))
    return clock_offsets(shared) if by == "wait" else {}


def _step_together(events: Iterable[AnyEvent], policy: str) -> bool:
    family = ""
    for event in events:
        if isinstance(event, (Arrived, Decided)):
            return False
        if isinstance(event, WorkerJoined) and event.family:
            family = event.family
        if isinstance(event, RunStarted):
            policy = event.sync or policy
    return steps_together(policy, family)


def _about(events: list[AnyEvent], offsets: dict[int, float]) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if offsets:
        about["clocks_put_right_by_s"] = {f"rank {rank}": ahead_s for rank, ahead_s in offsets.items()}
    for event in events:
        if isinstance(event, RunStarted):
            about |= {"run": event.run, "command": " ".join(event.command), "world_size": event.world_size}
    return about


def _names(events: list[AnyEvent]) -> list[TraceEvent]:
    if not events:
        return []
    nodes = {event.rank: event.node for event in events if isinstance(event, WorkerJoined)}
    ranks = sorted({event.rank for event in events} - {LAUNCHER})
    servers = {e.rank for e in events if isinstance(e, (Arrived, Decided))} - nodes.keys()
    named = [_name("process_name", _RUN_PID, 0, "run"), _sort("process_sort_index", _RUN_PID, 0, 0)]
    for rank in ranks:
        node = nodes.get(rank)
        label = f"rank {rank} · {node}" if node else f"rank {rank}"
        label += " · server" if rank in servers else ""
        named.append(_name("process_name", _pid(rank), 0, label))
        named.append(_sort("process_sort_index", _pid(rank), 0, rank + 1))
        for lane, activity in enumerate(() if rank in servers else ACTIVITIES, start=1):
            named.append(_name("thread_name", _pid(rank), _pid(rank) + lane, activity))
            named.append(_sort("thread_sort_index", _pid(rank), _pid(rank) + lane, lane))
    pids = [_pid(rank) for rank in (LAUNCHER, *ranks)]
    return named + [_name("thread_name", pid, pid + _INSTANTS_TID, "events") for pid in pids]


def _name(kind: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _sort(kind: str, pid: int, tid: int, index: int) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"sort_index": index}}


class _Lanes:
    """Places slices so that they do not overlap within a lane, and keeps each step's wait for arrows."""

    def __init__(self, start: float) -> None:
        self.slices: list[TraceEvent] = []
        self._start = start
        self._free_from: dict[int, int] = {}
        self._waits: dict[tuple[int, int], TraceEvent] = {}

    def add(self, step: StepEnded) -> None:
        args = {
            "step": step.step,
            "epoch": step.epoch,
            "share": step.share,
            "batch": step.batch,
            "loss": step.loss,
            "sent_bytes": step.sent_bytes,
        }
        if step.delay_s:
            args["injected_delay_s"] = step.delay_s
        if step.starved_s is not None:
            args["without_a_core_s"] = step.starved_s
        for activity, begin, end in spans(step):
            tid = _pid(step.rank) + ACTIVITIES.index(activity) + 1
            ts = max(_us(begin - self._start), self._free_from.get(tid, 0))
            dur = _us(end - self._start) - ts
            if dur <= 0:
                continue
            self._free_from[tid] = ts + dur
            placed: TraceEvent = {"ph": "X", "name": activity, "cat": activity, "ts": ts, "dur": dur}
            placed |= {"pid": _pid(step.rank), "tid": tid, "args": args}
            self.slices.append(placed)
            if activity == "wait" and begin >= step.arrival:
                self._waits.setdefault((step.rank, step.step), placed)

    def arrow(self, round_: ObservedRound) -> list[TraceEvent]:
        """An arrow from the wait of the last worker to the longest wait; none if either has no slice."""
        waits = [self._waits.get((rank, round_.step)) for rank in round_.workers]
        known = [wait for wait in waits if wait is not None]
        if len(known) < 2:
            return []
        last = max(known, key=lambda wait: wait["ts"])
        first = min(known, key=lambda wait: wait["ts"])
        # A flow must end within its slice, and not before its start.
        arrives = first["ts"] + first["dur"] - 1
        if arrives < last["ts"]:
            return []
        flow = {"name": "round", "cat": "round", "id": round_.step}
        return [
            {"ph": "s", **flow, "pid": last["pid"], "tid": last["tid"], "ts": last["ts"]},
            {"ph": "f", "bp": "e", **flow, "pid": first["pid"], "tid": first["tid"], "ts": arrives},
        ]


class _BucketRows:
    """Places each bucket in its worker's first free row."""

    def __init__(self, start: float) -> None:
        self.slices: list[TraceEvent] = []
        self.names: list[TraceEvent] = []
        self._start = start
        self._free_from: dict[int, list[int]] = {}

    def add(self, bucket: BucketReduced) -> None:
        filled = _us(bucket.start - self._start)
        encoded = max(filled, _us(bucket.start + bucket.encode_s - self._start))
        # An unknown time (0) gives a part of length zero.
        begun = max(encoded, _us(bucket.begun - self._start))
        sent = max(begun, _us(bucket.sent - self._start))
        ended = max(sent, _us(bucket.ended - self._start))
        if not bucket.begun:
            begun = sent = ended = encoded
        if ended <= filled:
            return
        name = f"bucket {bucket.index} ({show_bytes(bucket.size_bytes)})"
        args = {
            "step": bucket.step,
            "sent_bytes": bucket.sent_bytes,
            "adding_s": bucket.adding_s,
            "wait_s": bucket.wait_s,
            "how": bucket.how,
        }
        tid = self._row(bucket.rank, filled, ended)
        parts = ((name, filled, ended), ("encode", filled, encoded))
        for part, begin, end in (*parts, ("reduce and receive", begun, ended), ("send", begun, sent)):
            if end <= begin:
                continue
            placed: TraceEvent = {"ph": "X", "name": part, "cat": "bucket", "ts": begin, "dur": end - begin}
            self.slices.append(placed | {"pid": _pid(bucket.rank), "tid": tid, "args": args})

    def _row(self, rank: int, begin: int, end: int) -> int:
        free_from = self._free_from.setdefault(rank, [])
        row = next((at for at, free in enumerate(free_from) if free <= begin), len(free_from))
        tid = _ROW_TIDS + _ROWS_PER_WORKER * rank + row
        if row == len(free_from):
            free_from.append(0)
            name = "buckets" if row == 0 else f"buckets, row {row + 1}"
            self.names.append(_name("thread_name", _pid(rank), tid, name))
            self.names.append(_sort("thread_sort_index", _pid(rank), tid, _BUCKETS_SORT + row))
        free_from[row] = end
        return tid


def _stages(events: Sequence[AnyEvent], start: float) -> list[TraceEvent]:
    """A lane for each stage: its passes, and the waits before them."""
    assigned = {event.rank: event for event in events if isinstance(event, StageAssigned)}
    lanes: list[TraceEvent] = []
    free_from: dict[int, int] = {}
    for event in sorted((e for e in events if isinstance(e, PassesTimed)), key=lambda e: (e.start, e.rank)):
        pid, own = _pid(event.rank), assigned.get(event.rank)
        tid = pid + _STAGE_TID
        if event.rank not in free_from:
            lanes += [_name("thread_name", pid, tid, "stage"), _sort("thread_sort_index", pid, tid, 5)]
            free_from[event.rank] = 0
        base = _us(event.start - start)
        chunks: Sequence[int | None] = event.chunks or [None] * len(event.passes)
        for (kind, micro, begun_us, wait_us, took_us), chunk in zip(event.passes, chunks, strict=True):
            rank = awaited_rank(kind, own.stage, own.ranks) if own is not None else None
            waiting = "wait" if rank is None else f"wait for rank {rank}"
            args = {"step": event.step, "micro": micro}
            at = base + begun_us
            of_chunk = "" if chunk is None or kind == "result" else f" of chunk {chunk}"
            for name, dur in ((waiting, wait_us), (f"{kind} {micro}{of_chunk}", took_us)):
                ts = max(at, free_from[event.rank])
                at += dur
                if at > ts:
                    placed: TraceEvent = {"ph": "X", "name": name, "cat": "stage", "ts": ts, "dur": at - ts}
                    lanes.append(placed | {"pid": pid, "tid": tid, "args": args})
                    free_from[event.rank] = at
    return lanes


def _counters(round_: ObservedRound, start: float) -> list[TraceEvent]:
    ts = _us(round_.end - start)
    counters = []
    seconds = round_.end - round_.begin
    if seconds > 0:
        counters.append(_counter("throughput", ts, {"samples/s": round(round_.samples / seconds, 3)}))
    if round_.loss is not None:
        counters.append(_counter("train loss", ts, {"loss": round_.loss}))
    return counters


def _losses(steps: Iterable[StepEnded], start: float) -> list[TraceEvent]:
    """Each worker's own loss, at the end of each of its steps."""
    known = [step for step in steps if step.loss is not None and math.isfinite(step.loss)]
    return [
        _counter("train loss", _us(end_of(step) - start), {"loss": step.loss or 0.0})
        for step in sorted(known, key=end_of)
    ]


def _updates(events: Iterable[AnyEvent], start: float) -> list[TraceEvent]:
    made = (event for event in events if isinstance(event, Decided) and event.what == "apply")
    return [_counter("gradients per update", _us(e.t - start), {"gradients": len(e.parts)}) for e in made]


def _counter(name: str, ts: int, values: dict[str, float]) -> TraceEvent:
    return {"ph": "C", "name": name, "pid": _RUN_PID, "tid": 0, "ts": ts, "args": values}


def _instant(event: AnyEvent, start: float) -> TraceEvent | None:
    name, scope = "", "p"
    match event:
        case FaultInjected():
            name, scope = f"fault: {event.action} {event.target}", "g"
        case QuotasApplied():
            name, scope = "CPU quotas are in force", "g"
        case WorkerFailed():
            name, scope = f"rank {event.failed} failed", "g"
        case RunEnded():
            name, scope = f"run {event.outcome}", "g"
        case Evaluated():
            name = "evaluated"
        case CheckpointSaved():
            name = "checkpoint saved"
        case CheckpointLoaded():
            name = "checkpoint loaded"
        case CorruptionFound():
            name, scope = f"verify {event.check}: {event.action}", "g"
        case MembersChanged():
            name, scope = f"rank {event.worker}: {event.what}", "g"
        case Noted():
            name = "note"
        case _:
            return None
    fields = msgspec.to_builtins(event)
    args = {key: value for key, value in fields.items() if key not in ("t", "rank", "type")}
    pid = _pid(event.rank)
    placed = {"ph": "i", "name": name, "cat": fields["type"], "s": scope, "pid": pid}
    return placed | {"tid": pid + _INSTANTS_TID, "ts": _us(event.t - start), "args": args}
