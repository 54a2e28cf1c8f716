"""When an operation breaks, the workers find the one at fault through the store, and agree on it."""

from __future__ import annotations

import threading
import time

import pytest
from torch._C._distributed_c10d import HashStore

from echelon.comm.meet import rendezvous
from echelon.comm.meet.rendezvous import Member, Rendezvous
from echelon.errors import PeerLost, RoundTimeout

BROKEN = RuntimeError("Connection closed by peer")
TIMED_OUT = RuntimeError("Timed out waiting 2000ms for recv operation to complete")


@pytest.fixture
def workers(monkeypatch):
    """Three workers with one store."""
    monkeypatch.setattr(rendezvous, "_ROLL_CALL_S", 0.1)
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.1)
    monkeypatch.setattr(rendezvous, "_LINGER_FAILED_S", 0.2)
    store = HashStore()
    members = tuple(Member(rank=rank, node=f"node{rank}", host="box", pid=rank) for rank in range(3))
    return [Rendezvous(store, member, members) for member in members]


def leave_with(worker, error):
    """The worker ends with an uncaught error."""
    worker.announce_departure(f"{type(error).__name__}: {error}".partition("\n")[0])


def test_the_error_names_the_failed_worker_and_its_cause(workers):
    workers[2].announce_departure("ValueError: sample 17 is broken")
    for worker in workers[:2]:
        error = worker.explain(BROKEN, deadline_s=2)
        assert type(error) is PeerLost
        assert error.ranks == (2,)
        assert "rank 2 on node2 failed: ValueError: sample 17 is broken" in error.message


def test_the_error_names_the_first_of_two_failures(workers):
    workers[2].announce_departure("ValueError: first")
    workers[0].announce_departure("ValueError: second")
    assert "ValueError: first" in workers[1].explain(BROKEN, deadline_s=2).message


def test_a_worker_that_failed_because_of_another_is_not_blamed(workers):
    workers[2].announce_departure("ValueError: sample 17 is broken")
    leave_with(workers[0], workers[0].explain(BROKEN, deadline_s=2))
    error = workers[1].explain(BROKEN, deadline_s=2)
    assert error.ranks == (2,)
    assert "rank 2 on node2 failed: ValueError" in error.message


def test_a_worker_that_ended_early_is_blamed_though_others_failed_later(workers):
    workers[2].announce_departure()
    leave_with(workers[0], workers[0].explain(BROKEN, deadline_s=2))
    error = workers[1].explain(BROKEN, deadline_s=2)
    assert type(error) is PeerLost
    assert error.ranks == (2,)
    assert "rank 2 on node2 ended while the others were still training" in error.message


@pytest.mark.parametrize(
    ("seen", "kind"), [(TIMED_OUT, RoundTimeout), (BROKEN, PeerLost)], ids=["late", "gone"]
)
def test_workers_blame_the_same_silent_worker(workers, seen, kind):
    workers[1].store.set("here/1", "1")  # rank 1 is present
    first = workers[0].explain(seen, deadline_s=2)
    assert type(first) is kind
    assert first.ranks == (2,)
    leave_with(workers[0], first)
    second = workers[1].explain(BROKEN, deadline_s=2)
    assert (type(second), second.ranks, second.message) == (kind, (2,), first.message)


def test_a_leader_that_failed_stays_until_the_others_know_why_but_for_those_that_it_knows_to_be_lost(
    workers, monkeypatch
):
    monkeypatch.setattr(rendezvous, "_LINGER_FAILED_S", 90.0)
    error = workers[0].explain(BROKEN, deadline_s=2)
    assert error.ranks == (1, 2)
    workers[0].reasons[:] = [PeerLost("rank 2 died", ranks=(2,))]
    workers[0].announce_departure("PeerLost: rank 2 died")
    leader = threading.Thread(target=workers[0].linger)
    leader.start()
    time.sleep(0.3)
    assert leader.is_alive(), "rank 1 has not asked"
    assert workers[1].explain(BROKEN, deadline_s=2).ranks == (2,)
    leader.join(60)
    assert not leader.is_alive()


def test_the_leader_lingers_for_a_bounded_time(workers):
    workers[0].announce_departure("ValueError: it was me")
    workers[0].linger()  # nobody reads, and it still returns
    for worker in workers[1:]:
        assert "it was me" in worker.explain(BROKEN, deadline_s=2).message
