"""A server checks each message before it uses it: a wrong one is refused and its sender named."""

from __future__ import annotations

import pytest
import torch

from echelon.comm.wire.exchange import as_bytes
from echelon.comm.wire.mailbox import Delivery
from echelon.errors import Corrupt
from echelon.observe.recorder import Recorder
from echelon.server.protocol import (
    AskAwaited,
    AskToPush,
    AwaitedWorkers,
    CarryOut,
    FetchState,
    ForwardDone,
    ForwardPiece,
    JoinTable,
    LeaveTable,
    MembershipNoted,
    OpenTable,
    PullWeights,
    PushDone,
    PushHeld,
    PushInfo,
    PushPiece,
    Released,
    Seeded,
    SeedState,
    SeedWeights,
    TableOpened,
    WeightsPiece,
)
from echelon.server.server import ParameterServer
from echelon.sync.families.serve import Invite
from echelon.sync.policy import ClusterInfo

WORKERS, SERVER, UNKNOWN_RANK = (0, 1), 2, 7
LENGTH = 6
INFO = PushInfo(kind="gradient", read=0, samples=1.0, compute_s=0.0, transfer_s=0.0, used=[True])


class Sent:
    """In place of a mailbox: keeps the messages that a server sends."""

    def __init__(self):
        self.messages = []

    def send(self, peer, message, payload=b"", sent=None):
        self.messages.append((peer, message, bytes(payload)))


class Server:
    """A parameter server that is driven message by message."""

    def __init__(self, servers=(SERVER,), rank=SERVER):
        self.sent = Sent()
        self.server = ParameterServer(rank=rank, servers=servers, workers=WORKERS, recorder=Recorder(None))
        self.server._mailbox = self.sent

    def opened(self, **fields):
        opening = {
            "policy": "async",
            "cluster": ClusterInfo(workers=2, servers=1),
            "workers": list(WORKERS),
            "shapes": [[2, 3]],
            "dtype": "float32",
            "optimizer": {
                "module": "torch.optim",
                "name": "SGD",
                "defaults": {"lr": 0.5},
                "groups": [{"lr": 0.5}],
            },
            "groups": [0],
        }
        self.take(0, OpenTable(table=0, **{**opening, **fields}))
        return self

    def take(self, peer, message, payload=b""):
        """Do what the mailbox does; returns what the server sends."""
        self.sent.messages.clear()
        with torch.no_grad():
            if payload:
                placed = self.server.place(peer, message, len(payload))
                if placed is not None:
                    placed[:] = payload
                    payload = b""
            self.server._handle(Delivery(peer, message, memoryview(bytearray(payload))))
        return list(self.sent.messages)


def values(value, count=LENGTH):
    return bytes(as_bytes(torch.full((count,), value)))


def piece(**fields):
    return PushPiece(**{"table": 0, "shard": 0, "step": 0, "start": 0, **fields})


def done(**fields):
    return PushDone(**{"table": 0, "shard": 0, "step": 0, "info": INFO, **fields})


def test_a_push_is_applied_and_answered_by_a_release_and_weights():
    server = Server()
    assert server.opened().sent.messages == [(0, TableOpened(table=0), b"")]
    assert server.take(0, SeedWeights(table=0, shard=0), values(3.0)) == [(0, Seeded(table=0), b"")]
    assert server.take(1, piece(), values(2.0)) == []
    (_, released, _), (to, weights, payload) = server.take(1, done())
    assert isinstance(released, Released)
    assert (released.fresh, released.version) == (True, 1)
    assert to == 1
    assert weights == WeightsPiece(table=0, shard=0, start=0, version=1)
    assert payload == values(3.0 - 0.5 * 2.0)


def test_a_policy_that_cannot_be_built_is_answered_by_the_problem():
    server = Server().opened(policy="asink")
    ((peer, answer, _),) = server.sent.messages
    assert peer == 0
    assert "asink" in answer.problem


