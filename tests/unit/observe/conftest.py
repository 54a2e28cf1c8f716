"""Made-up runs as lists of events, like those of four unequal machines."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from echelon.observe.events import (
    LAUNCHER,
    AnyEvent,
    Arrived,
    BucketReduced,
    CheckpointSaved,
    Decided,
    EpochEnded,
    Evaluated,
    FaultInjected,
    LinkMeasured,
    Noted,
    RunEnded,
    RunStarted,
    SharesChanged,
    StepEnded,
    StepsExpected,
    WorkerFailed,
    WorkerJoined,
    encode,
)
from echelon.observe.run_folder import RunFolder

BEGIN = 1_700_000_000.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A made-up run; speeds are samples per second of compute."""

    speeds: Sequence[float] = (1600.0, 800.0, 800.0, 400.0)
    shares: Sequence[int] = (16, 16, 16, 16)
    nodes: Sequence[str] = ("node-a", "node-b", "node-c", "node-d")
    epochs: int = 3
    steps_per_epoch: int = 40
    seed: int = 1
    losses: bool = True
    evaluate: bool = True
    faults: bool = False
    dies: tuple[int, int] | None = None  # rank, at step
    gaps: tuple[int, ...] = ()  # steps that the last rank did not report
    skew_s: Sequence[float] = ()  # by how much each worker's clock is ahead
    buckets: int = 0
    timed: bool = True  # whether the group says when buckets were under way
    links: Sequence[tuple[int, int, float]] = ()  # from rank, to rank, bytes per second


def imagine(plan: Plan | None = None) -> list[AnyEvent]:
    """The events of such a run, merged by time."""
    plan = plan or Plan()
    chance = random.Random(plan.seed)
    world = len(plan.speeds)
    skew = list(plan.skew_s) or [0.0] * world
    events: list[AnyEvent] = [
        RunStarted(t=BEGIN, rank=LAUNCHER, run="demo", command=["echelon", "train"], world_size=world)
    ]
    events += [
        WorkerJoined(
            t=BEGIN + 0.5 + skew[rank],
            rank=rank,
            node=plan.nodes[rank],
            host=f"host-{rank}" if plan.skew_s else "here",
            pid=100 + rank,
            threads=1,
            device="cpu",
        )
        for rank in range(world)
    ]
    events += [
        LinkMeasured(t=BEGIN + 0.7, rank=rank, peer=peer, latency_s=1e-4, bytes_per_s=rate)
        for rank, peer, rate in plan.links
    ]
    now = [BEGIN + 1.0] * world
    for step in range(plan.epochs * plan.steps_per_epoch):
        epoch = step // plan.steps_per_epoch
        dead = plan.dies is not None and step >= plan.dies[1]
        slow = 2.0 if plan.faults and step > plan.epochs * plan.steps_per_epoch // 2 else 1.0
        data = [chance.uniform(0.0005, 0.002) for _ in range(world)]
        compute = [
            share / speed * chance.uniform(0.95, 1.2) * (slow if rank == 1 else 1.0)
            for rank, (share, speed) in enumerate(zip(plan.shares, plan.speeds, strict=True))
        ]
        arrivals = [now[rank] + data[rank] + compute[rank] for rank in range(world)]
        result = max(arrivals) + 0.004
        for rank in range(world):
            if dead and plan.dies is not None and rank == plan.dies[0]:
                continue
            apply_s = 0.001
            end = result + apply_s + 0.0005
            loss = 2.3 * 0.98**step + chance.uniform(0, 0.15) if plan.losses else None
            if not (rank == world - 1 and step in plan.gaps):
                events += _reduced(
                    plan, rank, step, arrivals[rank] + skew[rank], compute[rank], result + skew[rank]
                )
                events.append(
                    StepEnded(
                        t=end + skew[rank],
                        rank=rank,
                        step=step,
                        epoch=epoch,
                        start=now[rank] + skew[rank],
                        data_s=data[rank],
                        compute_s=compute[rank],
                        arrival=arrivals[rank] + skew[rank],
                        wait_s=result - arrivals[rank],
                        apply_s=apply_s,
                        share=plan.shares[rank],
                        batch=sum(plan.shares),
                        sent_bytes=180_000,
                        loss=loss,
                    )
                )
            now[rank] = end
        if dead:
            break
        if plan.faults and step == plan.epochs * plan.steps_per_epoch // 2:
            events.append(
                FaultInjected(
                    t=now[0],
                    rank=LAUNCHER,
                    action="slow",
                    target="node-b",
                    detail="slowed node-b down to 0.5 cores",
                )
            )
        if (step + 1) % plan.steps_per_epoch == 0:
            for rank in range(world):
                events.append(EpochEnded(t=now[rank] + skew[rank], rank=rank, epoch=epoch, step=step + 1))
                now[rank] += 0.05
            if plan.evaluate:
                events += _checked(now[0], epoch, step + 1)
    over = max(now) + 0.1
    if plan.dies is not None:
        dead_rank = plan.dies[0]
        cause, node = "killed by signal 9", plan.nodes[dead_rank]
        events.append(WorkerFailed(t=over, rank=LAUNCHER, failed=dead_rank, node=node, cause=cause))
    events.append(Noted(t=BEGIN + 0.6, rank=0, text="no latency shaping in this kernel"))
    outcome = "failed" if plan.dies is not None else "completed"
    events.append(RunEnded(t=over + 0.1, rank=LAUNCHER, outcome=outcome))
    return sorted(events, key=lambda event: event.t)


