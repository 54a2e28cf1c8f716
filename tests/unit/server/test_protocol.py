"""Every message survives the wire; a header that is not a message of the protocol is refused."""

from __future__ import annotations

import contextlib
import inspect
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.server import protocol
from echelon.server.protocol import (
    CarryOut,
    Freed,
    HandOut,
    OpenTable,
    PushDone,
    PushInfo,
    PushPiece,
    Released,
    ServerMessage,
    SharedMemory,
    ToServer,
    ToWorker,
)
from echelon.sync.families.serve import Apply, Drop, Invite, WeightedPush
from echelon.sync.policy import ClusterInfo

TO_SERVER, TO_WORKER = msgspec.msgpack.Decoder(ToServer), msgspec.msgpack.Decoder(ToWorker)
MESSAGES = (*get_args(ToServer), *get_args(ToWorker))

number = st.integers(0, 2**63 - 1)
real = st.floats(allow_nan=False)
infos = st.builds(
    PushInfo,
    kind=st.sampled_from(["gradient", "delta", "weights", "ask"]),
    read=number,
    samples=real,
    compute_s=real,
    transfer_s=real,
    wants_weights=st.booleans(),
    used=st.lists(st.booleans()),
    settings=st.none() | st.lists(st.dictionaries(st.text(), real | st.none() | st.booleans() | st.text())),
)
orders = st.one_of(
    st.builds(Apply, st.lists(st.builds(WeightedPush, number, number, real)).map(tuple)),
    st.builds(Drop, number, number, st.text()),
    st.builds(Freed, number, st.booleans(), st.booleans(), number, real),
    st.builds(HandOut, number, st.booleans()),
    st.builds(Invite, number),
)
clusters = st.builds(
    ClusterInfo,
    workers=st.integers(1, 9),
    groups=st.lists(st.lists(st.integers(0, 9)).map(tuple)).map(tuple),
    shares=st.lists(real).map(tuple),
    lr=st.none() | real,
)
memories = st.builds(
    SharedMemory, pid=number, handle=st.tuples(number, number, number), size_bytes=number, secret=number
)
FIELDS = {
    "memory": memories,
    "info": infos,
    "orders": st.lists(orders),
    "cluster": clusters,
    "optimizer": st.just({"module": "torch.optim", "name": "SGD", "defaults": {"lr": 0.1}, "groups": []}),
    "shapes": st.lists(st.lists(st.integers(0, 9))),
}
BY_TYPE = {"Index": number, "Rank": number, "float": real, "bool": st.booleans(), "str": st.text()}
BY_TYPE |= {"list[Rank]": st.lists(number), "list[Index]": st.lists(number)}


@st.composite
def messages(draw, kinds=MESSAGES):
    kind = draw(st.sampled_from(kinds))
    annotated = inspect.get_annotations(kind)
    fields = {
        name: draw(FIELDS[name] if name in FIELDS else BY_TYPE[type_]) for name, type_ in annotated.items()
    }
    return kind(**fields)


@settings(max_examples=300, deadline=None)
@given(messages(get_args(ToServer)))
def test_messages_to_a_server_survive_the_wire(message):
    assert TO_SERVER.decode(msgspec.msgpack.encode(message)) == message


@settings(max_examples=100, deadline=None)
@given(messages(get_args(ToWorker)))
def test_messages_to_a_worker_survive_the_wire(message):
    assert TO_WORKER.decode(msgspec.msgpack.encode(message)) == message


@settings(max_examples=300, deadline=None)
@given(messages(), st.data())
def test_a_header_without_a_field_or_with_one_of_another_type_is_refused(message, data):
    told = msgspec.to_builtins(message)
    decoder = TO_SERVER if isinstance(message, ToServer) else TO_WORKER
    name = data.draw(st.sampled_from(sorted(told)))
    spoiled = {**told, name: {"neither": "this", "nor": ["that"]}}
    if name == "optimizer":
        spoiled[name] = 7
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode(spoiled))
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode({**told, "surplus": 1}))


@pytest.mark.parametrize("field", ["table", "shard", "step", "start"])
def test_numbers_below_zero_are_refused(field):
    piece = {"type": "push-piece", "table": 0, "shard": 0, "step": 0, "start": 0}
    assert TO_SERVER.decode(msgspec.msgpack.encode(piece)) == PushPiece(table=0, shard=0, step=0, start=0)
    with pytest.raises(msgspec.ValidationError, match=field):
        TO_SERVER.decode(msgspec.msgpack.encode({**piece, field: -1}))


def test_a_worker_does_not_take_messages_for_servers_and_a_server_none_for_workers():
    released = Released(table=0, fresh=True, ask=False, version=3, held_s=0.5)
    with pytest.raises(msgspec.ValidationError):
        TO_SERVER.decode(msgspec.msgpack.encode(released))
    with pytest.raises(msgspec.ValidationError):
        TO_WORKER.decode(msgspec.msgpack.encode(CarryOut(table=0, orders=[Invite(1)])))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_an_error_that_the_mailbox_catches(raw):
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        assert isinstance(TO_SERVER.decode(raw), ServerMessage)


def test_a_push_of_an_unknown_kind_is_refused():
    info = {"kind": "gossip", "read": 0, "samples": 1.0, "compute_s": 0.0, "transfer_s": 0.0}
    told = {"type": "push-done", "table": 0, "shard": 0, "step": 0, "info": info}
    with pytest.raises(msgspec.ValidationError, match="gossip"):
        TO_SERVER.decode(msgspec.msgpack.encode(told))
    info["kind"] = "delta"
    assert isinstance(TO_SERVER.decode(msgspec.msgpack.encode(told)), PushDone)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_docstring_of_every_message_names_sender_and_receiver(kind):
    first = (inspect.getdoc(kind) or "").partition("\n")[0]
    assert first.endswith(".")
    assert "server" in first or "coordinator" in first
    assert kind.__module__ == protocol.__name__


def test_an_opening_keeps_the_policys_tuples():
    opening = OpenTable(
        table=0,
        policy="async",
        cluster=ClusterInfo(workers=2, groups=((0, 1), (2,))),
        workers=[0, 1],
        shapes=[[2, 3], []],
        dtype="float32",
        optimizer={"module": "torch.optim"},
        groups=[0, 0],
    )
    got = TO_SERVER.decode(msgspec.msgpack.encode(opening))
    assert got.cluster.groups == ((0, 1), (2,))
