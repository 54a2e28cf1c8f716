"""The three ways to combine encoded gradients of several workers: generators for the codec thread.

    gather   every worker sends all its ranges to all; all decode and add them in the order of ranks
    scatter  every worker sends ranges to their owners; owners add them and send totals, which all decode
    summed   the codec's numbers are added by an all-reduce, once or several times

All workers read the same bytes in the same order, so they end with the same bits. Gradients that are not
finite are never encoded: the worker reports them instead, and the round fails on all workers, with its
name.

A message holds

    report   rank, parameter   of a gradient that is not finite; (65535, 65535) if there is none
    used     one bit for each parameter of the bucket: whether its gradient was computed
    lengths  of each range's bytes, 4 bytes each
    bytes    of each range

All workers know from the bucket which ranges a message holds; one with a report holds none.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from echelon.codec.codec import Codec, CodecContext, State, Summed, owners, seed_of
from echelon.comm.future import Timing
from echelon.comm.group import Group
from echelon.errors import Corrupt
from echelon.reduce.encoded.states import States
from echelon.reduce.encoded.thread import Steps

_HEAD = struct.Struct("<HH")
_NONE = 0xFFFF


class NonFinite(NamedTuple):
    """A gradient that is not finite: its worker, and its parameter's index in the bucket."""

    rank: int
    parameter: int


class EncodedMessage(NamedTuple):
    """The contents of a message."""

    used: list[bool]
    payloads: list[Tensor]
    non_finite: NonFinite | None = None


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """A contiguous range of one parameter of a bucket."""

    index: int
    name: str
    shape: tuple[int, ...]
    length: int  # of the whole parameter
    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many elements it has."""
        return self.stop - self.start

    def part(self, start: int, stop: int) -> ParameterRange:
        """A part of this range."""
        at = self.start
        return ParameterRange(self.index, self.name, self.shape, self.length, at + start, at + stop)

    def shares(self, workers: int) -> list[ParameterRange]:
        """The parts that so many workers own."""
        return [self.part(*span) for span in owners(self.size, workers, seed_of(self.name))]


class LoadedRange(NamedTuple):
    """A range, and the memory of its values and then of its total."""

    piece: ParameterRange
    values: Tensor


@dataclass(slots=True)
class EncodedRound:
    """One bucket in one round: its inputs, and then its results."""

    codec: Codec
    states: States
    lanes: Sequence[Group]
    held: Sequence[LoadedRange]
    used: list[bool]
    non_finite: NonFinite | None
    priority: int
    names: Mapping[int, str]  # how errors call workers, by rank in the view
    accumulated: frozenset[int] = frozenset()  # parameters whose gradients are added to an earlier round's
    timing: Timing = field(default_factory=Timing)
    encode_s: float = 0.0
    sent_bytes: int = 0

    @property
    def me(self) -> int:
        """This worker's rank in the view."""
        return self.lanes[0].ranks[self.rank]

    @property
    def rank(self) -> int:
        """This worker's rank among those that exchange."""
        return self.lanes[0].rank

    @property
    def size(self) -> int:
        """How many workers exchange."""
        return self.lanes[0].size

    def context(self, piece: ParameterRange, rank: int) -> CodecContext:
        """What the codec may depend on for this range."""
        return CodecContext(
            step=self.states.step(piece.name),
            workers=self.size,
            rank=rank,
            seed=seed_of(piece.name),
            start=piece.start,
            shape=piece.shape,
            further=piece.index in self.accumulated,
        )

    def state(self, piece: ParameterRange) -> State:
        """The codec's state of a range."""
        return self.states.slice(piece.name, piece.length, piece.start, piece.stop)


def steps(work: EncodedRound) -> Steps:
    """The round of a bucket, in its codec's way."""
    if work.codec.travels == "gather":
        return gather(work)
    if work.codec.travels == "scatter":
        return scatter(work)
    return summed(work, cast(Summed, work.codec))


def gather(work: EncodedRound) -> Steps:
    """All bytes to all workers."""
    begun = time.perf_counter()
    payloads = [] if work.non_finite else [_encode(work, held) for held in work.held]
    data = write_message(EncodedMessage(work.used, payloads, work.non_finite))
    work.encode_s += time.perf_counter() - begun
    work.timing.begun = time.perf_counter()
    all_to_all = work.lanes[0].all_to_all([data] * work.size, priority=work.priority)
    yield all_to_all.received
    messages = all_to_all.received.wait()
    work.sent_bytes += all_to_all.sent_bytes
    work.timing.sent = all_to_all.received.timing.sent
    begun = time.perf_counter()
    decoded = [_read(work, data, rank, len(work.held)) for rank, data in enumerate(messages)]
    if work.non_finite is not None:
        _take_back(work, zip(payloads, work.held, strict=False))
    for place, held in enumerate(work.held):
        if work.non_finite is None:
            held.values.zero_()
            for rank, one in enumerate(decoded):
                context = work.context(held.piece, rank)
                work.codec.read(one.payloads[place], held.values, context, add=True)
    _finish(work, begun)


