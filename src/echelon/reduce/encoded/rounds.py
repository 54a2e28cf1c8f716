"""The three ways in which encoded gradients of several workers become one: generators for the relay.

    gather   every worker writes all its pieces, everybody reads everybody's and adds them up by rank
    scatter  every worker writes the parts that others own; owners add up and write totals, which all read
    summed   the codec's numbers are added by an all-reduce, once or several times

All workers read the same bytes in the same order, so they end with the same bits. Gradients that are not
finite are never written: whoever has one complains instead, and the round fails on all workers, by name.
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
    """Whose gradient of which parameter of the bucket is not finite."""

    rank: int
    parameter: int


class EncodedMessage(NamedTuple):
    """What a message says."""

    used: list[bool]
    payloads: list[Tensor]
    complaint: NonFinite | None = None


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
        """A range of this piece."""
        at = self.start
        return ParameterRange(self.index, self.name, self.shape, self.length, at + start, at + stop)

    def shares(self, workers: int) -> list[ParameterRange]:
        """What each of so many workers owns of it."""
        return [self.part(*span) for span in owners(self.size, workers, seed_of(self.name))]


class LoadedRange(NamedTuple):
    """A piece, and the memory in which its values are and its total will be."""

    piece: ParameterRange
    values: Tensor


@dataclass(slots=True)
class EncodedRound:
    """One bucket in one round: what it needs, and what it has found out in the end."""

    codec: Codec
    states: States
    lanes: Sequence[Group]
    held: Sequence[LoadedRange]
    used: list[bool]
    complaint: NonFinite | None
    priority: int
    names: Mapping[int, str]  # how errors call workers, by rank in the view
    further: frozenset[int] = frozenset()  # parameters whose gradients are added to those of a round before
    timing: Timing = field(default_factory=Timing)
    encode_s: float = 0.0
    sent_bytes: int = 0

    @property
    def me(self) -> int:
        """This worker's rank among all."""
        return self.lanes[0].ranks[self.rank]

    @property
    def rank(self) -> int:
        """This worker's place among those who exchange."""
        return self.lanes[0].rank

    @property
    def size(self) -> int:
        """How many exchange."""
        return self.lanes[0].size

    def turn(self, piece: ParameterRange, rank: int) -> CodecContext:
        """What the codec may depend on."""
        return CodecContext(
            step=self.states.step(piece.name),
            workers=self.size,
            rank=rank,
            seed=seed_of(piece.name),
            start=piece.start,
            shape=piece.shape,
            further=piece.index in self.further,
        )

    def state(self, piece: ParameterRange) -> State:
        """The piece's state."""
        return self.states.slice(piece.name, piece.length, piece.start, piece.stop)


def steps(work: EncodedRound) -> Steps:
    """The round of a bucket, in the way of its codec."""
    if work.codec.travels == "gather":
        return gather(work)
    if work.codec.travels == "scatter":
        return scatter(work)
    return summed(work, cast(Summed, work.codec))


def gather(work: EncodedRound) -> Steps:
    """Everybody's bytes to everybody."""
    begun = time.perf_counter()
    payloads = [] if work.complaint else [_encode(work, held) for held in work.held]
    page = write_message(EncodedMessage(work.used, payloads, work.complaint))
    work.encode_s += time.perf_counter() - begun
    work.timing.begun = time.perf_counter()
    all_to_all = work.lanes[0].all_to_all([page] * work.size, priority=work.priority)
    yield all_to_all.received
    pages = all_to_all.received.wait()
    work.sent_bytes += all_to_all.sent_bytes
    work.timing.sent = all_to_all.received.timing.sent
    begun = time.perf_counter()
    messages = [_read(work, page, rank, len(work.held)) for rank, page in enumerate(pages)]
    if work.complaint is not None:
        _take_back(work, zip(payloads, work.held, strict=False))
    for place, held in enumerate(work.held):
        if work.complaint is None:
            held.values.zero_()
            for rank, one in enumerate(messages):
                turn = work.turn(held.piece, rank)
                work.codec.read(one.payloads[place], held.values, turn, add=True)
    _finish(work, begun)


