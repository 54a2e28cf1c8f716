"""The events of a run: what happened, when, on which worker.

Displays, reports and tests read nothing but events. An event is one line of JSON in `events/`; its `type`
names its class. Times are Unix seconds on the worker's clock, durations are seconds. Rank -1 is the
launcher.

Fields may be added with a default, but are never renamed or given another meaning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias, get_args

import msgspec

LAUNCHER = -1


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One event: when, and on which worker."""

    t: float
    rank: int


class RunStarted(Event, frozen=True, kw_only=True, tag="run-started"):
    """A run begins; written once, by the launcher or, without one, by rank 0.

    `sync` is the sync policy; empty if unknown.
    """

    run: str
    command: list[str]
    world_size: int
    sync: str = ""


class WorkerJoined(Event, frozen=True, kw_only=True, tag="worker-joined"):
    """A worker is connected with all the others.

    `sync` is the policy by which it synchronises, which a script may have chosen, and `family` the family
    that carries it out: `local(1)` is carried out as `full` is. Both are empty if unknown. `groups` are the
    ranks that act as one worker each, with `levels`; else empty.
    """

    node: str
    host: str
    pid: int
    threads: int
    device: str
    sync: str = ""
    family: str = ""
    groups: list[list[int]] = []


class StepsExpected(Event, frozen=True, kw_only=True, tag="steps-expected"):
    """The number of steps after which the run will end, as far as is known now."""

    steps: int


class StepEnded(Event, frozen=True, kw_only=True, tag="step"):
    """One optimizer step of one worker, from requesting data to requesting the next.

    In order, on the worker's clock: `start`, then `data_s` of waiting for data, `compute_s` of forward and
    backward, `arrival` at the round, `wait_s` until the round's result arrived, `apply_s` in the
    optimizer. `delay_s` is the part of `compute_s` that was injected on purpose. With accumulation
    the durations are sums over micro-batches.

    `exchanges_us` are the other places where this worker met the others, in order: statistics of batch
    normalisation, averages of weights. Each has the microseconds since the exchange before it (since
    `start` for the first), and those that the exchange took, which are part of `wait_s`. If there were too
    many, neighbours are merged. `deferred_s` is the part of `wait_s` that was for the round before.

    Of the training thread, but for waits at rounds and exchanges: `cpu_s` on a core, `starved_s` ready to
    run without one; None if unknown.
    """

    step: int
    epoch: int
    start: float
    data_s: float
    compute_s: float
    arrival: float
    wait_s: float
    apply_s: float
    share: int
    batch: int
    sent_bytes: int
    loss: float | None = None
    delay_s: float = 0.0
    exchanges_us: list[tuple[int, int]] = []
    deferred_s: float = 0.0
    cpu_s: float | None = None
    starved_s: float | None = None


class BucketReduced(Event, frozen=True, kw_only=True, tag="bucket"):
    """One bucket of gradients was reduced, during the step of the worker's next StepEnded.

    The worker began to fill it at `start`, which took `encode_s`. Transfer could begin at `begun`, this
    worker had sent its last byte at `sent`, the result was complete at `ended`; all three are 0 if the
    group does not report them. This worker spent `adding_s` on sums, and its trainer waited `wait_s` for
    the bucket. `how` is dense, factors or the codec; `coded_bytes` is the encoded part of `sent_bytes`.
    With several rounds in a step, indices repeat.
    """

    step: int
    index: int
    size_bytes: int
    sent_bytes: int
    start: float
    encode_s: float
    begun: float
    sent: float
    ended: float
    adding_s: float
    wait_s: float
    how: str = "dense"
    coded_bytes: int = 0


