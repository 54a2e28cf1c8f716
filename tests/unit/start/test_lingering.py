from hypothesis import given
from hypothesis import strategies as st

from echelon.observe.readiness import WorkerPhase
from echelon.start.lingering import Lingering, never_joined

JOINING, JOINED, TRAINING, LEFT = (WorkerPhase(number) for number in (2, 3, 4, 5))


def test_a_worker_that_ends_before_it_joins_is_named_at_once():
    found = never_joined({1: 0}, {0: JOINING, 1: WorkerPhase.RUNNING}, 2)
    assert found.rank == 1
    assert found.message == "ended with exit code 0 before it joined; rank 0 waited for it in join()"


def test_nobody_is_named_if_no_other_worker_waits_in_join():
    assert never_joined({1: 0}, {0: WorkerPhase.RUNNING}, 2) is None
    assert never_joined({1: 0}, {0: JOINING, 1: TRAINING}, 2) is None
    assert never_joined({1: 1}, {0: JOINING}, 2) is None


def _said(phase, *, ended=True, sign=lambda now: 0, until=100, limit_s=60.0):
    follows, found = Lingering(2, limit_s), []
    for now in range(until):
        one = follows.look({0: 0} if ended else {}, {1: phase}, {1: sign(now)}, float(now))
        if one is not None:
            found.append((now, one.over))
    return found


def test_a_worker_that_goes_on_silently_is_told_at_growing_intervals_and_fails_at_the_limit():
    assert _said(TRAINING, until=62) == [(5, False), (10, False), (20, False), (40, False), (61, True)]


def test_a_worker_that_shows_signs_of_life_goes_on():
    assert _said(TRAINING, sign=lambda now: now // 4) == []


def test_a_worker_that_has_left_the_run_or_whose_peers_go_on_may_take_its_time():
    assert _said(LEFT) == []
    assert _said(TRAINING, ended=False) == []


@given(st.lists(st.booleans(), min_size=1, max_size=60), st.integers(2, 30))
def test_a_worker_fails_only_after_a_silence_longer_than_the_limit(changes, limit_s):
    follows, sign, silent = Lingering(2, float(limit_s)), 0, 0
    for now, changed in enumerate(changes):
        sign, silent = (sign + 1, 0) if changed or now == 0 else (sign, silent + 1)
        found = follows.look({0: 0}, {1: TRAINING}, {1: sign}, float(now))
        assert (found is not None and found.over) == (silent > limit_s)
