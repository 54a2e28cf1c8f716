"""The parsers of bytes that come from another process: a worker, a server, an agent, or a stranger.

Some come in two variants. With "sealed", the fuzzer's bytes become a frame with the right seal: they are
what a worker sends that knows the secret, and errs. Without, they are what a stranger sends.

Not here: memory that processes of one user on one machine share (`comm/memory`, `server/ring.py`), because
they could write to each other's memory anyway, and pickled calls, which only a launcher's channel carries.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from echelon.codec.codec import CODECS, CodecContext, StandIn, Summed
from echelon.comm.meet import board, mesh
from echelon.comm.meet.handshake import Refused, conversation
from echelon.comm.meet.mesh import ListenAddress
from echelon.comm.meet.rendezvous import Departure, Member, Rendezvous
from echelon.comm.meet.strangers import Strangers, opening
from echelon.comm.meet.visit import LeaderStore
from echelon.comm.wire import notices
from echelon.comm.wire.all_to_all import HEAD_BYTES, pack_head, unpack_head
from echelon.comm.wire.connection import Connection, Whole
from echelon.comm.wire.frames import HEADER_BYTES, Header
from echelon.comm.wire.mailbox import Mailbox
from echelon.comm.wire.sealed import MessageReader, MessageWriter
from echelon.comm.wire.seals import PAYLOAD, Checksum
from echelon.errors import Corrupt
from echelon.observe.growth import Grown, read_grown, write_grown
from echelon.reduce.encoded.rounds import EncodedMessage, NonFinite, read_message, write_message
from echelon.server import encoding, protocol
from echelon.server.layout import cut_pieces, split
from echelon.start.agents import protocol as agents
from echelon.start.agents.channel import Channel
from fuzz.parser import Parser

_VIEW = bytes(range(16))
_SECRET = b"s" * 32
_FIELDS = struct.Struct(
    "<QIQQI"
)  # of a header that is sealed here: operation, message, size, offset, length
_MOST_SENT = 1 << 16  # what a socket's buffer takes at once

# Frames ------------------------------------------------------------------------------------------


def _receive(data: bytes) -> Connection:
    """A connection that expects one message gets these bytes, and then the end."""
    one, other = socket.socketpair()
    with one, other:
        connection = Connection(one, view=_VIEW, peer="rank 1", aside_bytes=1 << 16)
        connection.expect((7, 0), Whole(memoryview(bytearray(64)), lambda: None))
        other.sendall(data[:_MOST_SENT])
        other.close()
        try:
            while not connection.paused:
                connection.read()
        except ConnectionError:
            pass
        return connection


def _frame(number: int, fields: tuple[int, int, int, int], payload: bytes) -> bytes:
    operation, message, size, offset = fields
    seal = Checksum()
    header = Header(
        _VIEW, number, operation, message, size, offset, len(payload), seal.of(number, PAYLOAD, payload)
    )
    return header.pack(seal) + payload


def _receive_sealed(data: bytes) -> None:
    """The bytes are fields and payloads of frames, which get the right seals."""
    sent, at, number = b"", 0, 0
    while at + _FIELDS.size <= len(data) and len(sent) < _MOST_SENT // 2:
        *fields, length = _FIELDS.unpack_from(data, at)
        at += _FIELDS.size
        payload = data[at : at + length % 512]
        at += len(payload)
        sent += _frame(number, (fields[0], fields[1], fields[2], fields[3]), payload)
        number += 1
    _receive(sent)


_NOTICES = (
    notices.LeaveNotice("it failed", (1,)),
    notices.GaveUp(9, (1, 2), "late", late=True),
    notices.Question(5),
    notices.Answer(5, begun=True),
    notices.DoingQuestion(1, 5),
    notices.DifferentCalls((0, 1), "text", "where", "fix"),
)


def _frames() -> list[Parser]:
    whole = _frame(0, (7, 0, 64, 0), bytes(64))
    told = notices.encode(_NOTICES[0])
    sealed = _FIELDS.pack(7, 0, 64, 0, 64) + bytes(64)
    aside = _FIELDS.pack(8, 1, 100, 0, 50) + bytes(50) + _FIELDS.pack(8, 1, 100, 50, 50) + bytes(50)
    notice = _FIELDS.pack(0, 0, len(told), 0, len(told)) + told
    return [
        Parser(
            "frames", _receive, (whole, whole + _frame(1, (0, 0, len(told), 0), told), bytes(HEADER_BYTES))
        ),
        Parser("frames-sealed", _receive_sealed, (sealed, aside, notice, sealed + notice)),
        Parser(
            "notices",
            lambda data: notices.decode(data, peer="rank 1"),
            tuple(notices.encode(one) for one in _NOTICES),
        ),
    ]


# Meeting -----------------------------------------------------------------------------------------


def _answer(data: bytes) -> None:
    """A stranger's bytes at the side that answers."""
    talk, at = conversation(view=_VIEW, rank=0, secret=_SECRET, dialled=False), 0
    step = next(talk)
    while at + step.awaits <= len(data):
        at, heard = at + step.awaits, data[at : at + step.awaits]
        step = talk.send(heard)


