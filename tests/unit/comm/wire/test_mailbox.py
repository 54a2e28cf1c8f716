"""Messages arrive whole, in order and in the memory of `place`; a receiver learns why a mailbox ended."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
import torch

from echelon.comm.wire import mailbox as mailbox_module
from echelon.comm.wire.exchange import as_bytes
from echelon.comm.wire.mailbox import Mailbox
from echelon.errors import Corrupt, PeerLost, WorkerError
from wires import Wires


class Note(msgspec.Struct, frozen=True, tag="note", forbid_unknown_fields=True):
    number: int = 0
    text: str = ""


class Block(msgspec.Struct, frozen=True, tag="block"):
    start: int


class Departure(msgspec.Struct, frozen=True, tag="farewell"):
    pass


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    pass


class IllTyped(msgspec.Struct, frozen=True, tag="note"):
    number: str = "three"


class Overfull(msgspec.Struct, frozen=True, tag="note"):
    number: int = 3
    more: int = 4


ACCEPTS = Note | Block | Departure


def mailboxes(wires, **options):
    """One for each member."""
    members = range(wires.size)
    return [Mailbox(wires.loops[rank], set(members) - {rank}, ACCEPTS, **options) for rank in members]


def take(mailbox, count=1):
    messages = [mailbox.receive(10) for _ in range(count)]
    assert None not in messages
    return messages


def failure(mailbox):
    """The error that ended a mailbox; messages that came before are skipped."""

    def wait():
        for _ in range(100):
            mailbox.receive(60)

    with pytest.raises(WorkerError) as caught:
        wait()
    return caught.value


def test_a_message_arrives_with_its_fields_and_its_payload():
    with Wires(2) as wires:
        one, other = mailboxes(wires)
        note = Note(-(1 << 62), "long " * 100_000)
        one.send(1, note, memoryview(b"some bytes"))
        one.send(1, Block(1 << 60))
        first, second = take(other, 2)
        assert (first.peer, first.message, bytes(first.payload)) == (0, note, b"some bytes")
        assert (second.peer, second.message, bytes(second.payload)) == (0, Block(1 << 60), b"")


def test_messages_of_one_peer_arrive_in_the_order_in_which_they_were_sent():
    """Small and large ones, from two senders; more than the sockets' buffers hold."""
    with Wires(3, buffer_bytes=4096, frame_bytes=2048) as wires:
        made = mailboxes(wires)
        lengths = [0, 1, 70_000, 0, 5000, 3, 200_000, 0] * 5
        for sender in (0, 1):
            for number, length in enumerate(lengths):
                made[sender].send(2, Note(number), memoryview(bytes([number]) * length))
        got = {0: [], 1: []}
        for message in take(made[2], 2 * len(lengths)):
            got[message.peer].append(message)
        for messages in got.values():
            assert [message.message.number for message in messages] == list(range(len(lengths)))
            for number, message in enumerate(messages):
                assert bytes(message.payload) == bytes([number]) * lengths[number]


def test_a_payload_goes_straight_into_the_memory_that_place_returns():
    room = torch.zeros(50_000, dtype=torch.float64)

    def place(peer, message, length):
        at = message.start * 8 if isinstance(message, Block) else 0
        return as_bytes(room)[at : at + length] if isinstance(message, Block) else None

    with Wires(2) as wires:
        sender = Mailbox(wires.loops[0], {1}, ACCEPTS)
        taker = Mailbox(wires.loops[1], {0}, ACCEPTS, place=place)
        given = torch.arange(30_000, dtype=torch.float64)
        sender.send(1, Block(20_000), as_bytes(given))
        sender.send(1, Note(), memoryview(b"aside"))
        placed, aside = take(taker, 2)
        assert len(placed.payload) == 0
        assert bytes(aside.payload) == b"aside"
        assert torch.equal(room[20_000:], given)
        assert not room[:20_000].any()


def test_messages_that_arrive_before_the_mailbox_opens_are_not_lost():
    with Wires(2) as wires:
        early = Mailbox(wires.loops[0], {1}, ACCEPTS)
        for number in range(20):
            early.send(1, Note(number), memoryview(b"x" * 1000))
        time.sleep(0.05)
        late = Mailbox(wires.loops[1], {0}, ACCEPTS)
        assert [message.message.number for message in take(late, 20)] == list(range(20))


def test_messages_and_reductions_stay_separate():
    with Wires(2) as wires:
        made = mailboxes(wires)
        flats = [torch.full((20_000,), float(rank + 1)) for rank in range(2)]
        for number in range(1, 4):
            made[0].send(1, Note(number), memoryview(b"y" * 30_000))
            under_way = [wires.start(rank, flats[rank], number=number) for rank in range(2)]
            for exchange in under_way:
                exchange.future.wait()
        assert [message.message.number for message in take(made[1], 3)] == [1, 2, 3]
        assert all(bool((flat == 12).all()) for flat in flats)


def test_sender_is_notified_when_the_kernel_has_the_message():
    with Wires(2, buffer_bytes=4096) as wires:
        one, other = mailboxes(wires)
        sent = threading.Event()
        one.send(1, Note(), memoryview(bytes(500_000)), sent.set)
        assert sent.wait(90)
        assert len(take(other)[0].payload) == 500_000


def test_receive_returns_none_if_no_message_comes_in_time():
    with Wires(2) as wires:
        one, _ = mailboxes(wires)
        assert one.receive(0.0) is None
        assert one.receive(-1.0) is None
        assert one.receive(0.01) is None