class StageAssigned(Event, frozen=True, kw_only=True, tag="stage"):
    """Which layers of a model this worker has, as a stage of a pipeline; written when the model is cut.

    It has layers `begin` to `end`, the latter excluded; `first` and `last` are their names. `ranks` are the
    workers of its pipeline, by stage. `predicted_s` is the time of a micro-batch, forward and backward, as
    its layers were measured one by one, `predicted_bytes` is for parameters, gradients, states and
    activations; both are 0 if nothing was measured. `chunks`: the first and last layers (the latter
    excluded) of each of the worker's chunks, if it has several; `end` is that of the last one.
    """

    replica: int
    stage: int
    ranks: list[int]
    begin: int
    end: int
    first: str
    last: str
    schedule: str
    micro: int
    predicted_s: float = 0.0
    predicted_bytes: float = 0.0
    chunks: list[tuple[int, int]] = []


class PassesTimed(Event, frozen=True, kw_only=True, tag="passes"):
    """What a stage of a pipeline computed for a batch, during the step of the worker's next StepEnded.

    `passes`, in order: kind, number of the micro-batch, microseconds since `start`, microseconds for which
    it then waited for another stage, and those that it took after that. A forward pass waits for the stage
    before, a backward pass for the one after, `weights` for nobody, and the `result` comes from the last
    stage. `memory_bytes` is the process's resident memory above that without the model. `chunks`: which of
    the worker's chunks each pass went through, if it has several.
    """

    step: int
    start: float
    passes: list[tuple[str, int, int, int, int]]
    memory_bytes: int = 0
    chunks: list[int] = []


class LinkMeasured(Event, frozen=True, kw_only=True, tag="link"):
    """The measured rate and latency of the link from this worker to rank `peer`; not for shared memory."""

    peer: int
    latency_s: float
    bytes_per_s: float


class WorkersAwaited(Event, frozen=True, kw_only=True, tag="awaited"):
    """This worker has been waiting for others since `since`; it is written again while the wait goes on.

    `awaited` are the ranks without which it cannot go on, `doing` what they are doing, by rank as text, as
    far as they answered: "rank 1 is in a backward pass (train.py:41)".
    """

    step: int
    since: float
    awaited: list[int]
    doing: str = ""


class SharesChanged(Event, frozen=True, kw_only=True, tag="shares-changed"):
    """The workers' shares of a batch change, by rank, because of the times of their steps.

    Rank `slowest` took `slowest_s` for its share; with the new shares no worker should take longer than
    `expected_s`.
    """

    step: int
    shares: list[int]
    before: list[int]
    slowest: int
    slowest_s: float
    expected_s: float


class CollectiveChanged(Event, frozen=True, kw_only=True, tag="collective-changed"):
    """Gradients travel in another way from now on, because of the workers' links or speeds.

    Summing all gradients should take `expected_s`, where it would take `before_s` as before; 0 if unknown.
    `groups` are the ranks that are neighbours, for a collective that sums in groups first; empty if workers
    are neighbours by rank.
    """

    step: int
    collective: str
    before: str
    reason: str
    expected_s: float = 0.0
    before_s: float = 0.0
    groups: list[list[int]] = []


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluated"):
    """The model was evaluated on held-out data by all workers together."""

    epoch: int
    step: int
    loss: float | None = None
    accuracy: float | None = None
    samples: int


class EpochEnded(Event, frozen=True, kw_only=True, tag="epoch-ended"):
    """This worker completed a pass through the data."""

    epoch: int
    step: int


class Noted(Event, frozen=True, kw_only=True, tag="noted"):
    """Something the user should know, in one sentence, such as a fallback that was taken.

    `warning`: it was logged as a warning, so the worker has printed it too.
    """

    text: str
    warning: bool = False


class CorruptionFound(Event, frozen=True, kw_only=True, tag="corruption"):
    """A check (`--verify`) found something; written by rank 0 for all workers.

    `worker` is the rank to which it is assigned, -1 if it cannot be assigned to one. `tensor` names a
    parameter, `what` says what is wrong with its gradient, weight or state. `action` is what was done:
    warned, refused (the step was skipped on all workers), repaired, kept (the original was right) or
    stopped.
    """

    step: int
    check: str
    worker: int
    node: str
    tensor: str
    what: str
    action: str

    @property
    def text(self) -> str:
        """The finding as a sentence."""
        on = f" on {self.node}" if self.node else ""
        who = f"rank {self.worker}{on}: " if self.worker >= 0 else ""
        return f"verify {self.check}, step {self.step:,}: {who}{self.tensor} {self.what}; {self.action}"