def imagine_rebalanced(
    plan: Plan, shares: Sequence[int], *, steps: int, expected_s: float = 0.02
) -> list[AnyEvent]:
    """Such a run, whose shares change after it for so many more steps."""
    first = imagine(plan)
    changed = plan.epochs * plan.steps_per_epoch
    later = imagine(replace(plan, shares=shares, epochs=1, steps_per_epoch=steps, links=()))
    over = max(event.t for event in first if isinstance(event, StepEnded))
    shift_s = over - BEGIN - 1.0 + max([0.0, *plan.skew_s]) - min([0.0, *plan.skew_s])
    events = [event for event in first if not isinstance(event, RunEnded)]
    events += [
        SharesChanged(
            t=over + 1e-3,
            rank=rank,
            step=changed,
            shares=list(shares),
            before=list(plan.shares),
            slowest=3,
            slowest_s=0.04,
            expected_s=expected_s,
        )
        for rank in range(len(shares))
    ]
    for event in later:
        if isinstance(event, StepEnded):
            at = {"t": event.t, "start": event.start, "arrival": event.arrival}
            moved = {name: value + shift_s for name, value in at.items()}
            events.append(msgspec.structs.replace(event, step=event.step + changed, epoch=99, **moved))
    return events  # each worker's in order


@dataclass(frozen=True, kw_only=True)
class ServedPlan:
    """A run with a server that updates from `need` gradients; with `rounds` it drops stale ones."""

    step_s: Sequence[float] = (0.01, 0.011, 0.012, 0.06)
    need: int = 3
    rounds: bool = True
    steps: int = 200  # of all workers
    sync: str = "backup(1)"


