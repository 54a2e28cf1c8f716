"""When CPU quotas of a lab come into force, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.observe import readiness
from echelon.observe.readiness import WorkerPhase
from echelon.observe.run_folder import RunFolder
from echelon.start.quotas import JOINED_S, RUNNING_S, QuotaTrigger

RUNNING, JOINED, TRAINING = WorkerPhase.RUNNING, WorkerPhase.JOINED, WorkerPhase.TRAINING


def test_quotas_come_when_the_last_worker_trains() -> None:
    trigger = QuotaTrigger(2)
    assert trigger.look({}, (), 0.0) is None
    assert trigger.look({0: TRAINING}, (), 1.0) is None
    assert trigger.look({0: TRAINING, 1: JOINED}, (), 2.0) is None
    assert trigger.look({0: TRAINING, 1: TRAINING}, (), 3.0) == "all workers train"


def test_a_worker_that_joins_and_never_trains_is_awaited_for_a_bounded_time() -> None:
    trigger = QuotaTrigger(3)
    phases = {0: TRAINING, 1: JOINED, 2: JOINED}
    assert trigger.look(phases, (), 5.0) is None
    assert trigger.look(phases, (), 4.9 + JOINED_S) is None
    said = trigger.look(phases, (), 5.0 + JOINED_S)
    assert said == f"ranks 1 and 2 joined {JOINED_S:.0f} s ago and did not begin to train"


def test_a_script_that_never_joins_is_awaited_for_a_bounded_time() -> None:
    trigger = QuotaTrigger(2)
    assert trigger.look({0: RUNNING}, (), 0.0) is None
    assert trigger.look({0: RUNNING, 1: RUNNING}, (), 7.0) is None
    assert trigger.look({0: RUNNING, 1: RUNNING}, (), 6.9 + RUNNING_S) is None
    said = trigger.look({0: RUNNING, 1: RUNNING}, (), 7.0 + RUNNING_S)
    assert said == f"the script of ranks 0 and 1 has run for {RUNNING_S:.0f} s without joining"


def test_time_before_joining_does_not_count_as_time_since_joining() -> None:
    trigger = QuotaTrigger(1)
    trigger.look({0: RUNNING}, (), 0.0)
    assert trigger.look({0: JOINED}, (), RUNNING_S - 1) is None
    assert trigger.look({0: JOINED}, (), RUNNING_S + 1) is None


def test_a_job_that_is_known_to_train_is_awaited_as_long_as_it_loads() -> None:
    trigger = QuotaTrigger(1, bounded=False)
    assert trigger.look({0: JOINED}, (), 0.0) is None
    assert trigger.look({0: JOINED}, (), 1e6) is None
    assert trigger.look({0: TRAINING}, (), 1e6) == "all workers train"


def test_a_worker_that_has_ended_is_not_awaited() -> None:
    assert QuotaTrigger(2).look({0: TRAINING}, {1: 0}, 0.0) == "all workers train"
    assert QuotaTrigger(2).look({0: TRAINING}, {0: 0, 1: 0}, 0.0) is None  # nobody is left


@given(st.lists(st.sampled_from([None, *WorkerPhase]), min_size=1, max_size=6), st.floats(0, 100))
def test_quotas_never_come_before_every_script_runs(phases: list[WorkerPhase | None], now: float) -> None:
    trigger = QuotaTrigger(len(phases))
    known = {rank: phase for rank, phase in enumerate(phases) if phase is not None}
    first = trigger.look(known, (), 0.0)
    assert (first is not None) == all(phase is not None and phase >= TRAINING for phase in phases)
    late = trigger.look(known, (), now)
    assert late is None or None not in phases
    assert (trigger.look(known, (), 100.0) is None) == (None in phases)


def test_what_workers_tell_is_read_and_forgotten(tmp_path) -> None:
    folder = RunFolder.create(tmp_path, "x")
    place = {"ECHELON_RUN": str(folder.path), "RANK": "3"}
    readiness.tell(RUNNING, place)
    assert readiness.told(folder) == {}
    assert not folder.ready.exists()  # nobody asks, nothing is written
    readiness.ask(folder)
    for phase in (RUNNING, TRAINING, JOINED):  # the furthest counts
        readiness.tell(phase, place)
    readiness.tell(JOINED, {**place, "RANK": "0"})
    assert readiness.told(folder) == {3: TRAINING, 0: JOINED}
    readiness.forget(folder)
    assert not folder.ready.exists()


@pytest.mark.parametrize("environment", [{}, {"RANK": "0"}, {"ECHELON_RUN": "/nowhere/at", "RANK": "0"}])
def test_without_a_launcher_nothing_is_told(environment: dict[str, str]) -> None:
    readiness.tell(TRAINING, environment)
