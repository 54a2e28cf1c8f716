"""How a table's gradients and weights travel between a worker and the servers in fewer bytes.

Up: a worker writes the gradient of each part of a piece with the state that its parameter has on this
worker, and a server reads each push by itself. Down: a server knows what each worker has (its shadow),
writes how the weights differ from that, and adds to the shadow what the worker will read. So what is left
out of one hand-out is in the next, and errors do not build up. Invariant: shadow and worker are equal to
the bit, for both add the same bytes by the same `read`.

What is sent for a piece, all numbers of 8 bytes, parts beginning at multiples of 8:

    step      of the turn that the parts were written in
    lengths   of the bytes of each part; -1 for a parameter that has no gradient
    bytes     of each part

Down, a codec must come nearer with every hand-out: |x - read(write(x))| < |x| by norm, or what is left out
grows (Karimireddy et al. 2019, for gradients). Codecs that draw lots, or write zeros as something else, do
not keep to it: `pull_codec` gives one that does.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from echelon.codec.codec import CODECS, RESIDUAL, Codec, CodecContext, State, seed_of
from echelon.codec.codecs.chain import Chain
from echelon.codec.codecs.dgc import Dgc
from echelon.codec.codecs.dynamic_fixed import DynamicFixed
from echelon.codec.codecs.error_feedback import ErrorFeedback
from echelon.codec.codecs.fixed import Fixed
from echelon.codec.codecs.one_bit import OneBit
from echelon.codec.codecs.ternary import Ternary
from echelon.codec.codecs.threshold import ThresholdCodec
from echelon.codec.codecs.top_k import TopK
from echelon.codec.fitting import served_codec
from echelon.config.call import Call
from echelon.errors import Corrupt
from echelon.reduce.encoded.states import Saved, States
from echelon.server.shards import ParameterSlice, ShardPiece

_WORD_BYTES = 8
_ABSENT = -1
_SHAPE = "shape"  # in what is saved: of the parameter that a state belongs to
_THRESHOLD_RATIO = 0.05


def pull_codec(codec: Codec) -> Codec:
    """The codec that changes of weights are handed out with, where gradients are pushed with this one.

    It is the same one, unless that would not come nearer with every hand-out, or knows more than values.
    """
    match codec:
        case ErrorFeedback():
            return pull_codec(codec.inner)  # what is left out, the shadow knows
        case Chain():
            first, then = (pull_codec(CODECS.build(text)) for text in (codec.first, codec.then))
            return Chain(first=_text(first), then=_text(then))
        case Dgc():
            return TopK(ratio=codec.ratio)  # weights have no momentum to correct
        case ThresholdCodec():
            return TopK(ratio=_THRESHOLD_RATIO)  # a magnitude of gradients says nothing about weights
        case Ternary():
            return Fixed(bits=2)  # three levels as well, to the nearest
        case Fixed(bits=1):
            return OneBit()  # zeros would become the largest magnitude
        case Fixed() | DynamicFixed():
            return Fixed(bits=codec.bits)  # a range for gradients is none for weights
        case _:
            return codec


def _text(codec: Codec) -> str:
    options = {field.name: getattr(codec, field.name) for field in fields(codec)}  # type: ignore[arg-type]
    return str(Call(codec.name, options=options))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCodec:
    """A table's codecs, up and down; `shapes` are its parameters'."""

    up: Codec
    down: Codec
    table: int
    shapes: tuple[tuple[int, ...], ...]

    def name(self, parameter: int) -> str:
        """What a parameter is called in states: workers and servers have no other name in common."""
        return f"{self.table}/{parameter}"

    def length(self, parameter: int) -> int:
        """How many elements a parameter has."""
        return int(np.prod(self.shapes[parameter], dtype=np.int64))

    def turn(self, part: ParameterSlice, step: int, worker: int, *, down: bool = False) -> CodecContext:
        """The turn that a part is written in. A push is a total by itself, so there is one worker."""
        name = self.name(part.parameter)
        return CodecContext(
            step=step,
            rank=worker,
            seed=seed_of(f"{name} down" if down else name),
            start=part.start,
            shape=self.shapes[part.parameter],
        )


def open_codec(
    text: str, dtype: torch.dtype, table: int, shapes: Sequence[Sequence[int]]
) -> TableCodec | None:
    """The codecs of a table; None if it has none, or numbers that no codec writes."""
    codec = served_codec(text)
    if codec is None or dtype != torch.float32:
        return None
    sizes = tuple(tuple(shape) for shape in shapes)
    return TableCodec(up=codec, down=pull_codec(codec), table=table, shapes=sizes)


class PushEncoder:
    """A worker's coded pushes of one table, and the states behind them.

    Pieces may be written before it is sure that they are final. `take_back` makes as if they had not been.
    """

    def __init__(self, coding: TableCodec, pieces: Sequence[ShardPiece], worker: int) -> None:
        self._coding = coding
        self._pieces = pieces
        self._worker = worker
        self._states = States(coding.up)
        inner = coding.up.inner if isinstance(coding.up, ErrorFeedback) else coding.up
        self._adapts = type(inner).settle is not Codec.settle
        self._kept: dict[int, dict[tuple[ParameterSlice, str], Tensor]] = {}
        self._early: list[int] = []  # pieces of this round that can be taken back, in order

    def write(self, number: int, flat: Tensor, absent: Container[int], *, early: bool = False) -> Tensor:
        """The bytes of a piece of a shard's gradients; parameters that are `absent` have none."""
        piece = self._pieces[number]
        if early:
            self._keep(number)
        step = self._step(piece)
        written: list[Tensor | None] = []
        for part in piece.parts:
            if part.parameter in absent:
                written.append(None)
                continue
            values = flat[part.at : part.at + part.length]
            written.append(self._encode(part, values, self._coding.turn(part, step, self._worker)))
        return _bundle(step, written)

    def _encode(self, part: ParameterSlice, values: Tensor, turn: CodecContext) -> Tensor:
        codec, state = self._coding.up, self._slice(part)
        data = codec.encode(values, state, turn)
        if self._adapts:  # by totals that it reads, and this is one, of one worker
            codec.read_total(data, torch.empty_like(values), state, turn)
        return data

    def finish(self) -> None:
        """A round of coded pushes is over."""
        self._early.clear()
        for parameter in range(len(self._coding.shapes)):
            name, length = self._coding.name(parameter), self._coding.length(parameter)
            if self._adapts:
                turn = CodecContext(step=self._states.step(name), shape=self._coding.shapes[parameter])
                self._coding.up.settle(self._states.of(name, length), turn)
            self._states.count(name)

    def take_back(self) -> None:
        """Put states back to where they were before pieces were written early."""
        for number in reversed(self._early):
            kept = self._kept[number]
            for part in self._pieces[number].parts:
                state = self._slice(part)
                for key in state:
                    state[key].copy_(kept[part, key])
        self._early.clear()

    def _keep(self, number: int) -> None:
        kept = self._kept.setdefault(number, {})
        for part in self._pieces[number].parts:
            for key, value in self._slice(part).items():
                if (part, key) in kept:
                    kept[part, key].copy_(value)  # memory that is there costs less than new one
                else:
                    kept[part, key] = value.clone()
        self._early.append(number)

    def _slice(self, part: ParameterSlice) -> State:
        name, length = self._coding.name(part.parameter), self._coding.length(part.parameter)
        return self._states.slice(name, length, part.start, part.stop)

    def _step(self, piece: ShardPiece) -> int:
        return self._states.step(self._coding.name(piece.parts[0].parameter))

    # States --------------------------------------------------------------------------------------

    def save(self) -> Saved:
        """All states, by parameter, as if nothing had been written early."""
        self.take_back()
        saved = self._states.save()
        for name, shape in self._shapes().items():
            if name in saved:
                saved[name][_SHAPE] = torch.tensor(shape, dtype=torch.int64)
        return saved

    def load(self, saved: Saved) -> int:
        """Go on with states that were saved; with fresh ones where there are none of this table.

        Parameters are known by their places: a state of one of another shape is not taken over. Returns
        how many such there were.
        """
        self._early.clear()
        shapes = self._shapes()
        own = {name: saved[name] for name in shapes if name in saved}
        fitting = {
            name: {key: value for key, value in state.items() if key != _SHAPE}
            for name, state in own.items()
            if _SHAPE in state and tuple(state[_SHAPE].tolist()) == shapes[name]
        }
        self._states.load(fitting)
        return len(own) - len(fitting)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {self._coding.name(place): shape for place, shape in enumerate(self._coding.shapes)}

    def saturated(self) -> int:
        """How many values were too large for the codec, so far."""
        return sum(self._states.saturated().values())

    def left_over(self) -> float:
        """The norm of what was given and never sent."""
        return self._states.left_over()


