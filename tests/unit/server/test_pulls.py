"""Weights that arrive are installed in the parameters; a piece that does not fit is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.comm.wire.exchange import as_bytes
from echelon.errors import Corrupt
from echelon.server import encoding
from echelon.server.layout import TableLayout
from echelon.server.protocol import WeightsPiece
from echelon.server.pulls import WeightsReceiver

SERVER = "rank 4 on there"


class Pulling:
    """A receiver of three parameters on two servers."""

    def __init__(self, codec="none"):
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((300, 200), (7,), (3, 5))]
        self.layout = TableLayout(self.parameters, 2, whole=False)
        shapes = [p.shape for p in self.parameters]
        self.codec = encoding.open_codec(codec, torch.float32, 0, shapes)
        self.receiver = WeightsReceiver(self.layout, self.codec, 0)

    def message(self, piece, **fields):
        return WeightsPiece(
            **{"table": 0, "shard": piece.shard, "start": piece.start, "version": 3, **fields}
        )

    def send(self, piece, values, **fields):
        """Do what the mailbox does."""
        message, memory = self.message(piece, **fields), as_bytes(values)
        placed = self.receiver.place(SERVER, message, len(memory))
        if placed is not None:
            placed[:] = memory
            memory = memoryview(b"")
        self.receiver.receive(SERVER, message, memory)


@pytest.mark.parametrize("codec", ["none", "one-bit"])
def test_weights_are_complete_when_every_piece_has_arrived(codec):
    pulling = Pulling(codec)
    assert pulling.receiver.missing_shards() == [0, 1]
    for piece in pulling.layout.pieces:
        assert not pulling.receiver.is_complete()
        pulling.send(piece, torch.full((piece.stop - piece.start,), 2.5))
    assert pulling.receiver.is_complete()
    assert pulling.receiver.missing_shards() == []
    assert pulling.receiver.version == 3
    assert not any(p.any() for p in pulling.parameters), "not installed yet"
    pulling.receiver.install()
    assert all(bool((p == 2.5).all()) for p in pulling.parameters)
    pulling.receiver.expect()
    assert pulling.receiver.missing_shards() == [0, 1]


def test_a_parameter_can_be_installed_as_soon_as_its_own_pieces_have_arrived():
    pulling = Pulling()
    wanted = pulling.layout.pieces_of(1)
    for piece in pulling.layout.pieces:
        if (piece.shard, piece.start) in wanted:
            pulling.send(piece, torch.ones(piece.stop - piece.start))
    assert [pulling.receiver.has(place) for place in range(3)][1]
    pulling.receiver.install_parameter(1)
    assert bool((pulling.parameters[1] == 1).all())
    assert not pulling.parameters[0].any()


def test_a_delta_is_the_change_since_the_weights_arrived():
    pulling = Pulling()
    with torch.no_grad():
        pulling.parameters[1].fill_(5.0)
    pulling.receiver.begin()
    with torch.no_grad():
        pulling.parameters[1].add_(0.25)
    delta = pulling.receiver.delta()
    assert bool((delta[1] == 0.25).all())
    assert not delta[0].any()


def test_remembered_weights_and_version_come_back():
    pulling = Pulling()
    bring_back = pulling.receiver.remember()
    for piece in pulling.layout.pieces:
        pulling.send(piece, torch.ones(piece.stop - piece.start))
    bring_back()
    pulling.receiver.install()
    assert pulling.receiver.version == 0
    assert not any(p.any() for p in pulling.parameters)


@pytest.mark.parametrize("codec", ["none", "one-bit"])
@pytest.mark.parametrize(
    ("fields", "count"),
    [({"shard": 2}, None), ({"start": 1}, None), ({}, 3), ({"coded": True}, 3)],
    ids=["shard", "start", "length", "coded"],
)
def test_a_piece_that_does_not_fit_is_refused_and_its_server_named(codec, fields, count):
    pulling = Pulling(codec)
    piece = pulling.layout.pieces[0]
    values = torch.ones(piece.stop - piece.start if count is None else count)
    with pytest.raises(Corrupt, match=SERVER):
        pulling.send(piece, values, **fields)
    assert not pulling.receiver.is_complete()
