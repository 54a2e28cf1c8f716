"""Runs that never happened, event by event, as four unequal machines would have left them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from echelon.observe.events import (
    LAUNCHER,
    AnyEvent,
    BucketReduced,
    CheckpointSaved,
    EpochEnded,
    Evaluated,
    FaultInjected,
    LinkMeasured,
    Noted,
    RunEnded,
    RunStarted,
    StepEnded,
    WorkerFailed,
    WorkerJoined,
    encode,
)
from echelon.observe.run_folder import RunFolder

BEGIN = 1_700_000_000.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the imagined run is like; speeds are samples per second of compute."""

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
    """Put events where workers would have; `torn` leaves half a line at the end of rank 0's file."""
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
def written():
    return write_events


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs", "demo")
