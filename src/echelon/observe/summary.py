"""The figures of a run, from its events: what `summary.json`, the tables and the report show.

The order in which the workers' events are merged does not matter. `Tally` takes them one by one and gives
the figures so far at any time; `summarise` takes them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from echelon.config.toml_text import read_toml
from echelon.observe.arrival import Basis, ObservedRound, RoundTally
from echelon.observe.atomic import write_whole
from echelon.observe.decisions import Decision, DecisionTally
from echelon.observe.encoding import CodecFigures, CodecTally
from echelon.observe.events import (
    LAUNCHER,
    AnyEvent,
    Arrived,
    BucketReduced,
    CollectiveChanged,
    CorruptionFound,
    Decided,
    EpochEnded,
    Evaluated,
    LinkMeasured,
    MembersChanged,
    PassesTimed,
    RunEnded,
    RunStarted,
    ServerEnded,
    SharesChanged,
    StageAssigned,
    StepEnded,
    Verified,
    WorkerFailed,
    WorkerJoined,
)
from echelon.observe.follow import read_run
from echelon.observe.lateness import CircleTally, LatenessTally, Standstill
from echelon.observe.membership import MembersFigures, MembersTally
from echelon.observe.overlap import Communication, TrafficTally
from echelon.observe.plan_view import measured_step_s, view_of
from echelon.observe.run_folder import RunFolder
from echelon.observe.settled import SettledFigures, SettledTally
from echelon.observe.spans import end_of
from echelon.observe.stages import StageFigures, StageTally
from echelon.observe.step_cost import CostTally, StepCost
from echelon.observe.sync import Stretch, SyncFigures, SyncTally, policy_of, steps_together
from echelon.observe.verified import VerifySummary, VerifyTally
from echelon.observe.worker_figures import WorkerSummary, WorkerSums, worker_summary

UNFINISHED = "unfinished"


class PlanScore(msgspec.Struct, frozen=True, kw_only=True):
    """What the plan predicted for a step, beside what was measured: the median without the first fifth.

    `ratio` is measured over predicted: above 1, steps took longer.
    """

    predicted_step_s: float
    measured_step_s: float
    ratio: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the whole run.

    `seconds` runs from the first step's start to the last step's end. `steps` is the largest number of
    steps of a worker, `epochs` how many ended. `train_loss` is the mean over the samples of the last
    tenth of the steps, at least ten of them. Test figures are those of the last evaluation.
    `rounds` counts the steps in which workers met and that all of them reported, the only ones judged by
    arrival; `spread_s` sums their spreads, `standstills` are rounds that stand far out, `met` is how many
    workers meet. If `meet_often`, they met several times in a step, or went on before they had the result:
    then the last worker is not the one that arrived last, but the one that kept the others waiting
    longest. `judged_by` is "wait" if the workers' clocks disagree.
    `outcome` is completed, failed, interrupted, or unfinished if no end was recorded.
    `communication` is None if no bucket was reported; overlap.py has the definitions. `coding` is None
    if nothing was encoded. `costs` is empty if they are unknown; step_cost.py has the definition.

    `decisions` are those that the run took by itself; decisions.py has the definitions. `settled` has the
    figures since the last change of shares, if enough rounds followed it; then sentences and columns on
    who kept the others waiting are from these: `judged`.

    `verified` is None without checks (`--verify`), `members` if no worker was lost or left out. `stages` is
    empty without a pipeline; stages.py has the definitions.

    `prediction` is None if the run's plan predicts nothing, or workers did not step together.

    With sync policies of other families than that of `full` workers do not step together: `rounds` are
    only the steps in which they exchanged weights, none with a server, and `train_loss` is over the last
    tenth of each worker's own steps. Only then is `sync` set (`agreement` in JSON); sync.py has the
    definitions.
    """

    world_size: int
    steps: int
    epochs: int
    samples: int
    seconds: float
    samples_per_s: float
    train_loss: float | None
    test_loss: float | None
    accuracy: float | None
    rounds: int
    judged_by: Basis
    spread_s: float
    outcome: str
    failure: str
    workers: tuple[WorkerSummary, ...]
    communication: Communication | None = None
    coding: CodecFigures | None = None
    sync: SyncFigures | None = msgspec.field(name="agreement", default=None)
    costs: tuple[StepCost, ...] = ()
    met: int = 0
    meet_often: bool = False
    standstills: tuple[Standstill, ...] = ()
    decisions: tuple[Decision, ...] = ()
    settled: SettledFigures | None = None
    prediction: PlanScore | None = None
    verified: VerifySummary | None = None
    stages: tuple[StageFigures, ...] = ()
    members: MembersFigures | None = None

    @property
    def shares_adapt(self) -> bool:
        """Whether shares followed the workers' measured speeds."""
        return any(decision.kind == "shares" for decision in self.decisions)

    @property
    def judged(self) -> Summary:
        """The same with the figures from which it is judged who kept the others waiting."""
        if self.settled is None:
            return self
        since = {name: getattr(self.settled, name) for name in SettledFigures.__struct_fields__}
        del since["step"]
        return msgspec.structs.replace(self, **since)

    @property
    def all_steps(self) -> int:
        """The number of steps of all workers together."""
        return sum(worker.steps for worker in self.workers)