def scatter(work: EncodedRound) -> Steps:
    """Parts to their owners; totals to everybody."""
    begun = time.perf_counter()
    shares = [held.piece.shares(work.size) for held in work.held]
    outgoing = []
    written: list[tuple[Tensor, LoadedRange]] = []
    for rank in range(work.size):
        parts = [
            _within(held, share[rank])
            for held, share in zip(work.held, shares, strict=True)
            if rank != work.rank and work.complaint is None and share[rank].size
        ]
        payloads = [_encode(work, part) for part in parts]
        written += zip(payloads, parts, strict=True)
        outgoing.append(write_message(EncodedMessage(work.used, payloads, work.complaint)))
    work.encode_s += time.perf_counter() - begun
    work.timing.begun = time.perf_counter()
    all_to_all = work.lanes[0].all_to_all(outgoing, priority=work.priority)
    yield all_to_all.received
    pages = all_to_all.received.wait()
    work.sent_bytes += all_to_all.sent_bytes
    begun = time.perf_counter()
    page = _totals(work, pages, shares)
    if work.complaint is not None:
        _take_back(work, written)
        written = []
    work.encode_s += time.perf_counter() - begun
    all_to_all = work.lanes[1].all_to_all([page] * work.size, priority=work.priority)
    yield all_to_all.received
    pages = all_to_all.received.wait()
    work.sent_bytes += all_to_all.sent_bytes
    work.timing.sent = all_to_all.received.timing.sent
    begun = time.perf_counter()
    owned = [
        [(held, share[rank]) for held, share in zip(work.held, shares, strict=True) if share[rank].size]
        for rank in range(work.size)
    ]
    messages = [_read(work, page, rank, len(owned[rank])) for rank, page in enumerate(pages)]
    for rank, one in enumerate(messages if work.complaint is None else ()):
        for (held, piece), payload in zip(owned[rank], one.payloads, strict=True):
            whole = work.states.of(piece.name, piece.length)
            turn = work.turn(piece, rank)
            work.codec.read_total(payload, _within(held, piece).values, whole, turn)
    if work.complaint is not None:
        _take_back(work, written)
    else:
        for held in work.held:
            turn = work.turn(held.piece, work.rank)
            work.codec.settle(work.states.of(held.piece.name, held.piece.length), turn)
    _finish(work, begun)


def _totals(
    work: EncodedRound, pages: Sequence[Tensor], shares: Sequence[Sequence[ParameterRange]]
) -> Tensor:
    """The message of this worker's totals."""
    mine = [(held, share[work.rank]) for held, share in zip(work.held, shares, strict=True)]
    mine = [(held, piece) for held, piece in mine if piece.size]
    messages = [_read(work, page, rank, len(mine)) for rank, page in enumerate(pages) if rank != work.rank]
    totals = []
    for place, (held, piece) in enumerate(mine):
        if work.complaint is None:
            parts = [one.payloads[place] for one in messages]
            own = _within(held, piece).values
            turn = work.turn(piece, work.rank)
            try:
                totals.append(work.codec.merge(parts, own, work.state(piece), turn))
            except OverflowError:
                work.complaint = NonFinite(work.me, piece.index)
    return write_message(EncodedMessage(work.used, [] if work.complaint else totals, work.complaint))


def summed(work: EncodedRound, codec: Summed) -> Steps:
    """Numbers that are added as they are; flags and complaints are numbers beside them."""
    begun = time.perf_counter()
    turns = [work.turn(held.piece, work.rank) for held in work.held]
    states = [work.state(held.piece) for held in work.held]  # once: codecs keep things from round to round
    # What a codec does with its state must be the same on all workers, whatever one of them complains of.
    numbers = [
        codec.first(held.values if work.complaint is None else torch.zeros_like(held.values), state, turn)
        for held, state, turn in zip(work.held, states, turns, strict=True)
    ]
    complaints = torch.zeros(work.size, 2, dtype=torch.float32)
    if work.complaint is not None:
        complaints[work.rank] = said(work.complaint)
    used = torch.tensor(work.used, dtype=torch.float32)
    lengths = [part.numel() for part in numbers]
    total = torch.cat([*numbers, used, complaints.view(-1)])
    work.encode_s += time.perf_counter() - begun
    work.timing.begun = time.perf_counter()
    future = work.lanes[0].all_reduce(total, priority=work.priority)
    yield future
    future.wait()
    work.sent_bytes += work.lanes[0].sent_bytes(total)
    flags = total[sum(lengths) :]
    work.complaint = heard(flags[len(work.used) :])
    work.used = [bool(flag) for flag in flags[: len(work.used)]]
    for _ in range(codec.rounds - 1):
        begun = time.perf_counter()
        parts = torch.split(total[: sum(lengths)], lengths)
        numbers = [
            codec.further(part, state, turn) for part, state, turn in zip(parts, states, turns, strict=True)
        ]
        lengths = [part.numel() for part in numbers]
        total = torch.cat([*numbers, torch.empty(0, dtype=torch.float32)])  # a rail may have nothing
        work.encode_s += time.perf_counter() - begun
        future = work.lanes[1].all_reduce(total, priority=work.priority)
        yield future
        future.wait()
        work.sent_bytes += work.lanes[1].sent_bytes(total)
    work.timing.sent = future.timing.sent
    begun = time.perf_counter()
    parts = torch.split(total[: sum(lengths)], lengths)
    for held, part, state, turn in zip(work.held, parts, states, turns, strict=True):
        codec.finish(part, held.values, state, turn)
    _finish(work, begun)