def _dial(data: bytes) -> None:
    """A stranger's bytes at the side that dials."""
    talk, at = conversation(view=_VIEW, rank=1, secret=_SECRET, dialled=True), 0
    step = next(talk)
    while at + step.awaits <= len(data):
        at, heard = at + step.awaits, data[at : at + step.awaits]
        step = talk.send(heard)


def _call(data: bytes) -> None:
    """A stranger's bytes at the leader's port."""
    found: list[Refused | None] = []
    with (
        selectors.DefaultSelector() as ready,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as caller,
    ):
        listener.setblocking(False)
        strangers = Strangers(
            ready,
            talk=lambda sock: conversation(view=_VIEW, rank=0, secret=_SECRET, dialled=False),
            proven=lambda sock, proven: sock.close(),
            rejected=lambda refusal, address: found.append(refusal),
            opens=True,
        )
        strangers.accept(listener)
        caller.sendall(data[:_MOST_SENT])
        caller.shutdown(socket.SHUT_WR)
        for _ in range(20):
            for key, _ in ready.select(1.0 if len(strangers) else 0):
                strangers.hears(key.fd)
            if not len(strangers):
                break
        strangers.close()


def _requests(data: bytes) -> None:
    """What a worker asks of the meeting's board."""
    made = board.MeetingBoard()
    for message in _messages(data):
        board.encode(made.answer(board.decode_request(message, peer="rank 1")))


def _messages(data: bytes) -> list[bytes]:
    """Messages of a length in two bytes each."""
    found, at = [], 0
    while at + 2 <= len(data):
        length = int.from_bytes(data[at : at + 2], "little")
        found.append(data[at + 2 : at + 2 + length])
        at += 2 + length
    return found


def _joined(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(2, "little") + message for message in messages)


def _values(data: bytes) -> None:
    """What a worker has written on the board, read as each type that there is."""
    for of in (Member, Departure, ListenAddress):
        with contextlib.suppress(Corrupt):
            board.decode_value(data, of, key="joined/1", peer="rank 1")
    board.decode_text(data, key="folder", peer="rank 1")


def _published_address(data: bytes) -> None:
    """Where a worker says that it listens, up to the list of places to dial."""
    store = LeaderStore(board.MeetingBoard(), timeout_s=1)
    store.set(f"address/{_VIEW.hex()}/1", data)
    members = tuple(Member(rank=rank, node="a", host="a", pid=7) for rank in range(2))
    found = mesh._address_of(Rendezvous(store, members[0], members), 1, _VIEW, time.monotonic() + 1)
    mesh._places(found, ["fe80::1%eth0"], elsewhere=True)


