"""Several workers on each of several machines, real processes: memory inside a machine, TCP across.

The machines are emulated by node names: workers of different nodes share no memory and talk over TCP.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet
from echelon.comm.memory import segment
from echelon.comm.open import open_group
from echelon.errors import EchelonError, PeerLost, RoundTimeout
from warm import WorkerFailure, wait_for
from wires import values

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]
LENGTHS = [1, 3, 1000, 300_001]
LARGE = 1_200_000
SHORT_S = 5.0
PAIRS = [0, 0, 1, 1]  # each rank's machine

every_layout = pytest.mark.parametrize(
    "places",
    [[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 2]],
    ids=["2+2", "3+1", "1+2+1"],
)


class member:  # noqa: N801 - reads as what it gives
    """A worker's group, on the machine that `places` gives its rank."""

    def __init__(self, places, *, collective="auto", deadline_s=90.0, transport="auto"):
        place = Place.from_environment(os.environ)
        node = f"machine-{places[place.rank]}"
        self._rendezvous = meet(place, node=node, host=socket.gethostname(), pid=os.getpid(), timeout_s=90)
        self._group = open_group(
            self._rendezvous,
            place,
            transport=transport,
            collective=collective,
            deadline_s=deadline_s,
            timeout_s=90,
        )

    def __enter__(self):
        return self._group

    def __exit__(self, kind, error, trace):
        self._rendezvous.announce_departure(str(error) if error else "")
        self._group.close()


def attempt(act):
    """The result or error of a call, and its duration."""
    begun = time.monotonic()
    try:
        result = act()
    except EchelonError as error:
        result = error
    return result, time.monotonic() - begun


def rail_threads():
    return [thread for thread in threading.enumerate() if thread.name == "echelon-rails"]


def noise(rank, length, dtype):
    """Numbers whose sum depends on the order in which they are added."""
    made = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    return (made * 10.0**rank).to(dtype)


def digest(tensor):
    return hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest()


# Sums --------------------------------------------------------------------------------------------


def reductions(places):
    out, bits = {}, []
    with member(places) as group:
        for dtype in DTYPES:
            for length in LENGTHS:
                buffer = group.buffer(length, dtype, CPU)
                assert group._team.holds(buffer)
                buffer.copy_(values(group.rank, length, dtype))
                result = group.all_reduce(buffer).wait()
                assert result is buffer
                out[dtype, length] = buffer.clone()
                group.release(buffer)
        for op in ("max", "min"):
            buffer = group.buffer(50, torch.float32, CPU).copy_(values(group.rank, 50))
            group.all_reduce(buffer, op).wait()
            out[op] = buffer.clone()
        for dtype in (torch.float32, torch.bfloat16):
            for length in (9, LARGE):
                buffer = group.buffer(length, dtype, CPU)
                buffer.copy_(noise(group.rank, length, dtype))
                pending = group.all_reduce(buffer)
                pending.wait()
                timing = pending.timing
                assert 0 < timing.begun <= timing.sent <= timing.ended
                bits.append(digest(buffer))
        plain = torch.full((LARGE,), float(group.rank))
        group.all_reduce(plain).wait()
        out["plain"] = plain.unique().tolist()
        out["adding"] = timing.adding_s > 0
        out["sent"] = group.sent_bytes(buffer) / buffer.element_size() / LARGE
        assert rail_threads()
    return out, bits, len(rail_threads())


@every_layout
def test_buffers_of_every_type_and_length_are_summed_to_the_same_bits_everywhere(warm_pool, places):
    results = warm_pool.run(4, reductions, places)
    for out, bits, threads in results:
        for dtype in DTYPES:
            for length in LENGTHS:
                expected = sum(values(rank, length, torch.float64) for rank in range(4)).to(dtype)
                assert torch.equal(out[dtype, length], expected), (dtype, length)
        inputs = torch.stack([values(rank, 50) for rank in range(4)])
        assert torch.equal(out["max"], inputs.amax(0))
        assert torch.equal(out["min"], inputs.amin(0))
        assert out["plain"] == [6]
        assert bits == results[0][1]
        assert threads == 0, "after close"
    rails = min(places.count(place) for place in places)
    machines = len(set(places))
    for rank, (out, _, _) in enumerate(results):
        carries = places[:rank].count(places[rank]) < rails
        expected = 2 * (machines - 1) / machines / rails if carries else 0
        assert out["sent"] == pytest.approx(expected, rel=1e-3), "what crosses to other machines"
        assert out["adding"] == carries