def imagine_served(plan: ServedPlan | None = None) -> list[AnyEvent]:
    """The events of such a run; the server is the rank after the workers'."""
    plan = plan or ServedPlan()
    world = server = len(plan.step_s)
    events: list[AnyEvent] = [
        RunStarted(
            t=BEGIN, rank=LAUNCHER, run="demo", command=["echelon"], world_size=world, sync=plan.sync
        ),
        StepsExpected(t=BEGIN, rank=0, steps=plan.steps // world),
    ]
    for rank in range(world):
        joined = WorkerJoined(t=BEGIN, rank=rank, node=f"n{rank}", host="h", pid=1, threads=1, device="cpu")
        events.append(joined)
    version, read, own = 0, [0] * world, [0] * world
    began = [BEGIN + 1.0] * world
    waiting: list[tuple[int, float]] = []
    due = [(BEGIN + 1.0 + step_s, rank) for rank, step_s in enumerate(plan.step_s)]
    heapq.heapify(due)

    def end_step(rank: int, came: float, t: float) -> None:
        step = StepEnded(
            t=t,
            rank=rank,
            step=own[rank],
            epoch=0,
            start=began[rank],
            data_s=0.0,
            compute_s=plan.step_s[rank],
            arrival=came,
            wait_s=t - came,
            apply_s=0.0,
            share=8,
            batch=32,
            sent_bytes=1000,
            loss=1.0 + rank,
        )
        events.append(Decided(t=t, rank=server, what="release", version=version, worker=rank))
        events.append(step)
        own[rank], read[rank], began[rank] = own[rank] + 1, version, t
        heapq.heappush(due, (t + plan.step_s[rank], rank))

    for _ in range(plan.steps):
        t, rank = heapq.heappop(due)
        events.append(
            Arrived(
                t=t,
                rank=server,
                worker=rank,
                kind="gradient",
                step=own[rank],
                version=version,
                read=read[rank],
                compute_s=plan.step_s[rank],
            )
        )
        if plan.rounds and read[rank] < version:
            reason = f"its round is over: computed on version {read[rank]}, now {version}"
            dropped = Decided(t=t, rank=server, what="drop", version=version, worker=rank, step=own[rank])
            events.append(msgspec.structs.replace(dropped, reason=reason))
            end_step(rank, t, t)
            continue
        waiting.append((rank, t))
        if len(waiting) == plan.need:
            version += 1
            parts = [(one, own[one], 1 / plan.need) for one, _ in waiting]
            events.append(Decided(t=t, rank=server, what="apply", version=version, parts=parts))
            for one, came in waiting:
                end_step(one, came, t)
            waiting = []
    events.append(RunEnded(t=max(began) + 1.0, rank=LAUNCHER, outcome="completed"))
    return sorted(events, key=lambda event: event.t)


def _reduced(
    plan: Plan, rank: int, step: int, arrival: float, compute_s: float, result: float
) -> list[BucketReduced]:
    """Buckets that leave evenly over the second half of compute, the last at the arrival.

    All but the last are under way until the next leaves, and a little longer; the last has the result.
    """
    gap_s = compute_s / 2 / max(1, plan.buckets)
    made = []
    for index in range(plan.buckets):
        is_last = index == plan.buckets - 1
        begun = arrival - (plan.buckets - 1 - index) * gap_s
        ended = result if is_last else begun + 1.2 * gap_s
        made.append(
            BucketReduced(
                t=result,
                rank=rank,
                step=step,
                index=index,
                size_bytes=8_000_000,
                sent_bytes=180_000 // plan.buckets,
                start=begun - 0.1 * gap_s,
                encode_s=0.1 * gap_s,
                begun=begun if plan.timed else 0.0,
                sent=(begun + ended) / 2 if plan.timed else 0.0,
                ended=ended if plan.timed else 0.0,
                adding_s=0.001,
                wait_s=result - arrival if is_last else 0.0,
            )
        )
    return made


def _checked(now: float, epoch: int, step: int) -> list[AnyEvent]:
    accuracy = 1 - 0.6 * 0.5 ** (epoch + 1)
    loss = 1.9 * 0.4**epoch
    return [
        Evaluated(t=now, rank=0, epoch=epoch, step=step, loss=loss, accuracy=accuracy, samples=360),
        CheckpointSaved(
            t=now + 0.01, rank=0, path=f"ck/{step}", step=step, seconds=0.01, size_bytes=250_000
        ),
    ]


def write_events(folder: RunFolder, events: Sequence[AnyEvent], *, torn: bool = False) -> None:
    """Write events to the workers' files; `torn` adds half a line to rank 0's file."""
    for event in events:
        with folder.events_of(event.rank).open("ab") as file:
            file.write(encode(event) + b"\n")
    if torn:
        with folder.events_of(0).open("ab") as file:
            file.write(b'{"type":"step","t":17000')


@pytest.fixture(scope="session")
def a_plan() -> type[Plan]:
    return Plan


@pytest.fixture(scope="session")
def imagined():
    return imagine


@pytest.fixture(scope="session")
def rebalanced():
    return imagine_rebalanced


@pytest.fixture(scope="session")
def a_served_plan() -> type[ServedPlan]:
    return ServedPlan


@pytest.fixture(scope="session")
def imagined_served():
    return imagine_served


@pytest.fixture(scope="session")
def written():
    return write_events


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "demo")
