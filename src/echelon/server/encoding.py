"""How a table's gradients and weights are sent in fewer bytes, by a codec.

Pushes: a worker writes the gradient of each part of a piece, with the codec state that the parameter has on
this worker. A server reads each push by itself.

Pulls: for each worker a server keeps a shadow, which is a copy of the weights that the worker has. The
server writes the difference between the weights and the shadow, and adds to the shadow what the worker will
read. So what one change leaves out is in the next, and errors do not build up. Invariant: shadow and worker
are equal to the bit, for both add the same bytes by the same `read`.

The payload of a coded piece; all numbers have 8 bytes, and parts begin at multiples of 8:

    step      of the context in which the parts were written
    lengths   of the parts in bytes; -1 for a parameter without a gradient
    bytes     of each part

A codec for pulls must come nearer with every change: |x - read(write(x))| < |x| by norm, or what is left
out grows (Karimireddy et al. 2019, for gradients). Codecs that round at random, or write zeros as other
values, do not: `pull_codec` replaces them.
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
from echelon.server.layout import ParameterSlice, ShardPiece

_WORD_BYTES = 8
_ABSENT = -1
_SHAPE = "shape"  # in what is saved: of the parameter that a state belongs to
_THRESHOLD_RATIO = 0.05


def pull_codec(codec: Codec) -> Codec:
    """The codec for changes of weights, if gradients are pushed with `codec`.

    It is the same codec, unless that would not come nearer with every change, or uses more than the values.
    """
    match codec:
        case ErrorFeedback():
            return pull_codec(codec.inner)  # the shadow keeps what is left out
        case Chain():
            first, then = (pull_codec(CODECS.build(text)) for text in (codec.first, codec.then))
            return Chain(first=_text(first), then=_text(then))
        case Dgc():
            return TopK(ratio=codec.ratio)  # weights have no momentum to correct
        case ThresholdCodec():
            return TopK(ratio=_THRESHOLD_RATIO)  # a threshold for gradients does not suit weights
        case Ternary():
            return Fixed(bits=2)  # three levels too, but rounded to the nearest
        case Fixed(bits=1):
            return OneBit()  # it would write zeros as the largest magnitude
        case Fixed() | DynamicFixed():
            return Fixed(bits=codec.bits)  # a range for gradients does not suit weights
        case _:
            return codec


def _text(codec: Codec) -> str:
    options = {field.name: getattr(codec, field.name) for field in fields(codec)}  # type: ignore[arg-type]
    return str(Call(codec.name, options=options))


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCodec:
    """A table's codecs for pushes and pulls, and the shapes of its parameters."""

    push: Codec
    pull: Codec
    table: int
    shapes: tuple[tuple[int, ...], ...]

    def name(self, parameter: int) -> str:
        """A parameter's name in codec states; workers and servers share no other name."""
        return f"{self.table}/{parameter}"

    def length(self, parameter: int) -> int:
        """The number of elements of a parameter."""
        return int(np.prod(self.shapes[parameter], dtype=np.int64))

    def context(
        self, part: ParameterSlice, step: int, worker: int, *, is_pull: bool = False
    ) -> CodecContext:
        """The context in which a part is written. A push is a total by itself, so there is one worker."""
        name = self.name(part.parameter)
        return CodecContext(
            step=step,
            rank=worker,
            seed=seed_of(f"{name} down" if is_pull else name),
            start=part.start,
            shape=self.shapes[part.parameter],
        )


def open_codec(
    text: str, dtype: torch.dtype, table: int, shapes: Sequence[Sequence[int]]
) -> TableCodec | None:
    """The codecs of a table; None without a codec, or for a dtype that codecs do not write."""
    codec = served_codec(text)
    if codec is None or dtype != torch.float32:
        return None
    sizes = tuple(tuple(shape) for shape in shapes)
    return TableCodec(push=codec, pull=pull_codec(codec), table=table, shapes=sizes)