def said(complaint: NonFinite | None) -> Tensor:
    """A complaint as two numbers, zeros if there is none, where messages are sums."""
    return torch.tensor([-1, -1] if complaint is None else complaint, dtype=torch.float32) + 1.0


def heard(numbers: Tensor) -> NonFinite | None:
    """The first complaint of all members'."""
    found = [NonFinite(*(pair - 1).int().tolist()) for pair in numbers.view(-1, 2) if pair.any()]
    return min(found) if found else None


def _encode(work: EncodedRound, held: LoadedRange) -> Tensor:
    piece = held.piece
    return work.codec.encode(held.values, work.state(piece), work.turn(piece, work.rank))


def _take_back(work: EncodedRound, written: Iterable[tuple[Tensor, LoadedRange]]) -> None:
    """The round is refused: nobody will read these."""
    for payload, held in written:
        turn = work.turn(held.piece, work.rank)
        work.codec.take_back(payload, held.values, work.state(held.piece), turn)


def _within(held: LoadedRange, piece: ParameterRange) -> LoadedRange:
    at = held.piece.start
    return LoadedRange(piece, held.values[piece.start - at : piece.stop - at])


def _read(work: EncodedRound, page: Tensor, rank: int, pieces: int) -> EncodedMessage:
    """A member's message; what it says about use and complaints is taken over."""
    one = read_message(page, len(work.used), pieces, work.names[work.lanes[0].ranks[rank]])
    work.used = any_used([work.used, one.used])
    if one.complaint is not None:
        work.complaint = min(one.complaint, work.complaint or one.complaint)
    return one


def _finish(work: EncodedRound, begun: float) -> None:
    for held in work.held:
        work.states.count(held.piece.name)
    now = time.perf_counter()
    work.timing.adding_s += now - begun
    work.timing.ended = now


# Messages -------------------------------------------------------------------------------------------


def write_message(message: EncodedMessage) -> Tensor:
    """A message as bytes."""
    head = _HEAD.pack(*(message.complaint or (_NONE, _NONE)))
    used = np.packbits(np.array(message.used, dtype=bool)).tobytes()
    lengths = np.array([payload.numel() for payload in message.payloads], dtype="<u4").tobytes()
    front = torch.frombuffer(bytearray(head + used + lengths), dtype=torch.uint8)
    return torch.cat([front, *message.payloads])


def read_message(data: Tensor, parameters: int, pieces: int, sender: str) -> EncodedMessage:
    """Bytes as a message; Corrupt if they are none of so many parameters and pieces."""
    raw = data.numpy()
    used_bytes = (parameters + 7) // 8
    front = _HEAD.size + used_bytes
    if len(raw) < front:
        raise _odd(sender, f"{len(raw)} bytes where the head alone has {front}")
    complaint = NonFinite(*_HEAD.unpack(raw[: _HEAD.size].tobytes()))
    if complaint.rank != _NONE:
        pieces = 0
    front += 4 * pieces
    if len(raw) < front:
        raise _odd(sender, f"{len(raw)} bytes where the lengths alone end at {front}")
    used = np.unpackbits(raw[_HEAD.size : _HEAD.size + used_bytes], count=parameters).astype(bool)
    lengths = np.frombuffer(raw[front - 4 * pieces : front].tobytes(), "<u4").tolist() if pieces else []
    if front + sum(lengths) != len(raw):
        raise _odd(sender, f"{len(raw)} bytes where {front + sum(lengths)} were announced")
    return EncodedMessage(
        used.tolist(),
        list(torch.split(data[front:], lengths)) if lengths else [],
        None if complaint.rank == _NONE else complaint,
    )


def _odd(sender: str, what: str) -> Corrupt:
    return Corrupt(
        f"{sender} sent encoded gradients that cannot be read: {what}",
        where="codec",
        fix="all workers must use the same codec, model and version of Echelon",
    )


def any_used(used: Sequence[Sequence[bool]]) -> list[bool]:
    """Which parameters at least one worker used."""
    return [any(flags) for flags in zip(*used, strict=True)]
