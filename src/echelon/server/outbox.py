"""What a worker pushes: pieces of its gradients, each as soon as backward has it.

Pieces leave in one order, the last layer's first. If the script changes gradients after backward (clipping,
unscaling), what had left too early is sent again in `push_gradients`; and if it keeps doing so, pieces wait
for that from then on.

With a codec, gradients are sent coded (see coding.py), and whatever is no gradient as it is. Nothing leaves
then that is not finite: whoever would send it is told which parameter it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from echelon.comm.wire.exchange import as_bytes
from echelon.server import encoding as coding
from echelon.server.layout import TableLayout, cut_out, part_of
from echelon.server.shards import ShardPiece

_PATIENCE = 3  # how often pieces may be sent in vain before they wait for step()


class Outbox:
    """A table's pushes, which `send` carries; `early`: pieces may leave before backward is over."""

    def __init__(
        self,
        layout: TableLayout,
        coded: coding.PushEncoder | None,
        send: Callable[[ShardPiece, memoryview, bool], None],
        *,
        early: bool,
    ) -> None:
        self.early = early
        self._codec = coded
        self._flats = layout.room()
        self._layout = layout
        self._parameters = layout.parameters
        self._pieces = layout.pieces
        self._send = send
        self._absent: set[int] = set()  # parameters that had no gradient when they were pushed
        self._codes = False  # whether what is being pushed is coded
        self.sent_bytes = 0  # by the last push
        self._given_bytes = 0  # by this one, so far
        self._vain = 0
        self._begin()

    def _begin(self) -> None:
        self._next = 0
        self._waiting = {place for place, p in enumerate(self._parameters) if p.requires_grad}

    # Gradients -----------------------------------------------------------------------------------

    def ready(self, place: int) -> None:
        """Backward has this parameter's gradient: send the pieces that are complete with it."""
        self._waiting.discard(place)
        while self._next < len(self._pieces):
            piece = self._pieces[self._next]
            if any(part.parameter in self._waiting for part in piece.parts):
                return
            if self._odd_in([piece]) is not None:
                return  # perhaps the script will put it right, or drop it
            self._push(self._next, early=True)
            self._next += 1

    def push_gradients(self) -> int | None:
        """Send what backward has not, and again what has changed since.

        Nothing of the round counts as sent if a gradient is not finite and must be: returns whose it is.
        """
        changed = [
            number for number, piece in enumerate(self._pieces[: self._next]) if self._changed(piece)
        ]
        if changed and self._codec is not None:
            self._codec.take_back()
            changed = list(range(self._next))  # what codecs remember depends on the pieces before
        elif changed:
            for shard in {self._pieces[number].shard for number in changed}:
                self._flats[shard] = self._flats[shard].clone()  # the old one may still be on its way
        if changed:
            self._vain += 1
            self.early = self._vain < _PATIENCE
        left = [*changed, *range(self._next, len(self._pieces))]
        odd = self._odd_in(self._pieces[number] for number in left)
        if odd is not None:
            self.take_back()
            return odd
        for number in left:
            self._push(number)
        return None

    def odd_gradient(self) -> int | None:
        """The first parameter whose gradient is not finite, if that matters here."""
        return self._odd_in(self._pieces)

    def _odd_in(self, pieces: Iterable[ShardPiece]) -> int | None:
        if self._codec is None:
            return None
        for piece in pieces:
            for part in piece.parts:
                gradient = self._parameters[part.parameter].grad
                if gradient is not None and not coding.is_finite(cut_out(gradient, part)):
                    return part.parameter
        return None

    @torch.no_grad()
    def _push(self, number: int, *, early: bool = False) -> None:
        """Send a piece of the gradients as they are now; `early`: they may change yet."""
        piece = self._pieces[number]
        for part in piece.parts:
            gradient = self._parameters[part.parameter].grad
            target = part_of(self._flats[piece.shard], part)
            if gradient is None:
                target.zero_()
                self._absent.add(part.parameter)
            else:
                target.copy_(cut_out(gradient, part))
                self._absent.discard(part.parameter)
        self._send_piece(number, early=early)

    def _changed(self, piece: ShardPiece) -> bool:
        """Whether a gradient is not what was sent; by its values, for it can be changed in many ways."""
        for part in piece.parts:
            gradient = self._parameters[part.parameter].grad
            if (gradient is None) != (part.parameter in self._absent):
                return True
            sent = part_of(self._flats[piece.shard], part)
            if gradient is not None and not _same_bits(cut_out(gradient, part), sent):
                return True
        return False

    # Other tensors -------------------------------------------------------------------------------

    def first_odd(self, tensors: Sequence[Tensor]) -> int | None:
        """The first of these, shaped like the parameters, that is not finite, if that matters here."""
        if self._codec is None:
            return None
        return next((place for place, one in enumerate(tensors) if not coding.is_finite(one)), None)

    @torch.no_grad()
    def push_sum(self, tensors: Sequence[Tensor]) -> None:
        """Send summed gradients, which belong to the codec like any other."""
        if self._codec is None:
            self.push(tensors)
            return
        self._layout.gather(self._flats, tensors)
        self._absent.clear()
        for number in range(len(self._pieces)):
            self._send_piece(number)

    @torch.no_grad()
    def push(self, tensors: Sequence[Tensor]) -> None:
        """Send what is no gradient, as it is."""
        self.take_back()
        self._layout.gather(self._flats, tensors)
        for piece in self._pieces:
            self._send_plain(piece)

    # Sending -------------------------------------------------------------------------------------

    def _send_piece(self, number: int, *, early: bool = False) -> None:
        piece = self._pieces[number]
        if self._codec is None:
            self._send_plain(piece)
            return
        payload = self._codec.write(number, self._flats[piece.shard], self._absent, early=early)
        self._count(piece, as_bytes(payload), coded=True)
        self._codes = True

    def _send_plain(self, piece: ShardPiece) -> None:
        flat = self._flats[piece.shard]
        item_bytes = flat.element_size()
        self._count(piece, as_bytes(flat)[piece.start * item_bytes : piece.stop * item_bytes])

    def _count(self, piece: ShardPiece, memory: memoryview, *, coded: bool = False) -> None:
        self._send(piece, memory, coded)
        self._given_bytes += len(memory)

    def finish(self) -> None:
        """All of this push has been sent."""
        self._begin()
        self.sent_bytes, self._given_bytes = self._given_bytes, 0
        if self._codec is not None and self._codes:
            self._codec.finish()
            self._codes = False

    def take_back(self) -> None:
        """Begin the round anew: coded pieces that have left early will be sent again."""
        if self._codec is not None:
            self._codec.take_back()
            self._begin()
            self._codes = False

    # The codec's state ---------------------------------------------------------------------------

    def codec_state(self) -> dict[str, dict[str, Tensor]]:
        """What the codec remembers of each parameter on this worker, for a checkpoint."""
        if self._codec is None:
            return {}
        self.take_back()
        return self._codec.save()

    def load_codec_state(self, saved: dict[str, dict[str, Tensor]]) -> int:
        """Go on with what the codec remembered; of what is not given, with nothing.

        Returns of how many parameters it did not fit.
        """
        if self._codec is None:
            return 0
        self.take_back()
        return self._codec.load(saved)

    def saturated(self) -> int:
        """How many values were too large for the codec, so far."""
        return 0 if self._codec is None else self._codec.saturated()

    def left_over(self) -> float:
        """The norm of all that was never sent, as a multiple of the last pushed gradient's."""
        if self._codec is None:
            return 0.0
        last = float(torch.stack([torch.linalg.vector_norm(flat) for flat in self._flats]).norm())
        return self._codec.left_over() / last if last else 0.0


_BITS = {2: torch.int16, 4: torch.int32}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether they are equal, NaN or not."""
    bits = _BITS.get(one.element_size(), torch.int64)
    return torch.equal(one.contiguous().view(bits), other.view(bits))