def read_push(
    coding: TableCodec, payload: memoryview, piece: ShardPiece, flat: Tensor, worker: int, sender: str
) -> None:
    """What a worker wrote for a piece, to its place in a shard's memory."""
    step, written = _unbundle(payload, len(piece.parts), sender)
    for part, data in zip(piece.parts, written, strict=True):
        out = flat[part.at : part.at + part.length]
        if data is None:
            out.zero_()
        else:
            _read(coding.up, data, out, coding.turn(part, step, worker), sender)


def add_change(
    coding: TableCodec, payload: memoryview, piece: ShardPiece, flat: Tensor, worker: int, sender: str
) -> None:
    """What a server wrote for a piece, on top of what this worker has."""
    step, written = _unbundle(payload, len(piece.parts), sender)
    for part, data in zip(piece.parts, written, strict=True):
        if data is not None:
            out = flat[part.at : part.at + part.length]
            _read(coding.down, data, out, coding.turn(part, step, worker, down=True), sender, add=True)


class Shadows:
    """What workers have of one shard."""

    def __init__(self, coding: TableCodec, weights: Tensor, workers: int) -> None:
        self._coding = coding
        self._had = [weights.clone() for _ in range(workers)]
        self._scratch: dict[ParameterSlice, State] = {}

    def of(self, worker: int) -> Tensor:
        """What a worker has."""
        return self._had[worker]

    def begin(self, weights: Tensor) -> None:
        """All begin with these weights."""
        for had in self._had:
            had.copy_(weights)

    def change(self, worker: int, piece: ShardPiece, weights: Tensor, version: int) -> Tensor | None:
        """The bytes that bring a worker's piece nearer to the weights; None if there are none that could.

        Weights that are not finite cannot be coded: the worker is to be sent the piece as it is, and is
        taken to have it.
        """
        wanted, had = weights[piece.start : piece.stop], self._had[worker][piece.start : piece.stop]
        change = wanted - had
        if not is_finite(change):
            had.copy_(wanted)
            return None
        written: list[Tensor | None] = []
        for part in piece.parts:
            at = part.at - piece.start
            turn = self._coding.turn(part, version, worker, down=True)
            data = self._coding.down.write(change[at : at + part.length], self._state(part), turn)
            self._coding.down.read(data, had[at : at + part.length], turn, add=True)
            written.append(data)
        return _bundle(version, written)

    def _state(self, part: ParameterSlice) -> State:
        """What the codec wants to have besides; what it leaves out, the shadow knows."""
        if part not in self._scratch:
            fresh = self._coding.down.begin(part.length)
            self._scratch[part] = {key: value for key, value in fresh.items() if key != RESIDUAL}
        return self._scratch[part]