def scatter(work: EncodedRound) -> Steps:
    """Parts to their owners; totals to all workers."""
    begun = time.perf_counter()
    shares = [held.piece.shares(work.size) for held in work.held]
    outgoing = []
    written: list[tuple[Tensor, LoadedRange]] = []
    for rank in range(work.size):
        parts = [
            _within(held, share[rank])
            for held, share in zip(work.held, shares, strict=True)
            if rank != work.rank and work.non_finite is None and share[rank].size
        ]
        payloads = [_encode(work, part) for part in parts]
        written += zip(payloads, parts, strict=True)
        outgoing.append(write_message(EncodedMessage(work.used, payloads, work.non_finite)))
    work.encode_s += time.perf_counter() - begun
    work.timing.begun = time.perf_counter()
    all_to_all = work.lanes[0].all_to_all(outgoing, priority=work.priority)
    yield all_to_all.received
    messages = all_to_all.received.wait()
    work.sent_bytes += all_to_all.sent_bytes
    begun = time.perf_counter()
    data = _totals(work, messages, shares)
    if work.non_finite is not None:
        _take_back(work, written)
        written = []
    work.encode_s += time.perf_counter() - begun
    all_to_all = work.lanes[1].all_to_all([data] * work.size, priority=work.priority)
    yield all_to_all.received
    messages = all_to_all.received.wait()
    work.sent_bytes += all_to_all.sent_bytes
    work.timing.sent = all_to_all.received.timing.sent
    begun = time.perf_counter()
    owned = [
        [(held, share[rank]) for held, share in zip(work.held, shares, strict=True) if share[rank].size]
        for rank in range(work.size)
    ]
    decoded = [_read(work, data, rank, len(owned[rank])) for rank, data in enumerate(messages)]
    for rank, one in enumerate(decoded if work.non_finite is None else ()):
        for (held, piece), payload in zip(owned[rank], one.payloads, strict=True):
            whole = work.states.of(piece.name, piece.length)
            context = work.context(piece, rank)
            work.codec.read_total(payload, _within(held, piece).values, whole, context)
    if work.non_finite is not None:
        _take_back(work, written)
    else:
        for held in work.held:
            context = work.context(held.piece, work.rank)
            work.codec.settle(work.states.of(held.piece.name, held.piece.length), context)
    _finish(work, begun)


def _totals(
    work: EncodedRound, messages: Sequence[Tensor], shares: Sequence[Sequence[ParameterRange]]
) -> Tensor:
    """The message of this worker's totals."""
    mine = [(held, share[work.rank]) for held, share in zip(work.held, shares, strict=True)]
    mine = [(held, piece) for held, piece in mine if piece.size]
    decoded = [
        _read(work, data, rank, len(mine)) for rank, data in enumerate(messages) if rank != work.rank
    ]
    totals = []
    for place, (held, piece) in enumerate(mine):
        if work.non_finite is None:
            parts = [one.payloads[place] for one in decoded]
            own = _within(held, piece).values
            context = work.context(piece, work.rank)
            try:
                totals.append(work.codec.merge(parts, own, work.state(piece), context))
            except OverflowError:
                work.non_finite = NonFinite(work.me, piece.index)
    return write_message(EncodedMessage(work.used, [] if work.non_finite else totals, work.non_finite))


def summed(work: EncodedRound, codec: Summed) -> Steps:
    """Numbers that are added; flags and reports are further numbers."""
    begun = time.perf_counter()
    contexts = [work.context(held.piece, work.rank) for held in work.held]
    states = [work.state(held.piece) for held in work.held]  # once: codecs keep values between rounds
    # A codec must treat its state alike on all workers, also if one of them has a report.
    numbers = [
        codec.first(
            held.values if work.non_finite is None else torch.zeros_like(held.values), state, context
        )
        for held, state, context in zip(work.held, states, contexts, strict=True)
    ]
    reports = torch.zeros(work.size, 2, dtype=torch.float32)
    if work.non_finite is not None:
        reports[work.rank] = to_numbers(work.non_finite)
    used = torch.tensor(work.used, dtype=torch.float32)
    lengths = [part.numel() for part in numbers]
    total = torch.cat([*numbers, used, reports.view(-1)])
    work.encode_s += time.perf_counter() - begun
    work.timing.begun = time.perf_counter()
    future = work.lanes[0].all_reduce(total, priority=work.priority)
    yield future
    future.wait()
    work.sent_bytes += work.lanes[0].sent_bytes(total)
    flags = total[sum(lengths) :]
    work.non_finite = from_numbers(flags[len(work.used) :])
    work.used = [bool(flag) for flag in flags[: len(work.used)]]
    for _ in range(codec.rounds - 1):
        begun = time.perf_counter()
        parts = torch.split(total[: sum(lengths)], lengths)
        numbers = [
            codec.further(part, state, context)
            for part, state, context in zip(parts, states, contexts, strict=True)
        ]
        lengths = [part.numel() for part in numbers]
        total = torch.cat([*numbers, torch.empty(0, dtype=torch.float32)])  # a rail may have no range
        work.encode_s += time.perf_counter() - begun
        future = work.lanes[1].all_reduce(total, priority=work.priority)
        yield future
        future.wait()
        work.sent_bytes += work.lanes[1].sent_bytes(total)
    work.timing.sent = future.timing.sent
    begun = time.perf_counter()
    parts = torch.split(total[: sum(lengths)], lengths)
    for held, part, state, context in zip(work.held, parts, states, contexts, strict=True):
        codec.finish(part, held.values, state, context)
    _finish(work, begun)


