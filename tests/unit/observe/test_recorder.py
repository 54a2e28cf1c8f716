"""The recorder writes everything, rarely, and never ends a run."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from echelon.observe import recorder as module
from echelon.observe.events import Noted, read_events
from echelon.observe.recorder import Recorder


def note(number):
    return Noted(t=float(number), rank=0, text=str(number))


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_after_closing_all_events_are_in_the_file_in_order(tmp_path):
    with Recorder(tmp_path / "rank-0.jsonl") as recorder:
        for number in range(1000):
            recorder.emit(note(number))
    assert list(read_events(tmp_path / "rank-0.jsonl")) == [note(number) for number in range(1000)]


def test_events_of_several_threads_are_all_written_whole(tmp_path):
    """The loop's thread records waits while the trainer records steps."""
    with Recorder(tmp_path / "rank-0.jsonl") as recorder:

        def work(first):
            for number in range(first, first + 500):
                recorder.emit(note(number))
                recorder.flush()

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 500, 1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = list(read_events(tmp_path / "rank-0.jsonl"))
    assert sorted(found, key=lambda event: event.t) == [note(number) for number in range(1500)]


def test_events_are_written_at_most_five_times_a_second(tmp_path, clock):
    file = tmp_path / "rank-0.jsonl"
    sizes = set()
    with Recorder(file) as recorder:
        for number in range(100):
            clock.now += 0.01
            recorder.emit(note(number))
            sizes.add(file.stat().st_size)
    assert 4 <= len(sizes - {0}) <= 5


def test_an_event_after_a_pause_is_written_at_once(tmp_path, clock):
    with Recorder(tmp_path / "rank-0.jsonl") as recorder:
        recorder.emit(note(1))
        assert list(read_events(tmp_path / "rank-0.jsonl")) == []
        clock.now += 0.3
        recorder.emit(note(2))
        assert list(read_events(tmp_path / "rank-0.jsonl")) == [note(1), note(2)]


def test_flushing_writes_pending_events(tmp_path):
    with Recorder(tmp_path / "rank-0.jsonl") as recorder:
        recorder.emit(note(1))
        recorder.flush()
        assert list(read_events(tmp_path / "rank-0.jsonl")) == [note(1)]


def test_a_second_recorder_adds_to_the_file(tmp_path):
    for number in (1, 2):
        with Recorder(tmp_path / "rank-0.jsonl") as recorder:
            recorder.emit(note(number))
    assert list(read_events(tmp_path / "rank-0.jsonl")) == [note(1), note(2)]


def test_events_are_written_also_when_the_block_fails(tmp_path):
    def fail():
        with Recorder(tmp_path / "rank-0.jsonl") as recorder:
            recorder.emit(note(1))
            recorder.emit(note(1 // 0))

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(read_events(tmp_path / "rank-0.jsonl")) == [note(1)]


def test_without_a_file_nothing_is_recorded():
    with Recorder(None) as recorder:
        recorder.emit(note(1))
        recorder.flush()


def test_closing_twice_and_emitting_afterwards_are_harmless(tmp_path):
    recorder = Recorder(tmp_path / "rank-0.jsonl")
    recorder.emit(note(1))
    recorder.close()
    recorder.close()
    recorder.emit(note(2))
    assert list(read_events(tmp_path / "rank-0.jsonl")) == [note(1)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")  # noqa: PTH110
def test_a_full_disk_gives_one_warning_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "rank-0.jsonl").symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING), Recorder(tmp_path / "rank-0.jsonl") as recorder:
        for number in range(3):
            recorder.emit(note(number))
            recorder.flush()
    [record] = caplog.records
    assert "cannot record more events, training goes on" in record.getMessage()
    assert "No space left on device" in record.getMessage()


def test_a_file_that_cannot_be_opened_gives_one_warning_and_training_goes_on(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), Recorder(tmp_path / "missing" / "rank-0.jsonl") as recorder:
        recorder.emit(note(1))
        recorder.flush()
    [record] = caplog.records
    assert "training goes on" in record.getMessage()
    assert "rank-0.jsonl" in record.getMessage()
