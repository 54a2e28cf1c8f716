"""A worker's pushes: pieces of its gradients, each sent as soon as backward has computed it.

Pieces are sent in one order, the last layer's first. If the script changes gradients after backward
(clipping, unscaling), `push_gradients` sends the changed pieces again. If the script keeps changing them,
pieces wait for `push_gradients` from then on.

A shard whose server shares memory with this worker (shared_table.py) is written there, and not sent.

With a codec, gradients are sent coded (see encoding.py), and other tensors as they are. Then no piece with
NaN or infinity is sent: the push methods return the first parameter that has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from echelon.comm.wire.exchange import as_bytes
from echelon.server.encoding import PushEncoder, is_finite
from echelon.server.layout import ShardPiece, TableLayout, part_of, slice_of
from echelon.server.shared_table import SharedShard

_MOST_RESENDS = 3  # rounds whose pieces were sent again before pieces wait for step()


class PushSender:
    """One table's pushes. `send` gets each piece, its bytes and whether they are coded.

    `early`: pieces may leave before backward has ended. Methods that may refuse to push return the index of
    the first parameter that holds NaN or infinity, and None if all was sent.
    """

    def __init__(
        self,
        layout: TableLayout,
        encoder: PushEncoder | None,
        send: Callable[[ShardPiece, memoryview, bool], None],
        *,
        early: bool,
    ) -> None:
        self.early = early
        self.sent_bytes = 0  # by the last push
        self._encoder = encoder
        self._flats = layout.new_flats()
        self._layout = layout
        self._parameters = layout.parameters
        self._pieces = layout.pieces
        self._send = send
        self._shared: dict[int, SharedShard] = {}
        self._await_free: Callable[[], None] = _nothing
        self._has_begun = False  # whether anything of this push was written
        self._absent: set[int] = set()  # parameters that had no gradient when they were pushed
        self._has_coded = False  # whether this push has coded pieces
        self._bytes_so_far = 0
        self._resends = 0
        self._sum: list[Tensor] | None = None
        self._begin()

    def share(self, shared: dict[int, SharedShard], await_free: Callable[[], None]) -> None:
        """Write these shards to shared memory.

        `await_free` returns when the servers need the last push no more.
        """
        assert self._encoder is None
        self._shared = shared
        self._await_free = await_free
        for index, shard in shared.items():
            self._flats[index] = shard.push

    def _claim(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._await_free()

    def _begin(self) -> None:
        self._next = 0
        self._waiting = {place for place, p in enumerate(self._parameters) if p.requires_grad}

    # Gradients -----------------------------------------------------------------------------------

    def ready(self, place: int) -> None:
        """Backward has computed this parameter's gradient: send the pieces that are complete now."""
        self._waiting.discard(place)
        while self._next < len(self._pieces):
            piece = self._pieces[self._next]
            if any(part.parameter in self._waiting for part in piece.parts):
                return
            if self._not_finite_in([piece]) is not None:
                return  # the script may correct it, or skip the step
            self._push_piece(self._next, early=True)
            self._next += 1

    def push_gradients(self) -> int | None:
        """Send the pieces that have not been sent, and again those that have changed since."""
        changed = [
            number for number, piece in enumerate(self._pieces[: self._next]) if self._has_changed(piece)
        ]
        if changed and self._encoder is not None:
            self._encoder.take_back()
            changed = list(range(self._next))  # a codec's state depends on the pieces before
        elif changed:
            in_flight = {self._pieces[number].shard for number in changed} - self._shared.keys()
            for shard in in_flight:
                self._flats[shard] = self._flats[shard].clone()  # the old memory may still be in flight
        if changed:
            self._resends += 1
            self.early = self._resends < _MOST_RESENDS
        left = [*changed, *range(self._next, len(self._pieces))]
        refused = self._not_finite_in(self._pieces[number] for number in left)
        if refused is not None:
            self.take_back()
            return refused
        for number in left:
            self._push_piece(number)
        return None

    def not_finite_gradient(self) -> int | None:
        """The first parameter whose gradient holds NaN or infinity, if a codec forbids that."""
        return self._not_finite_in(self._pieces)

    def _not_finite_in(self, pieces: Iterable[ShardPiece]) -> int | None:
        if self._encoder is None:
            return None
        for piece in pieces:
            for part in piece.parts:
                gradient = self._parameters[part.parameter].grad
                if gradient is not None and not is_finite(slice_of(gradient, part)):
                    return part.parameter
        return None

    @torch.no_grad()
    def _push_piece(self, number: int, *, early: bool = False) -> None:
        """Send a piece of the current gradients; `early`: the script may still change them."""
        piece = self._pieces[number]
        self._claim()
        for part in piece.parts:
            gradient = self._parameters[part.parameter].grad
            target = part_of(self._flats[piece.shard], part)
            if gradient is None:
                target.zero_()
                self._absent.add(part.parameter)
            else:
                target.copy_(slice_of(gradient, part))
                self._absent.discard(part.parameter)
        self._send_piece(number, early=early)

    def _has_changed(self, piece: ShardPiece) -> bool:
        """Whether a gradient differs from what was sent; by value, since scripts change it in many ways."""
        for part in piece.parts:
            gradient = self._parameters[part.parameter].grad
            if (gradient is None) != (part.parameter in self._absent):
                return True
            sent = part_of(self._flats[piece.shard], part)
            if gradient is not None and not _same_bits(slice_of(gradient, part), sent):
                return True
        return False

    # Other tensors -------------------------------------------------------------------------------

    @torch.no_grad()
    def add_to_sum(self) -> None:
        """Add the gradients to those that have not been pushed."""
        if self._sum is None:
            self._sum = [torch.zeros_like(p) for p in self._parameters]
        for total, p in zip(self._sum, self._parameters, strict=True):
            if p.grad is not None:
                total.add_(p.grad)

    def push_sum(self, *, exact: bool = False) -> int | None:
        """Send the summed gradients and forget them; with `exact`, without the codec."""
        assert self._sum is not None
        tensors, self._sum = self._sum, None
        if exact:
            return self.push(tensors)
        return self._push_coded(tensors)

    @torch.no_grad()
    def _push_coded(self, tensors: Sequence[Tensor]) -> int | None:
        """Send tensors as gradients, by the codec if there is one."""
        if self._encoder is None:
            return self.push(tensors)
        refused = self._first_not_finite(tensors)
        if refused is not None:
            return refused
        self._layout.to_shards(self._flats, tensors)
        self._absent.clear()
        for number in range(len(self._pieces)):
            self._send_piece(number)
        return None

    @torch.no_grad()
    def push(self, tensors: Sequence[Tensor]) -> int | None:
        """Send tensors that are shaped like the parameters as they are."""
        refused = self._first_not_finite(tensors)
        if refused is not None:
            return refused
        self.take_back()
        self._claim()
        self._layout.to_shards(self._flats, tensors)
        for piece in self._pieces:
            self._send_plain(piece)
        return None

    def _first_not_finite(self, tensors: Sequence[Tensor]) -> int | None:
        if self._encoder is None:
            return None
        return next((place for place, one in enumerate(tensors) if not is_finite(one)), None)

    # Sending -------------------------------------------------------------------------------------

    def _send_piece(self, number: int, *, early: bool = False) -> None:
        piece = self._pieces[number]
        if self._encoder is None:
            self._send_plain(piece)
            return
        payload = self._encoder.write(number, self._flats[piece.shard], self._absent, early=early)
        self._send_bytes(piece, as_bytes(payload), coded=True)
        self._has_coded = True

    def _send_plain(self, piece: ShardPiece) -> None:
        flat = self._flats[piece.shard]
        item_bytes = flat.element_size()
        if piece.shard in self._shared:
            self._bytes_so_far += (piece.stop - piece.start) * item_bytes
            return
        self._send_bytes(piece, as_bytes(flat)[piece.start * item_bytes : piece.stop * item_bytes])

    def _send_bytes(self, piece: ShardPiece, memory: memoryview, *, coded: bool = False) -> None:
        self._send(piece, memory, coded)
        self._bytes_so_far += len(memory)

    def finish(self) -> None:
        """All of this push has been sent."""
        self._begin()
        self._has_begun = False
        for shard in self._shared.values():
            shard.pushed()
        self.sent_bytes, self._bytes_so_far = self._bytes_so_far, 0
        if self._encoder is not None and self._has_coded:
            self._encoder.finish()
            self._has_coded = False

    def take_back(self) -> None:
        """Begin the push again: coded pieces that were sent early will be sent again."""
        if self._encoder is not None:
            self._encoder.take_back()
            self._begin()
            self._has_coded = False

    # The codec's state ---------------------------------------------------------------------------

    def codec_state(self) -> dict[str, dict[str, Tensor]]:
        """The codec's state of each parameter on this worker, for a checkpoint."""
        if self._encoder is None:
            return {}
        self.take_back()
        return self._encoder.save()

    def load_codec_state(self, saved: dict[str, dict[str, Tensor]]) -> int:
        """Load states that were saved, and fresh ones for other parameters.

        Returns the number of parameters whose saved state does not fit.
        """
        if self._encoder is None:
            return 0
        self.take_back()
        return self._encoder.load(saved)

    def saturated(self) -> int:
        """The number of values so far that were too large for the codec."""
        return 0 if self._encoder is None else self._encoder.saturated()

    def left_over(self) -> float:
        """The norm of the residual that was never sent, as a multiple of the last pushed gradient's."""
        if self._encoder is None:
            return 0.0
        last = float(torch.stack([torch.linalg.vector_norm(flat) for flat in self._flats]).norm())
        return self._encoder.left_over() / last if last else 0.0


_BITS = {2: torch.int16, 4: torch.int32}


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    bits = _BITS.get(one.element_size(), torch.int64)
    return torch.equal(one.contiguous().view(bits), other.view(bits))


def _nothing() -> None:
    """No memory is shared."""