# At once -----------------------------------------------------------------------------------------


def at_once(places, collective):
    """Several reductions in flight on two forks, between other operations, waited for in any order."""
    wrong = []
    with member(places, collective=collective) as group:
        forks = [group, group.fork()]
        lengths = [10, 30_000, 600_000, 1]
        buffers = [(fork, fork.buffer(n, torch.float32, CPU)) for fork in forks for n in lengths]
        for turn in range(6):
            for n, (_, buffer) in enumerate(buffers):
                buffer.fill_(group.rank + n + turn)
            begun = [fork.all_reduce(buffer, priority=-n) for n, (fork, buffer) in enumerate(buffers)]
            group.barrier()
            order = torch.randperm(len(begun), generator=torch.Generator().manual_seed(group.rank + turn))
            for n in order.tolist():
                begun[n].wait()
                found = buffers[n][1].unique().tolist()
                if found != [6 + 4 * (n + turn)] or not begun[n].done():
                    wrong.append((turn, n, found))
        forks[1].close()
        between = len(rail_threads())
        group.all_reduce(buffers[0][1].fill_(1)).wait()
        return wrong, between, buffers[0][1].unique().tolist()


@pytest.mark.parametrize(("places", "collective"), [(PAIRS, "auto"), ([0, 1, 1, 2], "ring")])
def test_reductions_in_flight_can_be_waited_for_in_any_order(warm_pool, places, collective):
    assert warm_pool.run(4, at_once, places, collective) == [([], 1, [4])] * 4


# Losses ------------------------------------------------------------------------------------------


def killed(places, who):
    with member(places) as group:
        buffers = [group.buffer(LARGE, torch.float32, CPU) for _ in range(3)]
        group.barrier()
        pending = [group.all_reduce(buffer) for buffer in buffers]
        if group.rank == who:
            pending[0].wait()
            os.kill(os.getpid(), signal.SIGKILL)
        error, _ = attempt(lambda: [one.wait() for one in [*pending, group.all_reduce(buffers[0])]])
        again, _ = attempt(lambda: group.all_reduce(buffers[1]).wait())
        wait_for(group.size - 1)
        return error, again


@pytest.mark.parametrize(("places", "who"), [(PAIRS, 0), ([0, 0, 0, 1], 2)])
def test_survivors_name_a_worker_killed_in_a_reduction_at_once(warm_pool, places, who):
    """Includes a worker that is no rail, and survivors on other machines."""
    outcomes = warm_pool.outcomes(4, killed, places, who)
    dead = outcomes.pop(who)
    assert isinstance(dead, WorkerFailure)
    assert dead.how == "died"
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        error, again = outcome
        for one in (error, again):
            assert type(one) is PeerLost, "at once, and not at the deadline"
            assert one.ranks == (who,)
            assert f"rank {who} on machine-{places[who]}" in one.message


def stopped(places, who):
    """The stopped worker continues after all others have raised their error."""
    with member(places) as group:
        pids = [int(pid) for pid in group.all_gather(torch.tensor(os.getpid()))]
        buffer = group.buffer(LARGE, torch.float32, CPU)
        group.barrier()
        group._engine.deadline_s = group._rails._deadline_s = SHORT_S  # not while all join
        if group.rank == who:
            os.kill(os.getpid(), signal.SIGSTOP)
        error, seconds = attempt(lambda: group.all_reduce(buffer).wait())
        if group.rank == who:
            return error, seconds
        wait_for(group.size - 1)
        if group.rank == (who + 1) % 4:
            os.kill(pids[who], signal.SIGCONT)
        return error, seconds


def test_all_others_name_a_stopped_worker_at_the_deadline(warm_pool):
    places, who = [0, 0, 0, 1], 2
    outcomes = warm_pool.outcomes(4, stopped, places, who)
    error, _ = outcomes.pop(who)
    assert isinstance(error, PeerLost), "it finds the others gone, or hears that they gave up on it"
    for error, seconds in outcomes:
        assert type(error) is RoundTimeout
        assert error.ranks == (who,)
        assert f"rank {who} on machine-{places[who]} did not arrive within {SHORT_S:g} s" in error.message
        assert seconds >= SHORT_S