def _stream(data: bytes) -> None:
    reader = MessageReader(None, peer="rank 1", longest_bytes=1 << 16)
    for at in range(0, len(data), 97):
        for message in reader.messages(data[at : at + 97]):
            assert len(message) <= 1 << 16


def _meeting() -> list[Parser]:
    writer = MessageWriter(None)
    hello = struct.pack("<4s16sI?32s", b"ECHI", _VIEW, 1, True, bytes(32))
    asked = [
        board.SetValue("address/1", b"{}"),
        board.GetValue("address/1"),
        board.AddCount("joined", 1),
        board.CheckKeys(["joined", "address/2"]),
    ]
    values = [
        Member(rank=1, node="a", host="a", pid=7, cores=(0, 1)),
        Departure(t=1.0, cause="ValueError: no", because=(2,)),
        ListenAddress("127.0.0.1", 4000, further=(("::1", 4001),)),
    ]
    replies = [board.ValueReply(b"x"), board.CountReply(3), board.RefusalReply("full")]
    return [
        Parser("handshake-answering", _answer, (hello + bytes(32), hello)),
        Parser("handshake-dialling", _dial, (hello + bytes(32), hello)),
        Parser(
            "meeting-port", _call, (opening(encrypted=False) + hello + bytes(32), b"GET / HTTP/1.1\r\n\r\n")
        ),
        Parser("meeting-requests", _requests, (_joined(*map(board.encode, asked)),)),
        Parser(
            "meeting-replies",
            lambda data: board.decode_reply(data, peer="the leader"),
            tuple(map(board.encode, replies)),
        ),
        Parser("meeting-values", _values, tuple(map(msgspec.json.encode, values))),
        Parser("meeting-addresses", _published_address, (msgspec.json.encode(values[2]),)),
        Parser(
            "meeting-ids",
            lambda data: board.decode_id(data, key="view", peer="rank 0"),
            (bytes(16).hex().encode(),),
        ),
        Parser("sealed-messages", _stream, (writer.sealed(b"one") + writer.sealed(b""),)),
    ]


# Servers and codecs ------------------------------------------------------------------------------


class _NoLoop:
    """Takes the place of a loop: nothing is sent."""

    def submit(self, operation: object) -> None:
        """Do nothing."""


class _NoConnection:
    """Takes the place of a connection: keeps the sink of the next message."""

    peer = "rank 1"

    def expect(self, key: object, sink: object) -> None:
        """Keep the sink."""
        self.sink = sink


def _mailbox(accepts: object) -> object:
    def read(data: bytes) -> None:
        mailbox = Mailbox(_NoLoop(), {1}, accepts, place=lambda peer, message, length: memoryview(b""))
        connection = _NoConnection()
        mailbox.begin({1: connection})
        sink = connection.sink
        if sink.accepts(len(data)):
            sink.take(0, memoryview(data))
            sink.finished()

    return read


def _posted(message: msgspec.Struct) -> bytes:
    return bytes(8) + msgspec.msgpack.encode(message)


def _read_codec(text: str) -> object:
    codec = CODECS.build(text)
    shape = (6, 20)

    def read(data: bytes) -> None:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
        context = CodecContext(shape=shape, seed=7, workers=2)
        codec.read(payload, torch.zeros(120), context)
        codec.read(payload, torch.zeros(120), context, add=True)
        codec.read_total(payload, torch.zeros(120), codec.begin(120), context)

    return read


def _codec_parser(text: str) -> Parser:
    codec, context = CODECS.build(text), CodecContext(shape=(6, 20), seed=7, workers=2)
    values = torch.linspace(-1, 1, 120)
    seeds = [bytes(codec.encode(values, codec.begin(120), context).numpy())]
    seeds.append(bytes(codec.encode(torch.zeros(120), codec.begin(120), context).numpy()))
    return Parser(f"codec-{text}", _read_codec(text), tuple(seeds))


