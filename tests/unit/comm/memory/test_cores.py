"""A thread leaves its core only for one that is free, and may use all cores afterwards."""

from __future__ import annotations

import os
import threading

import pytest

from echelon.comm.memory import cores
from echelon.comm.memory.cores import CoreChoice, current_core


@pytest.fixture
def running(tmp_path, monkeypatch):
    """Says how many threads of the machine run."""
    load = tmp_path / "loadavg"
    monkeypatch.setattr(cores, "_LOAD", load)
    return lambda count: load.write_text(f"0.50 0.40 0.30 {count}/321 4711\n")


def in_thread(act):
    found = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_leaves_its_core_if_another_is_free_and_keeps_the_right_to_all(running):
    running(1)
    allowed = os.sched_getaffinity(0)

    def act():
        left = CoreChoice().leave(current_core())
        return left, os.sched_getaffinity(0)

    assert in_thread(act) == (len(allowed) > 1, allowed)


def test_a_thread_stays_while_all_cores_are_busy_and_tries_seldom(running):
    running(len(os.sched_getaffinity(0)) + 1)
    choice = CoreChoice()
    assert not choice.leave(current_core())
    running(1)
    assert not choice.leave(current_core())


def test_a_thread_that_may_use_one_core_stays(running):
    running(1)

    def act():
        core = current_core()
        os.sched_setaffinity(0, {core})
        return CoreChoice().leave(core), os.sched_getaffinity(0) == {core}

    assert in_thread(act) == (False, True)
