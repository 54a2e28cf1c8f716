"""Typed facts about a run: what happened, when, on which worker.

Dashboards, reports, planner feedback and tests read events and nothing else. An event is one line of
JSON in `events/`; its `type` says which class it is. Times are Unix seconds on the worker's clock,
durations are seconds. Rank -1 is the launcher.

A field may be added with a default; none is ever renamed or given another meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias, get_args

import msgspec

LAUNCHER = -1


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """One fact, at a time, on a worker."""

    t: float
    rank: int


class RunStarted(Event, frozen=True, kw_only=True, tag="run-started"):
    """A run begins; written once, by the launcher or, without one, by the leader.

    `sync` is the policy by which workers agree; empty where nobody said.
    """

    run: str
    command: list[str]
    world_size: int
    sync: str = ""


class WorkerJoined(Event, frozen=True, kw_only=True, tag="worker-joined"):
    """A worker has met all the others."""

    node: str
    host: str
    pid: int
    threads: int
    device: str


class StepsExpected(Event, frozen=True, kw_only=True, tag="steps-expected"):
    """The step number at which the run will be over, as far as is known now."""

    steps: int


class StepEnded(Event, frozen=True, kw_only=True, tag="step"):
    """One optimizer step of one worker, from asking for data to asking for the next.

    On the worker's clock: `start`, then `data_s` of waiting for data, `compute_s` of forward and
    backward, `arrival` at the round, `wait_s` until the round's result was there, `apply_s` in the
    optimizer. `delay_s` is the part of `compute_s` that was injected on purpose. With accumulation
    the durations are sums over its micro-batches.
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


class BucketReduced(Event, frozen=True, kw_only=True, tag="bucket"):
    """One bucket of gradients has been reduced, within the step that the worker's next StepEnded tells of.

    `start` is when the worker began to fill it, which took `encode_s`. From `begun` on its bytes could
    move, at `sent` this worker had handed over its last, at `ended` the result was there; 0 where the
    group does not say. `adding_s` is what this worker spent on sums, `wait_s` how long its trainer stood
    still for this bucket. `how` says in what form it went; `coded_bytes` of what was sent were encoded.
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


class LinkMeasured(Event, frozen=True, kw_only=True, tag="link"):
    """What the link from this worker to rank `peer` can carry; shared memory is no link."""

    peer: int
    latency_s: float
    bytes_per_s: float


class Evaluated(Event, frozen=True, kw_only=True, tag="evaluated"):
    """The model was measured on held-out data; the figures are those of all workers together."""

    epoch: int
    step: int
    loss: float | None = None
    accuracy: float | None = None
    samples: int


class EpochEnded(Event, frozen=True, kw_only=True, tag="epoch-ended"):
    """This worker went through the data once."""

    epoch: int
    step: int


class Noted(Event, frozen=True, kw_only=True, tag="noted"):
    """Something the user should know about, in one sentence: a fallback taken, a rule applied."""

    text: str


class Logged(Event, frozen=True, kw_only=True, tag="logged"):
    """Numbers that the user's script reported through `session.log`."""

    step: int
    values: dict[str, float]


class ServerEnded(Event, frozen=True, kw_only=True, tag="server-ended"):
    """A parameter server has done its part.

    `queue_s`, `apply_s` and `hand_s` are the mean times of keeping a push, of an update, and of handing out
    weights. `pushed_bytes` came in `pushes`, and `pulled_bytes` went out; without the codec it would have
    been `dense_pushed_bytes` and `dense_pulled_bytes`.
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
    """A checkpoint is complete on disk."""

    path: str
    step: int
    seconds: float
    size_bytes: int


class CheckpointLoaded(Event, frozen=True, kw_only=True, tag="checkpoint-loaded"):
    """Training goes on from a checkpoint; `rejected` lists newer ones that could not be used."""

    path: str
    step: int
    rejected: dict[str, str]


class Arrived(Event, frozen=True, kw_only=True, tag="arrival"):
    """A server's coordinator was told something; `rank` is the server's.

    Kind: gradient, delta, weights or ask (see `sync/served.py`), or leave, join and tick, which have no
    step. `table` counts optimizers. `version` is that of the weights when it came, `read` of those that it
    was computed on.
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
    """What the sync policy made of the arrival before it: apply, drop, release, invite or wake.

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


class FaultInjected(Event, frozen=True, kw_only=True, tag="fault-injected"):
    """The lab did something to the cluster on purpose."""

    action: str
    target: str
    detail: str


class WorkerFailed(Event, frozen=True, kw_only=True, tag="worker-failed"):
    """A worker ended otherwise than well; `failed` is its rank."""

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
    | LinkMeasured
    | Evaluated
    | EpochEnded
    | Noted
    | Logged
    | ServerEnded
    | CheckpointSaved
    | CheckpointLoaded
    | Arrived
    | Decided
    | FaultInjected
    | WorkerFailed
    | RunEnded
)

encode = msgspec.json.Encoder().encode
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_kinds: dict[str, type[AnyEvent]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyEvent)}


def decode_line(line: bytes) -> AnyEvent | None:
    """One event, or None for a line that was cut off by a crash or written by a newer version."""
    try:
        return _decoder.decode(line)
    except msgspec.ValidationError:
        return _decode_with_nan(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _decode_with_nan(line: bytes) -> AnyEvent | None:
    """JSON has no nan and no infinity and says null; where a number must stand, null is read as nan."""
    try:
        raw = msgspec.json.decode(line)
        kind = _kinds[raw["type"]]
        for field in msgspec.structs.fields(kind):
            value = raw.get(field.encode_name, field.default)
            if field.type is float and value is None:
                raw[field.encode_name] = math.nan
            elif field.type == dict[str, float]:
                raw[field.encode_name] = {k: math.nan if v is None else v for k, v in value.items()}
        return msgspec.convert(raw, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def read_events(file: Path) -> Iterator[AnyEvent]:
    """The events of one worker, in the order in which they were written."""
    with file.open("rb") as lines:
        for line in lines:
            event = decode_line(line)
            if event is not None:
                yield event