def test_a_peer_that_dies_is_named_to_the_waiting_receivers():
    with Wires(3) as wires:
        made = mailboxes(wires)
        killing = threading.Timer(0.05, wires.kill, (2,))
        killing.start()
        for mailbox in made[:2]:
            error = failure(mailbox)
            assert type(error) is PeerLost
            assert error.ranks == (2,)
            assert "rank 2 on n2" in error.message
        killing.join()


def test_messages_sent_before_a_death_are_received_first():
    with Wires(2) as wires:
        one, other = mailboxes(wires)
        one.send(1, Note(6))
        assert take(other)[0].message.number == 6  # the mailbox is open
        sent = threading.Event()
        one.send(1, Note(7), sent=sent.set)
        assert sent.wait(90)
        wires.kill(0)
        assert take(other)[0].message.number == 7
        assert failure(other).ranks == (0,)


def test_peer_that_leaves_without_a_departure_ends_the_mailbox():
    with Wires(3) as wires:
        made = mailboxes(wires, farewell=Departure)
        wires.loops[2].close()
        error = failure(made[0])
        assert error.ranks == (2,)
        assert "ended while the others were still training" in error.message


def test_peer_can_leave_after_its_departure_message_and_the_others_continue():
    with Wires(3) as wires:
        made = mailboxes(wires, farewell=Departure)
        made[2].leave([0, 1], Departure(), 90)
        wires.loops[2].close()
        assert [take(mailbox)[0].message for mailbox in made[:2]] == [Departure(), Departure()]
        time.sleep(0.05)
        made[0].send(1, Note(5))
        assert take(made[1])[0].message.number == 5
        assert made[0].receive(0.0) is None


@pytest.mark.parametrize("attempt", range(5))
def test_departure_message_is_not_lost_behind_messages_in_flight(attempt):
    """A loop that closes drops its unsent messages, so `leave` waits for the last one."""
    with Wires(2, buffer_bytes=4096) as wires:
        one, other = mailboxes(wires, farewell=Departure)
        for number in range(10):
            one.send(1, Note(number), memoryview(bytes(20_000)))
        one.leave([1], Departure(), 90)
        wires.loops[0].close()
        messages = take(other, 11)
        assert [type(message.message) for message in messages] == [Note] * 10 + [Departure]
        time.sleep(0.02)
        assert other.receive(0.0) is None


def test_leaving_does_not_wait_for_a_peer_that_is_dead():
    with Wires(2) as wires:
        one, _ = mailboxes(wires)
        wires.kill(1)
        failure(one)
        one.leave([1], Departure(), 10_000)


def test_receive_on_a_closed_loop_raises_an_error_that_says_so():
    with Wires(2) as wires:
        one, _ = mailboxes(wires)
        wires.loops[0].close()
        assert "left the group" in failure(one).message


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Unknown(), "Invalid value 'unknown'"),
        (IllTyped(), "Expected `int`, got `str`"),
        (Overfull(), "contains unknown field `more`"),
    ],
)
def test_a_message_that_is_not_accepted_ends_the_mailbox_and_names_the_sender(message, why):
    with Wires(2) as wires:
        one, other = mailboxes(wires)
        one.send(1, Note(1))
        one.send(1, message)
        error = failure(other)
        assert type(error) is Corrupt
        assert error.ranks == (0,)
        assert "rank 0 on n0 sent a message that cannot be decoded" in error.message
        assert why in error.message


@pytest.mark.parametrize(
    "raw", [b"", b"\x00" * 7, b"\x00" * 8, b"\x00" * 8 + b"\xc1", b"\x00" * 8 + b"\x91" * 100_000]
)
def test_bytes_that_are_no_message_name_the_sender(raw):
    """Too short, no header, no MessagePack, and nested too deeply."""
    with Wires(2) as wires:
        one, other = mailboxes(wires)
        one._outbox.append((1, memoryview(raw), memoryview(b""), lambda: None))
        wires.loops[0].submit(one)
        if not raw:
            one.send(1, Note())
        error = failure(other)
        assert type(error) is Corrupt
        assert error.ranks == (0,)


def test_a_header_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(mailbox_module, "MOST_HEADER_BYTES", 1000)
    with Wires(2) as wires:
        one, other = mailboxes(wires)
        one.send(1, Note(text="x" * 900))
        assert take(other)[0].message.text == "x" * 900
        one.send(1, Note(text="x" * 1000))
        assert type(failure(other)) is Corrupt


def test_a_payload_that_no_memory_can_hold_is_refused():
    with Wires(2) as wires:
        one, other = mailboxes(wires)
        header = (1 << 62).to_bytes(8, "little") + msgspec.msgpack.encode(Note())
        one._outbox.append((1, memoryview(header), memoryview(b""), lambda: None))
        wires.loops[0].submit(one)
        error = failure(other)
        assert type(error) is Corrupt
        assert "more than fit in memory" in error.message


def test_an_error_of_place_ends_the_mailbox():
    def place(peer, message, length):
        raise Corrupt(f"no room for the {length} bytes of rank {peer}")

    with Wires(2) as wires:
        one, other = mailboxes(wires, place=place)
        one.send(1, Block(0), memoryview(b"12345"))
        assert "no room for the 5 bytes of rank 0" in failure(other).message