class _RecentLoss:
    """The train loss over the last tenth of the steps, at least ten; drops earlier steps."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[float, int]] = {}
        self._first = self._newest = -1

    def add(self, event: StepEnded) -> None:
        if self._first < 0 or event.step < self._first:
            self._first = event.step
        self._newest = max(self._newest, event.step)
        if event.loss is None or not math.isfinite(event.loss):
            return
        total, samples = self._steps.get(event.step, (0.0, 0))
        self._steps[event.step] = (total + event.share * event.loss, samples + event.share)
        if len(self._steps) > 2 * (self._newest - self._oldest() + 1) + 100:
            oldest = self._oldest()
            self._steps = {step: sums for step, sums in self._steps.items() if step >= oldest}

    def mean(self) -> float | None:
        total, samples = self.sums()
        return total / samples if samples else None

    def sums(self) -> tuple[float, int]:
        oldest = self._oldest()
        recent = [sums for step, sums in self._steps.items() if step >= oldest]
        return sum(total for total, _ in recent), sum(count for _, count in recent)

    def _oldest(self) -> int:
        made = self._newest - self._first + 1
        return self._newest + 1 - max(10, -(-made // 10))


class Tally:
    """Takes events one by one, workers in any order; `summary()` gives the figures so far.

    `limit` bounds how many incomplete rounds are kept, for live displays; then communication, step costs
    and decisions, whose medians take long to compute, are left out. `policy` is the sync policy if it is
    known from elsewhere than from events.
    """

    def __init__(self, limit: int | None = None, policy: str = "") -> None:
        self._limit = limit
        self._asked = policy
        self._policy = self._family = ""  # as the workers say
        self._sync = SyncTally()
        self._workers: dict[int, WorkerSums] = {}
        self._declared: int | None = None
        self._rounds_open = RoundTally(limit)
        self._circles: CircleTally | None = None
        self._lateness = LatenessTally()
        self._traffic = TrafficTally() if limit is None else None
        self._costs = CostTally() if limit is None else None
        self._decisions = DecisionTally() if limit is None else None
        self._settled: SettledTally | None = None
        self._codecs = CodecTally()
        self._hosts: set[str] = set()
        self._loss = _RecentLoss()
        self._own_losses: dict[int, _RecentLoss] = {}
        self._epochs: set[int] = set()
        self._first_start = math.inf
        self._last_end = -math.inf
        self._evaluated: Evaluated | None = None
        self._failed: WorkerFailed | None = None
        self._ended: RunEnded | None = None
        self._verify = VerifyTally()
        self._stages = StageTally()
        self._members = MembersTally()

    def add(self, event: AnyEvent) -> None:
        """Take one event into account."""
        if self._decisions is not None and isinstance(event, StepEnded | SharesChanged | CollectiveChanged):
            self._decisions.add(event)
        match event:
            case StepEnded():
                self._step(event)
            case SharesChanged(rank=0) if self._limit is None:
                self._settled = (self._settled or SettledTally(event.step)).after(event.step)
            case Arrived():
                self._sync.arrived(event)
            case Decided():
                self._sync.decided(event)
            case BucketReduced() if self._traffic is not None:
                self._traffic.bucket(event)
                self._codecs.bucket(event)
            case LinkMeasured() if self._traffic is not None:
                self._traffic.link(event)
            case ServerEnded():
                self._codecs.server(event)
            case CorruptionFound() | Verified():
                self._verify.add(event)
            case StageAssigned() | PassesTimed():
                self._stages.add(event)
            case MembersChanged():
                self._members.add(event)
            case WorkerJoined():
                self._joined(event)
            case RunStarted():
                self._declared = event.world_size
                self._asked = event.sync or self._asked
            case EpochEnded():
                self._epochs.add(event.epoch)
            case Evaluated():
                if self._evaluated is None or event.step >= self._evaluated.step:
                    self._evaluated = event
            case WorkerFailed():
                if self._failed is None or event.t < self._failed.t:
                    self._failed = event
            case RunEnded():
                if self._ended is None or event.rank == LAUNCHER:
                    self._ended = event
            case _:
                pass

    def _worker(self, rank: int) -> WorkerSums:
        worker = self._workers.get(rank)
        if worker is None:
            worker = self._workers[rank] = WorkerSums()
        return worker

    def _joined(self, event: WorkerJoined) -> None:
        self._worker(event.rank).node = event.node
        self._worker(event.rank).device = event.device
        self._hosts.add(event.host)
        self._policy = event.sync or self._policy
        self._family = event.family or self._family
        if event.groups and all(event.groups) and self._circles is None:
            self._sync.know_groups(event.groups)
            self._circles = CircleTally(event.groups, self._limit)
            early = self._rounds_open.incomplete()  # steps that came before this event
            self._rounds_open = RoundTally(self._limit)
            for round_ in early:
                for step in round_.workers.values():
                    self._meet(step)

    def _step(self, event: StepEnded) -> None:
        self._worker(event.rank).add(event)
        self._loss.add(event)
        if event.rank not in self._own_losses:
            self._own_losses[event.rank] = _RecentLoss()
        self._own_losses[event.rank].add(event)
        self._first_start = min(self._first_start, event.start)
        self._last_end = max(self._last_end, end_of(event))
        if self._costs is not None and not self._alone:
            self._costs.add(event)
        if self._traffic is not None and not self.apart:
            self._traffic.step(event)
        self._meet(event)

    def _meet(self, event: StepEnded) -> None:
        """Judge the rounds that this step completes."""
        if self._circles is not None:
            inside, between = self._circles.add(event)
            if inside is not None:
                self._lateness.add(inside)
            if between is not None:
                self._lateness.add(between, between=True)
        elif not self._alone:
            complete = self._rounds_open.add(event, self._declared)
            if complete is not None and len(complete.workers) > 1:
                self._lateness.add(complete)
                if self._settled is not None:
                    self._settled.add(complete)
                if self._traffic is not None and not self.apart:
                    self._traffic.round(complete)

    @property
    def apart(self) -> bool:
        """Whether workers do not step together."""
        return self._sync.served or not steps_together(self.policy, self._family)

    @property
    def _alone(self) -> bool:
        """Whether each worker meets only a server, at times of its own, or nobody knows whom it meets."""
        unknown = not self._family and not steps_together(self.policy)
        return self._circles is None and (self._sync.served or unknown)

    @property
    def policy(self) -> str:
        """The sync policy; `full` unless a plan or an event names another."""
        return self._policy or self._asked or ("the server's policy" if self._sync.served else "full")

    def course(self) -> tuple[Stretch, ...]:
        """The sync figures over time, in finer stretches than the summary has."""
        return self._sync.course(workers=max(self._workers, default=-1) + 1)

    def summary(self) -> Summary:
        """The figures of the events so far."""
        world_size = self._declared if self._declared is not None else len(self._workers)
        if self._alone:  # a few steps may have come before the server's events
            self._lateness, self._rounds_open = LatenessTally(), RoundTally()
        # Complete, but the world's size was not known when their last step came:
        late_rounds = [r for r in self._rounds_open.incomplete() if len(r.workers) >= max(2, world_size)]
        lateness = self._lateness.with_more(late_rounds).figures(len(self._hosts), all_meet=not self.apart)
        samples = sum(worker.samples for worker in self._workers.values())
        stepped = any(worker.steps for worker in self._workers.values())
        seconds = max(0.0, self._last_end - self._first_start) if stepped else 0.0
        return Summary(
            world_size=world_size,
            steps=max((worker.steps for worker in self._workers.values()), default=0),
            epochs=len(self._epochs),
            samples=samples,
            seconds=seconds,
            samples_per_s=_ratio(samples, seconds),
            train_loss=self._own_loss() if self.apart else self._loss.mean(),
            test_loss=_finite(self._evaluated.loss) if self._evaluated else None,
            accuracy=_finite(self._evaluated.accuracy) if self._evaluated else None,
            rounds=lateness.rounds,
            judged_by=lateness.judged_by,
            spread_s=lateness.spread_s,
            outcome=self._outcome(),
            failure=self._failure(),
            workers=tuple(
                worker_summary(rank, self._workers[rank], lateness) for rank in sorted(self._workers)
            ),
            communication=self._communication(lateness.judged_by, late_rounds),
            coding=self._codecs.figures(),
            sync=self._sync_figures(),
            costs=self._costs.costs() if self._costs is not None and not self._sync.served else (),
            met=lateness.met,
            meet_often=lateness.meet_often,
            standstills=lateness.standstills,
            decisions=self._decisions.decisions() if self._decisions is not None else (),
            settled=self._settled_figures(late_rounds, lateness.rounds),
            verified=self._verify.summary(),
            stages=self._stages.figures(),
            members=self._members.figures(),
        )

    def _settled_figures(self, late_rounds: list[ObservedRound], rounds: int) -> SettledFigures | None:
        if self._settled is None or self.apart:
            return None
        settled = self._settled.with_more(late_rounds)
        return settled.figures(self._workers, len(self._hosts), rounds)

    def _own_loss(self) -> float | None:
        """The mean over samples of the last tenth of each worker's own steps."""
        sums = [loss.sums() for _, loss in sorted(self._own_losses.items())]
        samples = sum(count for _, count in sums)
        return sum(total for total, _ in sums) / samples if samples else None

    def _communication(self, by: Basis, late_rounds: list[ObservedRound]) -> Communication | None:
        if self._traffic is None or self.apart:
            return None
        return self._traffic.communication(by, late_rounds)

    def _sync_figures(self) -> SyncFigures | None:
        if not self.apart:
            return None
        exchanges = {rank: worker.exchanges for rank, worker in self._workers.items()}
        return self._sync.figures(self.policy, exchanges, self._family)

    def _outcome(self) -> str:
        if self._ended is not None:
            return self._ended.outcome
        return "failed" if self._failed is not None else UNFINISHED

    def _failure(self) -> str:
        if self._failed is not None:
            node = f" ({self._failed.node})" if self._failed.node else ""
            return f"rank {self._failed.failed}{node}: {self._failed.cause}"
        if self._ended is not None and self._ended.outcome != "completed":
            return self._ended.detail
        return ""


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def summarise(events: Iterable[AnyEvent], policy: str = "") -> Summary:
    """The figures of these events; `policy` as for `Tally`."""
    tally = Tally(policy=policy)
    for event in events:
        tally.add(event)
    return tally.summary()