def to_numbers(non_finite: NonFinite | None) -> Tensor:
    """A report as two numbers that can be summed; zeros if there is none."""
    return torch.tensor([-1, -1] if non_finite is None else non_finite, dtype=torch.float32) + 1.0


def from_numbers(numbers: Tensor) -> NonFinite | None:
    """The first of all members' reports."""
    found = [NonFinite(*(pair - 1).int().tolist()) for pair in numbers.view(-1, 2) if pair.any()]
    return min(found) if found else None


def _encode(work: EncodedRound, held: LoadedRange) -> Tensor:
    piece = held.piece
    return work.codec.encode(held.values, work.state(piece), work.context(piece, work.rank))


def _take_back(work: EncodedRound, written: Iterable[tuple[Tensor, LoadedRange]]) -> None:
    """The round fails: return what was encoded to the codec's state."""
    for payload, held in written:
        context = work.context(held.piece, work.rank)
        work.codec.take_back(payload, held.values, work.state(held.piece), context)


def _within(held: LoadedRange, piece: ParameterRange) -> LoadedRange:
    at = held.piece.start
    return LoadedRange(piece, held.values[piece.start - at : piece.stop - at])


def _read(work: EncodedRound, data: Tensor, rank: int, pieces: int) -> EncodedMessage:
    """Decode a member's message, and take over its flags and its report."""
    one = read_message(data, len(work.used), pieces, work.names[work.lanes[0].ranks[rank]])
    work.used = any_used([work.used, one.used])
    if one.non_finite is not None:
        work.non_finite = min(one.non_finite, work.non_finite or one.non_finite)
    return one


def _finish(work: EncodedRound, begun: float) -> None:
    for held in work.held:
        work.states.count(held.piece.name)
    now = time.perf_counter()
    work.timing.adding_s += now - begun
    work.timing.ended = now


# Messages -------------------------------------------------------------------------------------------


def write_message(message: EncodedMessage) -> Tensor:
    """The bytes of a message."""
    head = _HEAD.pack(*(message.non_finite or (_NONE, _NONE)))
    used = np.packbits(np.array(message.used, dtype=bool)).tobytes()
    lengths = np.array([payload.numel() for payload in message.payloads], dtype="<u4").tobytes()
    front = torch.frombuffer(bytearray(head + used + lengths), dtype=torch.uint8)
    return torch.cat([front, *message.payloads])


def read_message(data: Tensor, parameters: int, pieces: int, sender: str) -> EncodedMessage:
    """Decode a message of so many parameters and ranges; Corrupt if it is none."""
    raw = data.numpy()
    used_bytes = (parameters + 7) // 8
    front = _HEAD.size + used_bytes
    if len(raw) < front:
        raise _unreadable(sender, f"{len(raw)} bytes where the head alone has {front}")
    non_finite = NonFinite(*_HEAD.unpack(raw[: _HEAD.size].tobytes()))
    if non_finite.rank != _NONE:
        pieces = 0
    front += 4 * pieces
    if len(raw) < front:
        raise _unreadable(sender, f"{len(raw)} bytes where the lengths alone end at {front}")
    used = np.unpackbits(raw[_HEAD.size : _HEAD.size + used_bytes], count=parameters).astype(bool)
    lengths = np.frombuffer(raw[front - 4 * pieces : front].tobytes(), "<u4").tolist() if pieces else []
    if front + sum(lengths) != len(raw):
        raise _unreadable(sender, f"{len(raw)} bytes where {front + sum(lengths)} were announced")
    return EncodedMessage(
        used.tolist(),
        list(torch.split(data[front:], lengths)) if lengths else [],
        None if non_finite.rank == _NONE else non_finite,
    )


def _unreadable(sender: str, what: str) -> Corrupt:
    return Corrupt(
        f"{sender} sent encoded gradients that cannot be read: {what}",
        where="codec",
        fix="all workers must use the same codec, model and version of Echelon",
    )


def any_used(used: Sequence[Sequence[bool]]) -> list[bool]:
    """Which parameters at least one worker used."""
    return [any(flags) for flags in zip(*used, strict=True)]
