import itertools
import signal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import GradientError
from echelon.start.failure import Failure, alike, decide, first, from_error, from_exit


def _failure(rank: int, t: float, *, consequence: bool = False, message: str = "") -> Failure:
    message = message or f"reason {rank}"
    return Failure(rank=rank, t=t, kind="ValueError", message=message, consequence=consequence)


def test_no_first_failure_without_failures():
    assert first([]) is None


def test_the_earliest_failure_is_named():
    assert first([_failure(2, 5.0), _failure(0, 4.0), _failure(1, 6.0)]).rank == 0


def test_of_workers_with_the_same_error_the_lowest_rank_is_named_and_the_others_are_counted():
    same = [_failure(rank, t, message="x") for rank, t in ((3, 1.0), (1, 2.0), (2, 3.0))]
    others = [_failure(0, 4.0), _failure(4, 0.0, message="x", consequence=True)]
    found = first([*same, *others])
    assert found.rank == 1
    assert alike(found, [*others, *same]) == (2, 3)
    assert alike(others[0], [*others, *same]) == ()


def test_workers_that_were_killed_are_not_taken_for_one():
    assert first([from_exit(1, -9, 2.0), from_exit(2, -9, 1.0)]).rank == 2


def test_a_worker_that_failed_because_of_another_is_not_named_though_it_ended_earlier():
    assert first([_failure(0, 1.0, consequence=True), _failure(1, 2.0)]).rank == 1


def test_earliest_of_several_consequences_is_named():
    failures = [_failure(0, 2.0, consequence=True), _failure(1, 1.0, consequence=True)]
    assert first(failures).rank == 1


@given(
    st.lists(
        st.tuples(st.floats(0, 9), st.booleans()), min_size=1, max_size=4, unique_by=lambda one: one[0]
    )
)
def test_the_order_in_which_failures_are_found_does_not_matter(told):
    failures = [_failure(rank, t, consequence=c) for rank, (t, c) in enumerate(told)]
    assert len({first(order) for order in itertools.permutations(failures)}) == 1


def test_the_cause_is_one_line_of_kind_and_message():
    failure = Failure(rank=0, t=0.0, kind="ConfigError", message="no such thing\n  fix: another")
    assert failure.cause == "ConfigError: no such thing"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGSEGV", "SIGABRT"])
def test_failure_of_a_killed_worker_names_the_signal(name):
    failure = from_exit(3, -signal.Signals[name], 7.5)
    assert (failure.rank, failure.t, failure.cause) == (3, 7.5, f"killed by {name}")
    assert not failure.consequence


def test_failure_by_sigkill_mentions_lack_of_memory():
    assert from_exit(0, -signal.SIGKILL, 0.0).cause.startswith("killed by SIGKILL; ")
    assert "memory" in from_exit(0, -signal.SIGKILL, 0.0).cause


def test_signal_without_a_name_is_reported_by_number():
    assert from_exit(0, -(signal.SIGRTMIN + 3), 0.0).cause == f"killed by signal {signal.SIGRTMIN + 3}"


def test_exit_code_without_exception_is_reported():
    assert from_exit(1, 3, 0.0).cause == "ended with exit code 3 and no exception"


def test_a_failure_survives_being_written_and_read():
    failure = Failure(
        rank=1,
        t=2.5,
        kind="KeyError",
        message="'x'",
        text="Traceback ...\nKeyError: 'x'\n",
        consequence=True,
    )
    assert msgspec.json.decode(msgspec.json.encode(failure), type=Failure) == failure


def _lost(rank: int, *blamed: int, t: float = 1.0) -> Failure:
    """A worker that failed because it lost others."""
    message = f"lost {blamed}\n  where: there"
    return Failure(
        rank=rank, t=t, kind="PeerLost", message=message, text="all", consequence=True, blamed=blamed
    )


def test_an_own_error_is_named_whoever_is_accused():
    assert decide([_lost(0, 2), _failure(1, 9.0)], {0: 1, 2: 0}).rank == 1


def test_a_worker_that_ended_with_code_0_and_that_others_lost_is_named_with_both_sides():
    found = decide([_lost(0, 1), _lost(2, 1, t=2.0)], {0: 1, 1: 0, 2: 1})
    assert found.sentence("b") == "rank 1 on b failed: ended with exit code 0; rank 0 says: lost (1,)"
    assert found.text == "all"


def test_a_worker_that_hangs_and_that_others_lost_is_named():
    found = decide([_lost(0, 1)], {0: 1})
    assert found.sentence("b").startswith("rank 1 on b failed: it reported no error and has not ended; ")


def test_of_workers_that_lost_each_other_nobody_is_blamed():
    found = decide([_lost(0, 1), _lost(1, 0), _lost(2, 0, 1)], {0: 1, 1: 1, 2: 1})
    assert found.unclear
    assert "not known which worker is to blame" in found.sentence("a")
    assert "rank 0 lost rank 1; rank 1 lost rank 0; rank 2 lost ranks 0, 1" in found.sentence("a")


def test_nobody_is_blamed_for_nan_whose_origin_no_worker_has_seen():
    lost = [from_error(rank, GradientError("NaN", ranks=()), "all") for rank in (0, 1)]
    found = decide(lost, {})
    assert found.sentence("a") == "failed, and it is not known which worker is to blame: GradientError: NaN"
    knows = from_error(1, GradientError("NaN, here", ranks=(1,)), "all")
    assert decide([*lost, knows], {}).sentence("b") == "rank 1 on b failed: GradientError: NaN, here"


def test_workers_that_make_different_calls_fail_together_and_none_is_named_alone():
    failures = [
        Failure(rank=rank, t=float(-rank), kind="MismatchedCalls", message="rank 0 is in save()")
        for rank in (0, 1)
    ]
    assert decide(failures, {}).sentence("a") == "failed: MismatchedCalls: rank 0 is in save()"


@given(st.lists(st.sets(st.integers(0, 4), max_size=3), min_size=1, max_size=5), st.permutations(range(5)))
def test_blame_does_not_depend_on_the_order_and_never_falls_on_a_witness(blamed, order):
    failures = [_lost(rank, *sorted(ranks - {rank}), t=float(rank)) for rank, ranks in enumerate(blamed)]
    found = decide(failures, {})
    mixed = [failures[at] for at in order if at < len(failures)]
    assert decide(mixed, {}) == found
    accused = {rank for failure in failures for rank in failure.blamed}
    outside = accused - {failure.rank for failure in failures}
    if outside:
        assert found.rank in outside
    else:
        assert found.unclear == (bool(accused) and all(failures[rank].blamed for rank in accused))
