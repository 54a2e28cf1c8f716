"""A thread's time on a core and without one."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from echelon.train.thread_times import ThreadReader, ThreadReading, ThreadTimes

SCHEDSTAT = Path("/proc/thread-self/schedstat")


def times_of(*readings: ThreadReading) -> ThreadTimes:
    return ThreadTimes(iter(readings).__next__)


def test_times_are_those_since_the_last_call():
    times = times_of((7, 1.0, 0.5), (7, 3.0, 0.75), (7, 3.5, 2.0))
    assert times.take() == (2.0, 0.25)
    assert times.take() == (0.5, 1.25)


def test_a_wait_is_left_out():
    readings = [(7, float(cpu_s), 0.0) for cpu_s in (0, 1, 10, 12)]
    times = times_of(*readings)
    times.hold()
    times.hold()  # a wait within a wait is the same wait
    times.resume()
    times.resume()
    assert times.take() == (3.0, 0.0)


def test_a_wait_that_is_known_afterwards_is_left_out_from_the_mark_on():
    times = times_of(*((7, float(cpu_s), 0.0) for cpu_s in (0, 1, 10, 12)))
    times.mark()
    times.forget()
    times.forget()
    assert times.take() == (3.0, 0.0)


@pytest.mark.parametrize(
    ("after", "known"),
    [
        ((7, 3.0, None), (2.0, None)),
        ((8, 3.0, 0.75), (None, None)),
    ],
)
def test_what_was_not_measured_is_unknown_for_this_step_only(after, known):
    times = times_of((7, 1.0, 0.5), after, after)
    assert times.take() == known
    assert times.take()[0] == 0.0


@pytest.mark.parametrize("content", [None, "0 0 0\n", "", "12 word 3\n", "12 13\n"])
def test_without_a_record_of_the_system_starvation_is_unknown(tmp_path, content):
    file = tmp_path / "schedstat"
    if content is not None:
        file.write_text(content)
    _, cpu_s, starved_s = ThreadReader(str(file))()
    assert starved_s is None
    assert cpu_s > 0


def test_the_second_number_is_the_time_without_a_core(tmp_path):
    file = tmp_path / "schedstat"
    file.write_text("40254944 115315000 7\n")
    read = ThreadReader(str(file))
    assert read()[2] == pytest.approx(0.115315)
    file.write_text("40254944 215315000 8\n")
    assert read()[2] == pytest.approx(0.215315), "the file is read again, not opened again"


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="this system has no /proc/thread-self/schedstat")
def test_a_thread_that_computes_gets_time_on_a_core_and_one_that_sleeps_does_not():
    times = ThreadTimes()
    sum(range(2_000_000))
    computing_s, starved_s = times.take()
    threading.Event().wait(0.05)
    sleeping_s, _ = times.take()
    assert computing_s > sleeping_s
    assert starved_s >= 0


@pytest.mark.skipif(not SCHEDSTAT.exists(), reason="this system has no /proc/thread-self/schedstat")
def test_another_thread_has_times_of_its_own_and_no_file_stays_open():
    read = ThreadReader()
    first = read()
    others = []
    thread = threading.Thread(target=lambda: others.append(read()))
    thread.start()
    thread.join()
    again = read()
    assert first[0] == again[0] != others[0][0]
    assert again[1] > first[1]
    gc.collect()
    opened = _open_files()
    thread = read = None
    gc.collect()
    assert _open_files() == opened - 1


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