def is_finite(values: Tensor) -> bool:
    """Whether all of them are numbers that a codec can write."""
    if not values.numel():
        return True
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(least)) and bool(torch.isfinite(most))


def _read(
    codec: Codec, data: Tensor, out: Tensor, turn: CodecContext, sender: str, *, add: bool = False
) -> None:
    try:
        codec.read(data, out, turn, add=add)
    except Corrupt as error:
        raise _odd(sender, error.message) from error


def _bundle(step: int, written: Sequence[Tensor | None]) -> Tensor:
    lengths = [_ABSENT if data is None else data.numel() for data in written]
    front = (1 + len(lengths)) * _WORD_BYTES
    out = torch.zeros(front + sum(_padded(length) for length in lengths), dtype=torch.uint8)
    out[:front].view(torch.int64).copy_(torch.tensor([step, *lengths]))
    at = front
    for data in written:
        if data is not None:
            out[at : at + data.numel()].copy_(data)
            at += _padded(data.numel())
    return out


def _unbundle(payload: memoryview, parts: int, sender: str) -> tuple[int, list[Tensor | None]]:
    front = (1 + parts) * _WORD_BYTES
    if len(payload) < front:
        raise _odd(sender, f"{len(payload)} bytes where the head alone has {front}")
    data = torch.frombuffer(payload, dtype=torch.uint8)
    step, *lengths = data[:front].view(torch.int64).tolist()
    announced = front + sum(_padded(length) for length in lengths)
    if min(lengths) < _ABSENT or announced != len(payload):
        raise _odd(sender, f"{len(payload)} bytes where {announced} were announced")
    written: list[Tensor | None] = []
    at = front
    for length in lengths:
        written.append(None if length == _ABSENT else data[at : at + length])
        at += _padded(length)
    return step, written


def _padded(length: int) -> int:
    return -(-max(0, length) // _WORD_BYTES) * _WORD_BYTES


def _odd(sender: str, what: str) -> Corrupt:
    return Corrupt(
        f"{sender} sent a coded piece that cannot be read: {what}",
        where="codec",
        fix="workers and servers must have the same version of Echelon, and the same codecs",
    )
