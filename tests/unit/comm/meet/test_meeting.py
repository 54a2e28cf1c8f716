"""When an operation breaks, those who met find out in the store who is to blame, and agree on it."""

from __future__ import annotations

import pytest
from torch._C._distributed_c10d import HashStore

from echelon.comm.meet import rendezvous
from echelon.comm.meet.rendezvous import Meeting, Member
from echelon.errors import PeerLost, RoundTimeout

BROKEN = RuntimeError("Connection closed by peer")
TIMED_OUT = RuntimeError("Timed out waiting 2000ms for recv operation to complete")


@pytest.fixture
def workers(monkeypatch):
    """Three workers, each as it sees the same store."""
    monkeypatch.setattr(rendezvous, "_ROLL_CALL_S", 0.1)
    monkeypatch.setattr(rendezvous, "_LINGER_S", 0.1)
    store = HashStore()
    members = tuple(Member(rank=rank, node=f"node{rank}", host="box", pid=rank) for rank in range(3))
    return [Meeting(store, member, members) for member in members]


def goes_of(worker, error):
    """A worker ends with an error that nobody catches."""
    worker.say_goodbye(f"{type(error).__name__}: {error}".partition("\n")[0])


def test_a_failure_is_told_with_its_cause(workers):
    workers[2].say_goodbye("ValueError: sample 17 is broken")
    for worker in workers[:2]:
        error = worker.explain(BROKEN, deadline_s=2)
        assert type(error) is PeerLost
        assert error.ranks == (2,)
        assert "rank 2 on node2 failed: ValueError: sample 17 is broken" in error.message


def test_the_first_of_two_failures_is_told(workers):
    workers[2].say_goodbye("ValueError: first")
    workers[0].say_goodbye("ValueError: second")
    assert "ValueError: first" in workers[1].explain(BROKEN, deadline_s=2).message


def test_who_failed_because_of_another_is_not_blamed(workers):
    workers[2].say_goodbye("ValueError: sample 17 is broken")
    goes_of(workers[0], workers[0].explain(BROKEN, deadline_s=2))
    error = workers[1].explain(BROKEN, deadline_s=2)
    assert error.ranks == (2,)
    assert "rank 2 on node2 failed: ValueError" in error.message


def test_who_left_early_is_blamed_also_when_others_have_failed_of_it(workers):
    workers[2].say_goodbye()
    goes_of(workers[0], workers[0].explain(BROKEN, deadline_s=2))
    error = workers[1].explain(BROKEN, deadline_s=2)
    assert type(error) is PeerLost
    assert error.ranks == (2,)
    assert "rank 2 on node2 ended while the others were still training" in error.message


@pytest.mark.parametrize(
    ("seen", "kind"), [(TIMED_OUT, RoundTimeout), (BROKEN, PeerLost)], ids=["late", "gone"]
)
def test_what_one_found_out_about_a_silent_worker_the_next_one_repeats(workers, seen, kind):
    workers[1].store.set("here/1", "1")  # it is there, and will ask in a moment
    first = workers[0].explain(seen, deadline_s=2)
    assert type(first) is kind
    assert first.ranks == (2,)
    goes_of(workers[0], first)
    second = workers[1].explain(BROKEN, deadline_s=2)
    assert (type(second), second.ranks, second.message) == (kind, (2,), first.message)


def test_a_leader_waits_a_moment_for_others_to_read_and_no_longer(workers):
    workers[0].say_goodbye("ValueError: it was me")
    workers[0].linger()  # nobody reads: it ends by itself
    for worker in workers[1:]:
        assert "it was me" in worker.explain(BROKEN, deadline_s=2).message