class PushEncoder:
    """Writes a worker's pushes of one table, and keeps the codec's states.

    Pieces may be written before their gradients are final. `take_back` undoes that.
    """

    def __init__(self, codec: TableCodec, pieces: Sequence[ShardPiece], worker: int) -> None:
        self._codec = codec
        self._pieces = pieces
        self._worker = worker
        self._states = States(codec.push)
        inner = codec.push.inner if isinstance(codec.push, ErrorFeedback) else codec.push
        self._adapts = type(inner).settle is not Codec.settle
        self._kept: dict[int, dict[tuple[ParameterSlice, str], Tensor]] = {}
        self._early: list[int] = []  # pieces of this push that can be taken back, in order

    def write(self, number: int, flat: Tensor, absent: Container[int], *, early: bool = False) -> Tensor:
        """Write a piece of a shard's gradients; `absent` parameters have no gradient."""
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
            written.append(self._encode(part, values, self._codec.context(part, step, self._worker)))
        return _packed(step, written)

    def _encode(self, part: ParameterSlice, values: Tensor, context: CodecContext) -> Tensor:
        codec, state = self._codec.push, self._slice(part)
        data = codec.encode(values, state, context)
        if self._adapts:  # to the totals that it reads; a push is a total of one worker
            codec.read_total(data, torch.empty_like(values), state, context)
        return data

    def finish(self) -> None:
        """All of a coded push has been written."""
        self._early.clear()
        for parameter in range(len(self._codec.shapes)):
            name, length = self._codec.name(parameter), self._codec.length(parameter)
            if self._adapts:
                context = CodecContext(step=self._states.step(name), shape=self._codec.shapes[parameter])
                self._codec.push.settle(self._states.of(name, length), context)
            self._states.count(name)

    def take_back(self) -> None:
        """Restore the states from before pieces were written early."""
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
                    kept[part, key].copy_(value)  # reusing memory is cheaper than allocating it
                else:
                    kept[part, key] = value.clone()
        self._early.append(number)

    def _slice(self, part: ParameterSlice) -> State:
        name, length = self._codec.name(part.parameter), self._codec.length(part.parameter)
        return self._states.slice(name, length, part.start, part.stop)

    def _step(self, piece: ShardPiece) -> int:
        return self._states.step(self._codec.name(piece.parts[0].parameter))

    # States --------------------------------------------------------------------------------------

    def save(self) -> Saved:
        """All states by parameter, as if nothing had been written early."""
        self.take_back()
        saved = self._states.save()
        for name, shape in self._shapes().items():
            if name in saved:
                saved[name][_SHAPE] = torch.tensor(shape, dtype=torch.int64)
        return saved

    def load(self, saved: Saved) -> int:
        """Load states that were saved, and fresh ones for other parameters.

        Parameters are matched by their places. A state of another shape is not loaded; returns the number
        of such states.
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
        return {self._codec.name(place): shape for place, shape in enumerate(self._codec.shapes)}

    def saturated(self) -> int:
        """The number of values so far that were too large for the codec."""
        return sum(self._states.saturated().values())

    def left_over(self) -> float:
        """The norm of the residuals that were never sent."""
        return self._states.left_over()


def read_push(
    codec: TableCodec, payload: memoryview, piece: ShardPiece, flat: Tensor, worker: int, sender: str
) -> None:
    """Read a coded piece of a worker's push into the shard's memory `flat`."""
    step, written = _unpacked(payload, len(piece.parts), sender)
    for part, data in zip(piece.parts, written, strict=True):
        out = flat[part.at : part.at + part.length]
        if data is None:
            out.zero_()
        else:
            _read(codec.push, data, out, codec.context(part, step, worker), sender)


def add_change(
    codec: TableCodec, payload: memoryview, piece: ShardPiece, flat: Tensor, worker: int, sender: str
) -> None:
    """Read a coded piece of a change, and add it to the worker's weights `flat`."""
    step, written = _unpacked(payload, len(piece.parts), sender)
    for part, data in zip(piece.parts, written, strict=True):
        if data is not None:
            out = flat[part.at : part.at + part.length]
            context = codec.context(part, step, worker, is_pull=True)
            _read(codec.pull, data, out, context, sender, add=True)


class Shadows:
    """The weights of one shard that each worker has."""

    def __init__(self, codec: TableCodec, weights: Tensor, workers: int) -> None:
        self._codec = codec
        self._had = [weights.clone() for _ in range(workers)]
        self._scratch: dict[ParameterSlice, State] = {}

    def of(self, worker: int) -> Tensor:
        """The weights that a worker has."""
        return self._had[worker]

    def begin(self, weights: Tensor) -> None:
        """All workers begin with these weights."""
        for had in self._had:
            had.copy_(weights)

    def change(self, worker: int, piece: ShardPiece, weights: Tensor, version: int) -> Tensor | None:
        """The coded change that brings a worker's piece nearer to the weights; None if it cannot be coded.

        That is so if weights are not finite. The caller must then send the piece as it is, and the shadow
        assumes so.
        """
        wanted, had = weights[piece.start : piece.stop], self._had[worker][piece.start : piece.stop]
        change = wanted - had
        if not is_finite(change):
            had.copy_(wanted)
            return None
        written: list[Tensor | None] = []
        for part in piece.parts:
            at = part.at - piece.start
            context = self._codec.context(part, version, worker, is_pull=True)
            data = self._codec.pull.write(change[at : at + part.length], self._state(part), context)
            self._codec.pull.read(data, had[at : at + part.length], context, add=True)
            written.append(data)
        return _packed(version, written)

    def _state(self, part: ParameterSlice) -> State:
        """The codec's state without its residual, which the shadow keeps."""
        if part not in self._scratch:
            fresh = self._codec.pull.begin(part.length)
            self._scratch[part] = {key: value for key, value in fresh.items() if key != RESIDUAL}
        return self._scratch[part]


def is_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    if not values.numel():
        return True
    least, most = torch.aminmax(values)
    return bool(torch.isfinite(least)) and bool(torch.isfinite(most))


def _read(
    codec: Codec, data: Tensor, out: Tensor, context: CodecContext, sender: str, *, add: bool = False
) -> None:
    try:
        codec.read(data, out, context, add=add)
    except Corrupt as error:
        raise _unreadable(sender, error.message) from error


def _packed(step: int, written: Sequence[Tensor | None]) -> Tensor:
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


def _unpacked(payload: memoryview, parts: int, sender: str) -> tuple[int, list[Tensor | None]]:
    front = (1 + parts) * _WORD_BYTES
    if len(payload) < front:
        raise _unreadable(sender, f"{len(payload)} bytes, but the header alone has {front}")
    data = torch.frombuffer(payload, dtype=torch.uint8)
    step, *lengths = data[:front].view(torch.int64).tolist()
    announced = front + sum(_padded(length) for length in lengths)
    if min(lengths) < _ABSENT or announced != len(payload):
        raise _unreadable(sender, f"{len(payload)} bytes, but its header announces {announced}")
    written: list[Tensor | None] = []
    at = front
    for length in lengths:
        written.append(None if length == _ABSENT else data[at : at + length])
        at += _padded(length)
    return step, written


def _padded(length: int) -> int:
    return -(-max(0, length) // _WORD_BYTES) * _WORD_BYTES


def _unreadable(sender: str, what: str) -> Corrupt:
    return Corrupt(
        f"{sender} sent a coded piece that cannot be read: {what}",
        where="codec",
        fix="run the same version of Echelon, with the same codecs, on all workers and servers",
    )