class Verified(Event, frozen=True, kw_only=True, tag="verified"):
    """How many comparisons each check (`--verify`) has made, by its name; written at the end, by rank 0."""

    checks: str
    compared: dict[str, int]


class MembersChanged(Event, frozen=True, kw_only=True, tag="members-changed"):
    """What became of a worker (`--min-workers`), why, and how many workers go on.

    `what`: lost, left out, left, back, did not come back, not started again, joined, did not join, or met
    again (after a damaged message; nobody was lost).
    """

    worker: int
    what: str
    workers: int
    reason: str = ""


class Logged(Event, frozen=True, kw_only=True, tag="logged"):
    """Numbers that the user's script reported through `session.log`."""

    step: int
    values: dict[str, float]


class LayoutsPredicted(Event, frozen=True, kw_only=True, tag="layouts"):
    """`parallel="auto"` has chosen a layout; written by rank 0.

    `steps_s` are the predicted seconds of a step with each layout that fits, the best first; `worth` those
    that are not hopeless; `left_out` why others were not considered.
    """

    chosen: str
    steps_s: dict[str, float]
    worth: list[str] = []
    left_out: dict[str, str] = {}


class MemoryUsed(Event, frozen=True, kw_only=True, tag="memory"):
    """What this worker's part of the models was predicted to take, by kind, and what it took at most.

    `measured_bytes` is by how much the process grew, with what the models took already: also activations,
    and what is under way. `room_bytes` is what the worker might have used.
    """

    parameters_bytes: int
    gradients_bytes: int
    states_bytes: int
    room_bytes: int
    measured_bytes: int


class ServerEnded(Event, frozen=True, kw_only=True, tag="server-ended"):
    """A parameter server has finished.

    `queue_s`, `apply_s` and `hand_s` are the mean times for storing a push, making an update, and sending
    weights. The server received `pushed_bytes` in `pushes` and sent `pulled_bytes`; without the codec these
    would have been `dense_pushed_bytes` and `dense_pulled_bytes`.
    """

    queue_s: float
    apply_s: float
    hand_s: float
    pushes: int
    codec: str
    pushed_bytes: int
    dense_pushed_bytes: int
    pulled_bytes: int
    dense_pulled_bytes: int


class CheckpointSaved(Event, frozen=True, kw_only=True, tag="checkpoint-saved"):
    """A checkpoint is complete on disk, `seconds` after it was begun; training paused for `pause_s`."""

    path: str
    step: int
    seconds: float
    size_bytes: int
    pause_s: float = 0.0


class CheckpointLoaded(Event, frozen=True, kw_only=True, tag="checkpoint-loaded"):
    """Training continues from a checkpoint; `rejected` maps newer, unusable ones to the reasons."""

    path: str
    step: int
    rejected: dict[str, str]


class Arrived(Event, frozen=True, kw_only=True, tag="arrival"):
    """Input of the sync policy at the coordinating server, whose rank is `rank`.

    Kind: gradient, delta, weights or ask (see `sync/families/serve.py`), or leave, join and tick, which
    have no step. `table` is the optimizer's index. `version` is that of the weights at the arrival, `read`
    that of the weights the push was computed on.
    """

    worker: int
    kind: str
    table: int = 0
    step: int = -1
    version: int = 0
    read: int = 0
    samples: float = 0.0
    compute_s: float = 0.0
    transfer_s: float = 0.0
    square: float = 0.0
    dot: float = 0.0


class Decided(Event, frozen=True, kw_only=True, tag="decision"):
    """A decision of the sync policy after the preceding arrival: apply, drop, release, invite or wake.

    `parts` of an update are (worker, step, weight); `version` is that of the weights after it.
    """

    what: str
    version: int
    table: int = 0
    worker: int = -1
    step: int = -1
    parts: list[tuple[int, int, float]] = []
    fresh: bool = True
    ask: bool = False
    at: float = 0.0
    reason: str = ""