@pytest.mark.parametrize("dtype", ["load", "int8", "", "nn"])
def test_a_type_that_is_no_float_is_refused_by_name(dtype):
    ((_, opened, _),) = Server().opened(dtype=dtype).sent.messages
    assert f"no parameters of type {dtype}" in opened.problem


def test_coordinator_notes_membership_and_names_the_awaited_workers():
    server = Server().opened()
    assert server.take(1, LeaveTable(table=0)) == [(1, MembershipNoted(table=0), b"")]
    assert server.take(0, AskAwaited(table=0)) == [(0, AwaitedWorkers(table=0, ranks=[SERVER]), b"")]
    assert server.take(1, JoinTable(table=0)) == [(1, MembershipNoted(table=0), b"")]
    assert server.take(0, AskAwaited(table=0)) == [(0, AwaitedWorkers(table=0, ranks=[1]), b"")]


WRONG = {
    "a piece of an unknown table": (0, piece(table=1), 1),
    "a piece of an unknown shard": (0, piece(shard=1), 1),
    "a piece beyond the shard": (0, piece(start=LENGTH - 1), 2),
    "a piece far beyond the shard": (0, piece(start=1 << 60), 1),
    "a piece of a stranger": (UNKNOWN_RANK, piece(), 1),
    "weights of another length": (0, SeedWeights(table=0, shard=0), LENGTH + 1),
    "weights of an unknown shard": (0, SeedWeights(table=0, shard=3), 1),
    "a state of an unknown shard": (0, SeedState(table=0, shard=3), 1),
    "a done without pieces": (0, done(step=5), 0),
    "a done of an unknown shard": (0, done(shard=4), 0),
    "a done of a stranger": (UNKNOWN_RANK, done(), 0),
    "an ask of a stranger": (UNKNOWN_RANK, AskToPush(table=0, step=0, info=INFO), 0),
    "an ask about an unknown table": (0, AskToPush(table=2, step=0, info=INFO), 0),
    "a pull of a stranger": (UNKNOWN_RANK, PullWeights(table=0), 0),
    "a join of a stranger": (UNKNOWN_RANK, JoinTable(table=0), 0),
    "a state of an unknown table": (0, FetchState(table=9), 0),
    "orders from a worker": (0, CarryOut(table=0, orders=[Invite(1)]), 0),
    "a held push from a worker": (0, PushHeld(table=0, worker=1, step=0, square=0.0, dot=0.0), 0),
    "a held push of a stranger": (3, PushHeld(table=0, worker=9, step=0, square=0.0, dot=0.0), 0),
    "a forwarded piece from a worker": (0, ForwardPiece(table=0, shard=0, worker=1, step=0), 1),
    "a forwarded push from a worker": (0, ForwardDone(table=0, shard=0, worker=1, step=0, info=INFO), 0),
}


@pytest.mark.parametrize("what", WRONG)
def test_invalid_message_is_refused_naming_its_sender(what):
    peer, message, count = WRONG[what]
    server = Server(servers=(SERVER, 3)).opened()
    with pytest.raises(Corrupt, match=rf"rank {peer} sent a message {type(message).__name__}") as caught:
        server.take(peer, message, values(1.0, count) if count else b"")
    assert caught.value.ranks == (peer,)
    assert not server.sent.messages


def test_only_the_first_server_takes_messages_for_the_coordinator():
    server = Server(servers=(SERVER, 3), rank=3).opened()
    with pytest.raises(Corrupt, match="which is the first server"):
        server.take(0, JoinTable(table=0))


@pytest.mark.parametrize(("start", "count"), [(3, LENGTH), (0, LENGTH - 1)])
def test_with_a_codec_a_plain_piece_must_be_exactly_one_piece(start, count):
    server = Server().opened(codec="one-bit")
    with pytest.raises(Corrupt, match="rank 0 sent a message PushPiece"):
        server.take(0, piece(start=start), values(1.0, count))