def _coded_pieces() -> Parser:
    codec = encoding.open_codec("top-k(ratio=0.2)", torch.float32, 0, ((30,), (4, 5)))
    assert codec is not None
    shards = split([30, 20], 1, item_bytes=4)
    (piece,) = cut_pieces(shards, item_bytes=4, piece_bytes=1 << 16)
    encoder = encoding.PushEncoder(codec, [piece], 1)
    written = bytes(encoder.write(0, torch.linspace(-1, 1, 50), (), early=False))

    def read(data: bytes) -> None:
        for act in (encoding.read_push, encoding.add_change):
            act(codec, memoryview(bytearray(data)), piece, torch.zeros(50), 1, "rank 1")

    return Parser("server-coded-pieces", read, (written,))


def _encoded_round(data: bytes) -> None:
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    read_message(payload, 5, 2, "rank 1")


def _servers() -> list[Parser]:
    to_server = [
        protocol.PushPiece(table=0, shard=0, step=1, start=0),
        protocol.AskAwaited(table=0),
        protocol.Bye(),
        protocol.JoinTable(table=1),
        protocol.CarryOut(table=0, orders=[protocol.HandOut(1)]),
    ]
    to_worker = [
        protocol.Released(table=0, fresh=True, ask=False, version=3, held_s=0.1),
        protocol.AwaitedWorkers(table=0, ranks=[1, 2]),
        protocol.TableOpened(table=0, problem="none"),
    ]
    part = torch.arange(5, dtype=torch.uint8)
    rounds = [EncodedMessage([True] * 5, [part, part]), EncodedMessage([False] * 5, [], NonFinite(1, 2))]
    names = [name for name in CODECS.names() if not issubclass(CODECS.get(name), StandIn | Summed)]
    return [
        Parser("server-messages", _mailbox(protocol.ToServer), tuple(map(_posted, to_server))),
        Parser("worker-messages", _mailbox(protocol.ToWorker), tuple(map(_posted, to_worker))),
        _coded_pieces(),
        Parser(
            "encoded-rounds", _encoded_round, tuple(bytes(write_message(one).numpy()) for one in rounds)
        ),
        Parser(
            "all-to-all-heads",
            lambda data: unpack_head(data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")),
            (pack_head(100, 7),),
        ),
        *(_codec_parser(name) for name in names),
    ]


# Agents ------------------------------------------------------------------------------------------


def _channel(data: bytes) -> None:
    reading, writing = os.pipe()
    channel = Channel(reading, os.dup(writing), peer="an agent")
    try:
        os.write(writing, data[:_MOST_SENT])
        os.close(writing)
        channel.poll()
    finally:
        channel.close()


def _agents_message(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(data)) + data


def _grown(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="echelon-fuzz-") as made:
        folder = Path(made)
        for kind in ("events", "logs", "errors", "results"):
            (folder / kind).mkdir()
        write_grown(folder, read_grown(data), [0, 1])
        size_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        assert size_bytes <= len(data), "a file grew by more than was sent"


def _agents() -> list[Parser]:
    some = [
        agents.Introduction(
            host="a", pid=1, cores=2, echelon="1", python="3", torch="2", addresses=["::1"]
        ),
        agents.Listening(7, "token"),
        agents.Begin(run="r", config="", plan="", cwd="/", workers=[]),
        agents.WorkerEnded(0, 1),
        agents.Alive(),
    ]
    grown = [Grown("events/rank-0.jsonl", 0, b"{}\n"), Grown("logs/rank-1.log", 0, b"x")]
    return [
        Parser("agents-channel", _channel, tuple(map(_agents_message, some))),
        Parser("grown-files", _grown, tuple(map(msgspec.msgpack.encode, grown))),
    ]


def wire_parsers() -> list[Parser]:
    """All of them."""
    return [*_frames(), *_meeting(), *_servers(), *_agents()]
