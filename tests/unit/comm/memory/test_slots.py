"""Operations through slots, and messages through rings, with threads as workers."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from echelon.comm.group import CallsDiffer
from echelon.comm.memory import blocks
from echelon.comm.memory.collectives import Barrier, Gather, LargeReduce, Scatter, SmallReduce
from echelon.comm.memory.pairs import Incoming, Outgoing, PairRings
from echelon.comm.memory.slots import SLOT_BYTES, SlotTeam
from echelon.errors import LaunchError, PeerLost, RoundTimeout
from wires import values

COMBINED = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class Threads:
    """Workers that share one memory."""

    def __init__(self, size):
        self.size = size
        self.memory = torch.zeros(SlotTeam.size_bytes(size), dtype=torch.uint8)
        self.lost = None
        self.names = [f"rank {rank} on n" for rank in range(size)]

    def check(self, ranks=None):
        if self.lost is not None:
            raise self.lost

    def team(self, rank):
        return SlotTeam(
            rank, range(self.size), self.names, self.memory, check=self.check, mismatch=AssertionError
        )

    def run(self, act):
        found = [None] * self.size

        def work(rank):
            try:
                found[rank] = act(rank, self.team(rank))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def done(team, work):
    team.begin(work)
    team.finish(work, 60)


def right(found):
    for one in found:
        if isinstance(one, Exception):
            raise one
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_gathers_and_parts_of_any_length_and_type_are_right(size):
    cases = [
        (length, dtype, op)
        for length in (0, 1, 7, 4097, 300_001)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        for op in (COMBINED if length < 100 else ["sum"])
    ]

    def act(rank, team):
        out = []
        for seed, (length, dtype, op) in enumerate(cases):
            own = values(rank, length, dtype, seed)
            kind = SmallReduce if own.numel() * own.element_size() <= SLOT_BYTES else LargeReduce
            flat = own.clone()
            done(team, kind(team, flat, op))
            lengths = [length // size] * (size - 1)
            lengths.append(length - sum(lengths))
            part = own.clone()
            done(team, Scatter(team, part, lengths, op))
            mine = torch.split(part, lengths)[rank].clone()
            buffer = torch.zeros(size * length, dtype=dtype)
            buffer[rank * length : (rank + 1) * length] = own
            done(team, Gather(team, buffer, [length * own.element_size()] * size))
            out.append((flat, mine, buffer))
        return out

    results = right(Threads(size).run(act))
    for seed, (length, dtype, op) in enumerate(cases):
        inputs = torch.stack([values(rank, length, dtype, seed) for rank in range(size)])
        expected = COMBINED[op](inputs.to(torch.float64), 0).to(dtype)
        for flat, _, buffer in (out[seed] for out in results):
            assert torch.equal(flat, expected), (length, dtype, op)
            assert torch.equal(buffer, inputs.view(-1)), (length, dtype)
        assert torch.equal(torch.cat([out[seed][1] for out in results]), expected), (length, dtype, op)


def test_operations_in_flight_end_in_order_whatever_the_order_of_waits():
    def act(rank, team):
        works = [SmallReduce(team, torch.full((3,), float(rank + n)), "sum") for n in range(20)]
        works[7:7] = [LargeReduce(team, torch.full((200_000,), float(rank)), "sum")]
        for work in works:
            team.begin(work)
        for work in reversed(works) if rank else works:
            team.finish(work, 60)
        return [work._flat.unique().tolist() for work in works]

    sums = [[3.0 + 3 * n] for n in range(20)]
    sums[7:7] = [[3.0]]
    assert right(Threads(3).run(act)) == [sums] * 3


def test_different_calls_are_raised_by_all_and_the_next_operation_works():
    def act(rank, team):
        kind = LargeReduce(team, torch.ones(1_000_000), "sum", call=1) if rank else Barrier(call=2)
        with pytest.raises(CallsDiffer) as caught:
            done(team, kind)
        flat = torch.ones(2)
        done(team, SmallReduce(team, flat, "sum", call=5))
        return caught.value.calls, flat.tolist()

    assert right(Threads(3).run(act)) == [((2, 1, 1), [3.0, 3.0])] * 3


def test_different_operations_without_a_call_of_the_script_are_an_error_for_all():
    def act(rank, team):
        done(team, Barrier() if rank else SmallReduce(team, torch.ones(3), "sum"))

    for error in Threads(2).run(act):
        assert isinstance(error, AssertionError)
        assert str(error) == (
            "rank 0 takes part in all_reduce of 12 bytes, rank 1 takes part in barrier of 0 bytes"
        )


@pytest.mark.parametrize("gone", [True, False])
def test_a_missing_worker_is_named_and_the_team_does_not_go_on(gone):
    cluster = Threads(3)
    if gone:
        cluster.lost = PeerLost("rank 2 on n is gone", ranks=(2,))

    def act(rank, team):
        if rank == 2:
            return None
        errors = []
        for _ in range(2):
            work = Barrier()
            team.begin(work)
            try:
                team.finish(work, 60 if gone else 0.05)
            except (PeerLost, RoundTimeout) as error:
                errors.append(error)
        return errors

    for errors in right(cluster.run(act))[:2]:
        assert [type(error) for error in errors] == [PeerLost if gone else RoundTimeout] * 2
        assert errors[0].ranks == (2,)


# Rings -------------------------------------------------------------------------------------------


def two():
    memory = torch.zeros(PairRings.size_bytes(2), dtype=torch.uint8)
    return [PairRings(rank, [os.getpid()] * 2, memory) for rank in range(2)]


def test_a_full_ring_keeps_messages_until_the_receiver_has_taken_some():
    one, other = two()
    sent = [Outgoing(torch.full((3,), float(n)), (1, 0), [1]) for n in range(30)]
    for message in sent:
        one.send(message)
    assert [message.done for message in sent] == [True] * 8 + [False] * 22
    found = []
    for _ in range(30):
        incoming = Incoming(0, (1, 0), torch.zeros(3))
        other.want(incoming)
        while not other.receive(incoming):
            one.advance()
        found.append(incoming.tensor[0].item())
    assert found == list(range(30))
    assert not one.unread(1)
    one.close()


def test_blocks_are_used_again_and_bounded(monkeypatch):
    monkeypatch.setattr(blocks, "_TOTAL_BYTES", 256 * 1024)
    one, other = two()
    sent = [Outgoing(torch.full((100_000,), n, dtype=torch.uint8), (1, 0), [1]) for n in range(5)]
    for message in sent:
        one.send(message)
    assert [message.done for message in sent] == [True] * 2 + [False] * 3
    for n in range(5):
        incoming = Incoming(0, (1, 0), None)
        other.want(incoming)
        while not other.receive(incoming):
            one.advance()
        assert incoming.tensor.unique().tolist() == [n]
    assert len(one._pool._blocks) == 2
    one.close()


def test_a_message_without_room_for_a_block_has_an_error(monkeypatch):
    one, _ = two()

    def full(size_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks, "make", full)
    message = Outgoing(torch.zeros(60_000), (1, 0), [1])
    one.send(message)
    assert isinstance(message.error, LaunchError)
    assert "No space left" in message.error.message