class QuotasApplied(Event, frozen=True, kw_only=True, tag="quotas-applied"):
    """The CPU quotas of a lab came into force; its faults by seconds count from here.

    `quotas` are the cores of each node that has a quota, by name; `after_s` is the time since workers were
    started.
    """

    reason: str
    after_s: float
    quotas: dict[str, float]


class FaultInjected(Event, frozen=True, kw_only=True, tag="fault-injected"):
    """The lab injected a fault into the cluster."""

    action: str
    target: str
    detail: str


class WorkerFailed(Event, frozen=True, kw_only=True, tag="worker-failed"):
    """The worker of rank `failed` failed."""

    failed: int
    node: str
    cause: str


class RunEnded(Event, frozen=True, kw_only=True, tag="run-ended"):
    """The run is over. Outcome: completed, failed or interrupted."""

    outcome: str
    detail: str = ""


AnyEvent: TypeAlias = (
    RunStarted
    | WorkerJoined
    | StepsExpected
    | StepEnded
    | BucketReduced
    | StageAssigned
    | PassesTimed
    | LinkMeasured
    | WorkersAwaited
    | Evaluated
    | EpochEnded
    | Noted
    | SharesChanged
    | CollectiveChanged
    | CorruptionFound
    | Verified
    | MembersChanged
    | Logged
    | LayoutsPredicted
    | MemoryUsed
    | ServerEnded
    | CheckpointSaved
    | CheckpointLoaded
    | Arrived
    | Decided
    | QuotasApplied
    | FaultInjected
    | WorkerFailed
    | RunEnded
)

encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_kinds: dict[str, type[AnyEvent]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyEvent)}
EVENT_TYPES = frozenset(_kinds)


# No time, count or rate is as large as 1e100; sums of such numbers overflow.
_ABSURD = re.compile(rb"[:,\[]-?[0-9.]*(?:[0-9][eE]\+?0*[1-9][0-9]{2}|[0-9]{100})")  # numbers, not texts
_ABSURD_LOSS = re.compile(rb'("loss":)-?[0-9.]+[eE][0-9+]+')
_END_OF_TIME_S = 1e11
_CLOCKED = frozenset({
    "t", "start", "arrival", "begun", "sent", "ended",
    "data_s", "compute_s", "wait_s", "apply_s", "encode_s",
})  # fmt: skip


def decode_line(line: bytes) -> AnyEvent | None:
    """One event, or None for a line that is incomplete, damaged, or was written by a newer version."""
    if _ABSURD.search(line):
        line = _ABSURD_LOSS.sub(rb"\1null", line)  # a loss may be anything: training diverged
        if _ABSURD.search(line):
            return None
    try:
        event = _decoder.decode(line)
        times = (event.t, getattr(event, "start", 0.0))
        return event if max(map(abs, times)) < _END_OF_TIME_S else None
    except msgspec.ValidationError:
        return _decode_with_nan(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _decode_with_nan(line: bytes) -> AnyEvent | None:
    """Decode a line, reading null as nan where a number is required: JSON cannot write nan or infinity."""
    try:
        raw = msgspec.json.decode(line)
        kind = _kinds[raw["type"]]
        for field in msgspec.structs.fields(kind):
            value = raw.get(field.encode_name, field.default)
            if field.type is float and value is None:
                if field.name in _CLOCKED:
                    return None  # clocks never read nan: the line is damaged
                raw[field.encode_name] = math.nan
            elif field.type == dict[str, float]:
                raw[field.encode_name] = {k: math.nan if v is None else v for k, v in value.items()}
        return msgspec.convert(raw, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_events(file: Path) -> Iterator[AnyEvent]:
    """The events of one worker, in file order."""
    with file.open("rb") as lines:
        for line in lines:
            event = decode_line(line)
            if event is not None:
                yield event