def write_summary(folder: RunFolder) -> Summary:
    """Summarise the run and write the figures to its `summary.json`."""
    summary = whole_summary(folder)
    data = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    write_whole(folder.summary, data + b"\n", option="")
    return summary


def whole_summary(folder: RunFolder) -> Summary:
    """The figures of a run, with its plan's prediction beside them."""
    begins: dict[int, float] = {}
    policy = policy_of(folder)
    summary = summarise(_noting(begins, read_run(folder)), policy)
    score = _score(folder, list(begins.values())) if summary.sync is None else None
    return msgspec.structs.replace(summary, prediction=score)


def _noting(begins: dict[int, float], events: Iterable[AnyEvent]) -> Iterator[AnyEvent]:
    """The events; when each step of rank 0 began is written down."""
    for event in events:
        if isinstance(event, StepEnded) and event.rank == 0:
            begins[event.step] = event.start
        yield event


def _score(folder: RunFolder, begins: Sequence[float]) -> PlanScore | None:
    """The plan's prediction beside the measured step, if there are both."""
    try:
        view = view_of(read_toml(folder.plan.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    predicted_s = view.step_s if view is not None else None
    measured_s = measured_step_s(begins)
    if not predicted_s or measured_s is None:
        return None
    return PlanScore(
        predicted_step_s=predicted_s, measured_step_s=measured_s, ratio=measured_s / predicted_s
    )
