import multiprocessing
from dataclasses import replace

import pytest

from echelon.errors import LaunchError
from echelon.simulate.run import simulate
from echelon.simulate.sweep import simulate_several

POLICIES = ["full", "async"]


def test_several_processes_give_the_same_result_as_one(setting):
    two = replace(setting, seeds=2)
    assert simulate_several(two, POLICIES) == simulate(two, POLICIES)


def test_processes_without_tasks_end_before_the_others(setting):
    # Three runs for two processes: one of them is sent home while the other still works.
    policies = ["full", "async", "hogwild"]
    assert simulate_several(setting, policies, jobs=2) == simulate(setting, policies)


def test_progress_reports_each_runs_time(setting):
    heard = []
    simulate_several(
        replace(setting, seeds=2),
        POLICIES,
        progress=lambda number, seconds: heard.append((number, seconds)),
    )
    for number in range(4):
        times = [seconds for run, seconds in heard if run == number]
        assert times == sorted(times)
        assert times[-1] == setting.seconds
        assert len(times) > 1


def test_a_process_that_dies_ends_the_simulation(setting):
    def kill(number, seconds):
        for process in multiprocessing.active_children():
            process.kill()

    with pytest.raises(LaunchError, match="exit code -9"):
        simulate_several(replace(setting, seeds=2), ["async"], jobs=2, progress=kill)