def closed_in_a_reduction(places):
    """Rank 0 is never ready; the others close while they wait."""
    with member(places) as group:
        buffer = group.buffer(1000, torch.float32, CPU)
        group.barrier()
        found = []
        if group.rank:
            pending = group.all_reduce(buffer)
            waiter = threading.Thread(target=lambda: found.append(attempt(pending.wait)))
            waiter.start()
            time.sleep(0.1)
            group.close()
            waiter.join()
    return [type(error) for error, _ in found], len(rail_threads())


def test_closing_in_a_reduction_ends_it_at_once_and_leaves_no_thread(warm_pool):
    first, *others = warm_pool.run(4, closed_in_a_reduction, PAIRS)
    assert first == ([], 0)
    assert others == [([PeerLost], 0)] * 3


# Where it is not used ----------------------------------------------------------------------------


def without_rails(places, who, options):
    """The warnings of all workers, and their results."""
    folder, said = segment.FOLDER, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("echelon").addHandler(handler)
    if int(os.environ["RANK"]) == who:
        segment.FOLDER = Path("/nonexistent/shm")
    try:
        with member(places, **options) as group:
            fork = group.fork()
            buffer = fork.buffer(1000, torch.float32, CPU).fill_(group.rank)
            fork.all_reduce(buffer).wait()
            shared = fork._team is not None and fork._team.holds(buffer)
            return buffer.unique().tolist(), shared, len(rail_threads()), said
    finally:
        segment.FOLDER = folder
        logging.getLogger("echelon").removeHandler(handler)


@pytest.mark.parametrize("who", [2, 3])
def test_all_workers_use_tcp_and_warn_if_one_machine_has_no_shared_memory(warm_pool, who):
    """Rank 2 makes the board of its machine, rank 3 buffers only."""
    results = warm_pool.run(4, without_rails, PAIRS, who, {})
    for total, *plain, said in results:
        assert total == [6]
        assert plain == [False, 0]
        assert len(said) <= 1, "once, and not for every fork"
    for rank in (0, who):
        assert "TCP instead" in results[rank][-1][0]
    assert "no room" in results[who][-1][0]


@pytest.mark.parametrize(
    ("places", "options", "warned"),
    [
        ([0, 1, 2, 3], {}, ""),
        (PAIRS, {"transport": "tcp"}, ""),
        (PAIRS, {"collective": "ps(servers=3)"}, "ps has 3 servers"),
    ],
    ids=["a machine each", "tcp", "a collective that is not for so few"],
)
def test_tcp_is_used_where_rails_cannot_be(warm_pool, places, options, warned):
    results = warm_pool.run(4, without_rails, places, None, options)
    for total, *plain, said in results:
        assert total == [6]
        assert plain == [False, 0]
        assert warned or not said
    assert warned in " ".join(results[0][-1])


# Ranks that were dealt out in turn ---------------------------------------------------------------


def crossing(places, collective):
    """How much this worker sends to other machines, as a part of the buffer, and a sum over TCP."""
    with member(places, collective=collective, transport="tcp") as group:
        steps = group._schedule(LARGE)
        far = sum(
            move.length for step in steps for move in step.sends if places[move.peer] != places[group.rank]
        )
        summed = torch.full((LARGE,), float(group.rank))
        group.all_reduce(summed).wait()
        return far / LARGE, summed.unique().tolist()


@pytest.mark.parametrize("collective", ["ring", "hierarchical(sizes=[2,2])"])
def test_ranks_that_alternate_between_machines_cross_as_little_as_neighbours(warm_pool, collective):
    alternating = warm_pool.run(4, crossing, [0, 1, 0, 1], collective)
    neighbours = warm_pool.run(4, crossing, PAIRS, collective)
    assert [total for _, total in alternating] == [[6]] * 4
    assert sum(far for far, _ in alternating) == pytest.approx(sum(far for far, _ in neighbours))
    assert sum(far for far, _ in neighbours) < 4, "not everything crosses"
