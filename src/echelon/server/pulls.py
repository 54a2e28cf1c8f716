"""A worker's pulls: weights that arrive piece by piece, and go from there into the parameters.

Without a codec a piece is received straight into this table's memory, or the server writes it there
(shared_table.py). With a codec a piece is either weights, or a coded change that is added to the weights
that the worker has (see encoding.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.comm.wire.exchange import as_bytes
from echelon.server.encoding import TableCodec, add_change
from echelon.server.layout import ShardPiece, TableLayout
from echelon.server.protocol import Released, WeightsPiece, WeightsWritten, refused
from echelon.server.shared_table import SharedShard


class WeightsReceiver:
    """The weights that the servers sent last. `worker` is this worker's number in the policy."""

    def __init__(self, layout: TableLayout, codec: TableCodec | None, worker: int) -> None:
        self.version = 0
        self._layout = layout
        self._codec = codec
        self._worker = worker
        self._flats = layout.new_flats()
        self._arrived: set[tuple[int, int]] = set()
        self._shared: frozenset[int] = frozenset()

    @torch.no_grad()
    def begin(self) -> None:
        """The servers have the weights that the parameters have now."""
        self._layout.to_shards(self._flats, [p.detach() for p in self._layout.parameters])

    def share(self, shared: dict[int, SharedShard]) -> None:
        """The servers write these shards' weights to shared memory."""
        for index, shard in shared.items():
            self._flats[index] = shard.weights.copy_(self._flats[index])
        self._shared = frozenset(shared)

    # Receiving -----------------------------------------------------------------------------------

    def expect(self) -> None:
        """All pieces will be sent again."""
        self._arrived.clear()

    def place(self, sender: str, message: WeightsPiece, length: int) -> memoryview | None:
        """The memory that a piece is received into; None if `receive` must read it."""
        piece = self._piece(sender, message)
        if self._codec is not None:
            return None
        flat = self._flats[piece.shard]
        item_bytes = flat.element_size()
        if message.coded or length != (piece.stop - piece.start) * item_bytes:
            raise refused(sender, message, f"{length} bytes are not the weights at {piece.start}")
        return as_bytes(flat)[piece.start * item_bytes : piece.stop * item_bytes]

    def receive(self, sender: str, message: WeightsPiece, payload: memoryview) -> None:
        """A piece has arrived; its payload is empty if it went to where `place` said."""
        piece = self._piece(sender, message)
        if self._codec is not None:
            self._read(sender, message, payload, piece, self._codec)
        self._arrived.add((message.shard, message.start))
        self.version = message.version

    def written(self, sender: str, message: Released | WeightsWritten, shard: int) -> None:
        """The server has written all weights of a shard to shared memory."""
        if shard not in self._shared:
            raise refused(sender, message, f"no memory is shared for shard {shard}")
        self._arrived.update(self._layout.pieces_in[shard])
        self.version = message.version

    def _piece(self, sender: str, message: WeightsPiece) -> ShardPiece:
        piece = self._layout.piece_at.get((message.shard, message.start))
        if piece is None:
            raise refused(sender, message, f"shard {message.shard} has no piece at {message.start}")
        return piece

    def _read(
        self, sender: str, message: WeightsPiece, payload: memoryview, piece: ShardPiece, codec: TableCodec
    ) -> None:
        flat = self._flats[piece.shard]
        if message.coded:
            add_change(codec, payload, piece, flat, self._worker, sender)
            return
        target = flat[piece.start : piece.stop]
        if len(payload) != target.numel() * target.element_size():
            raise refused(sender, message, f"{len(payload)} bytes are not the weights at {piece.start}")
        target.copy_(torch.frombuffer(payload, dtype=target.dtype))

    def is_complete(self) -> bool:
        """Whether all pieces have arrived."""
        return len(self._arrived) == len(self._layout.pieces)

    def has(self, place: int) -> bool:
        """Whether all pieces of one parameter have arrived."""
        return self._layout.pieces_of(place) <= self._arrived

    def missing_shards(self) -> list[int]:
        """The shards of which a piece has not arrived."""
        return sorted({shard for shard, _ in self._layout.piece_at.keys() - self._arrived})

    # Using ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def install(self) -> None:
        """Copy the weights into all parameters."""
        for place in range(len(self._layout.parameters)):
            self._layout.install(self._flats, place)

    @torch.no_grad()
    def install_parameter(self, place: int) -> None:
        """Copy the weights of one parameter into it."""
        self._layout.install(self._flats, place)

    @torch.no_grad()
    def delta(self) -> list[Tensor]:
        """How the parameters have changed since the worker got weights."""
        received = self._layout.from_shards(self._flats)
        return [p - old for p, old in zip(self._layout.parameters, received, strict=True)]

    def remember(self) -> Callable[[], None]:
        """Returns a function that brings back the weights and the version of now."""
        flats, version = [flat.clone() for flat in self._flats], self.version

        def bring_back() -> None:
            self.version = version
            for flat, kept in zip(self._flats, flats, strict=True):
                flat.copy_(kept)

        return bring_back
