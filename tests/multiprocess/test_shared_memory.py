"""Operations between workers of one machine in shared memory: messages, groups of some workers, faults."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import echelon
from echelon.errors import ConfigError, EchelonError, MismatchedCalls, PeerLost, RoundTimeout
from warm import WorkerFailure, wait_for

SHORT_S = 3.0
TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
LENGTHS = [0, 1, 2048, 2049, 16_384, 70_000, 1_100_000]


def join(transport="shm", deadline_s=90.0):
    return echelon.join(record=False, transport=transport, round_timeout_s=deadline_s, timeout_s=90)


def attempt(act):
    try:
        return act()
    except EchelonError as error:
        return error


def made(sender, receiver, length, dtype=torch.float32):
    numbers = torch.arange(length) % 7 + sender * 8 + receiver
    return numbers.to(dtype)


# Messages between two workers ----------------------------------------------------------------------


def messages(transport):
    with join(transport) as session:
        group, rank = session._group, session.rank
        after, before = (rank + 1) % group.size, (rank - 1) % group.size
        out = []
        for length in LENGTHS:
            for dtype in TYPES if length < 3000 else TYPES[:1]:
                into = torch.zeros(length, dtype=dtype)
                sending = group.send(made(rank, after, length, dtype), after)
                found = group.receive(into, before).wait()
                sending.wait()
                out.append(found is into and torch.equal(into, made(before, rank, length, dtype)))
        turned = torch.zeros(3, 2).t()
        pending = group.receive(turned, before, tag=3)
        group.send(made(rank, after, 6).view(3, 2).t(), after, tag=3).wait()
        out.append(torch.equal(pending.wait(), made(before, rank, 6).view(3, 2).t()))
        return out


def many_at_once(transport):
    """More messages than a ring or the blocks hold, of several tags, received in another order."""
    with join(transport) as session:
        group, rank = session._group, session.rank
        peers = [peer for peer in range(group.size) if peer != rank]
        lengths = [10, 50_000, 0, 3_000_000, 2000] * 6
        sending = [
            group.send(made(rank, peer, length) + turn, peer, tag=turn % 2)
            for turn, length in enumerate(lengths)
            for peer in peers
        ]
        wanted = []
        for parity in (1, 0):
            for turn, length in enumerate(lengths):
                if turn % 2 == parity:
                    for peer in peers:
                        into = torch.zeros(length)
                        wanted.append((turn, peer, into, group.receive(into, peer, tag=parity)))
        group.barrier()
        good = []
        for turn, peer, into, pending in reversed(wanted):
            pending.wait()
            good.append(torch.equal(into, made(peer, rank, into.numel()) + turn))
        for one in sending:
            one.wait()
        return all(good), len(good)


def sent_and_left(length):
    """Rank 0 leaves as soon as it has sent; rank 1 receives later."""
    with join() as session:
        group = session._group
        if session.rank == 0:
            group.send(made(0, 1, length), 1).wait()
            return True
        time.sleep(0.5)
        into = torch.zeros(length)
        group.receive(into, 0).wait()
        return torch.equal(into, made(0, 1, length))


def wrong_messages():
    with join() as session:
        group, peer = session._group, 1 - session.rank
        one = torch.ones(1)
        out = [attempt(lambda: group.send(one, 7)), attempt(lambda: group.send(one, peer, -1))]
        if session.rank == 0:
            group.send(torch.ones(3), 1).wait()
            out.append(None)
        else:
            out.append(attempt(lambda: group.receive(torch.zeros(4), 0).wait()))
        group.send(torch.ones(2), peer).wait()
        out.append(group.receive(torch.zeros(2), peer).wait().tolist())
        return out


@pytest.mark.parametrize("transport", ["shm", "tcp", "c10d"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_message_of_any_length_and_type_arrives(warm_pool, transport, size):
    for out in warm_pool.run(size, messages, transport):
        assert all(out)


@pytest.mark.parametrize("transport", ["shm", "tcp", "c10d"])
def test_messages_of_a_tag_keep_their_order_whatever_the_order_of_waits(warm_pool, transport):
    assert warm_pool.run(3, many_at_once, transport) == [(True, 60)] * 3


@pytest.mark.parametrize("length", [10, 5_000_000])
def test_a_message_arrives_although_its_sender_has_left(warm_pool, length):
    assert warm_pool.run(2, sent_and_left, length) == [True, True]


def test_a_message_of_another_length_is_refused_and_the_next_one_arrives(warm_pool):
    first, second = warm_pool.run(2, wrong_messages)
    for out in (first, second):
        assert [type(error) for error in out[:2]] == [ConfigError] * 2
        assert out[3] == [1, 1]
    assert type(second[2]) is MismatchedCalls
    assert "rank 0 sent 12 bytes, and rank 1 expects 16" in second[2].message


# Groups of some workers ----------------------------------------------------------------------------


def nested():
    with join() as session:
        group, rank = session._group, session.rank
        out = {}
        some = group.subgroup([3, 1, 2])
        if some is not None:
            inner = some.subgroup([0, 2])
            own = torch.full((5000,), float(rank))
            out["sum"] = some.all_reduce(own).wait()[0].item()
            out["gathered"] = [int(one) for one in some.all_gather(torch.tensor(rank))]
            block = some.reduce_scatter(torch.full((30_000,), float(rank)), [10_000] * 3).wait()
            out["block"] = (block.numel(), block.unique().tolist())
            told = torch.tensor([rank])
            some.broadcast(told, 1)
            out["told"] = told.item()
            shapes = some.all_gather_any(torch.full((some.rank, 2), rank))
            out["any"] = [(list(one.shape), one.unique().tolist()) for one in shapes]
            after, before = (some.rank + 1) % 3, (some.rank - 1) % 3
            sending = some.send(torch.tensor([rank]), after)
            out["from"] = some.receive(torch.zeros(1, dtype=torch.int64), before).wait().item()
            sending.wait()
            if inner is not None:
                out["inner"] = (inner.ranks, inner.all_reduce(torch.tensor([rank])).wait().item())
        group.barrier()
        return out


def test_groups_of_some_workers_also_nested_exchange_in_shared_memory(warm_pool):
    outs = warm_pool.run(4, nested)
    assert outs[0] == {}
    order = [3, 1, 2]
    for rank, out in enumerate(outs[1:], 1):
        at = order.index(rank)
        assert out["sum"] == 6
        assert out["gathered"] == order
        assert out["block"] == (10_000, [6])
        assert out["told"] == 1
        assert out["any"] == [([0, 2], []), ([1, 2], [1]), ([2, 2], [2])]
        assert out["from"] == order[at - 1]
        if at != 1:
            assert out["inner"] == ((3, 2), 5)


# Faults --------------------------------------------------------------------------------------------

LONG = 2_000_000
WAITS = {
    "all_reduce": lambda group, peer: group.all_reduce(torch.ones(10)).wait(),
    "long all_reduce": lambda group, peer: group.all_reduce(torch.ones(LONG)).wait(),
    "all_gather": lambda group, peer: group.all_gather(torch.ones(10)),
    "all_gather_any": lambda group, peer: group.all_gather_any(torch.ones(group.rank, 2)),
    "broadcast": lambda group, peer: group.broadcast(torch.ones(LONG), peer),
    "reduce_scatter": lambda group, peer: group.reduce_scatter(torch.ones(30), [10] * 3).wait(),
    "barrier": lambda group, peer: group.barrier(),
    "receive": lambda group, peer: group.receive(torch.ones(10), peer).wait(),
    "all_to_all": lambda group, peer: group.all_to_all([torch.ones(9).byte()] * 3).received.wait(),
}


def killed_while_others_wait(what, who):
    with join() as session:
        group = session._group
        for _ in range(3):
            group.barrier()
        if session.rank == who:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        error = attempt(lambda: WAITS[what](group, who))
        seconds = time.monotonic() - begun
        again = attempt(group.barrier)
        wait_for(2)
        return error, again, seconds


def stopped_while_others_wait(what, who):
    with join() as session:
        group = session._group
        pids = [int(pid) for pid in group.all_gather(torch.tensor(os.getpid()))]
        group.barrier()
        group._engine.deadline_s = SHORT_S
        if session.rank == who:
            os.kill(os.getpid(), signal.SIGSTOP)
            return None
        error = attempt(lambda: WAITS[what](group, who))
        wait_for(2)
        if session.rank == (who + 1) % 3:
            os.kill(pids[who], signal.SIGCONT)
        return error


def different_operations():
    with join() as session:
        group = session._group
        if session.rank == 1:
            return attempt(lambda: group.all_gather(torch.ones(5)))
        return attempt(lambda: group.all_reduce(torch.ones(5)).wait())


def timed_out_and_tried_again():
    """A timeout of the script leaves the operation in flight."""
    with join() as session:
        group = session._group
        if session.rank == 1:
            wait_for(2)
        pending = [group.all_reduce(torch.ones(3)), group.receive(torch.zeros(3), 1 - session.rank)]
        errors = []
        if session.rank == 0:
            errors = [attempt(lambda one=one: one.wait(timeout_s=0.2)) for one in pending]
            wait_for(1)
        group.send(torch.full((3,), 5.0), 1 - session.rank).wait()
        return errors, [one.wait().tolist() for one in pending]


@pytest.mark.parametrize("what", WAITS)
def test_workers_that_wait_name_a_killed_worker_at_once_and_nothing_is_left(warm_pool, what):
    outcomes = warm_pool.outcomes(3, killed_while_others_wait, what, 1)
    assert isinstance(outcomes[1], WorkerFailure)
    for error, again, seconds in (outcomes[0], outcomes[2]):
        for one in (error, again):
            assert type(one) is PeerLost, one
            assert one.ranks == (1,)
            assert "rank 1 on " in one.message
        assert seconds < 60, "not at the deadline"


@pytest.mark.parametrize("what", ["all_reduce", "receive"])
def test_workers_that_wait_name_a_stopped_worker_at_their_deadline(warm_pool, what):
    outcomes = warm_pool.outcomes(3, stopped_while_others_wait, what, 1)
    for error in (outcomes[0], outcomes[2]):
        assert type(error) is RoundTimeout, error
        assert error.ranks == (1,)


def test_workers_in_different_operations_all_raise(warm_pool):
    for error in warm_pool.run(3, different_operations):
        assert type(error) is MismatchedCalls
        assert "rank 1" in error.message
        assert "all_gather" in error.message


def test_an_operation_stays_in_flight_after_a_timeout_of_the_script(warm_pool):
    first, second = warm_pool.run(2, timed_out_and_tried_again)
    assert [type(error) for error in first[0]] == [RoundTimeout] * 2
    assert [error.ranks for error in first[0]] == [(1,)] * 2
    assert first[1] == second[1] == [[2.0] * 3, [5.0] * 3]


# Storage -------------------------------------------------------------------------------------------


def storages():
    with join() as session:
        group, peer = session._group, 1 - session.rank
        tensors = [torch.ones(100) for _ in range(5)]
        group.all_reduce(tensors[0]).wait()
        group.broadcast(tensors[1])
        group.all_gather(tensors[2])
        sending = group.send(tensors[3], peer)
        group.receive(tensors[4], peer).wait()
        sending.wait()
        return [tensor.untyped_storage().resizable() for tensor in tensors]


def test_operations_leave_the_storage_of_a_tensor_resizable(warm_pool):
    assert warm_pool.run(2, storages) == [[True] * 5] * 2
