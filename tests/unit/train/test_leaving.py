"""SIGTERM is noted, where nobody else handles it."""

from __future__ import annotations

import os
import signal
import time

from echelon.train.leaving import LeaveSignal


def test_the_signal_is_noted_until_the_note_is_removed():
    noted = LeaveSignal()
    noted.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted.received
    finally:
        noted.remove()
    assert not noted.received
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_script_that_handles_the_signal_keeps_its_own_way():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        noted = LeaveSignal()
        noted.install()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not noted.received
        noted.remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_process_that_the_worker_has_forked_ends_as_ever():
    noted = LeaveSignal()
    noted.install()
    try:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, b"!")  # Python forgets signals that come while it forks
            until = time.monotonic() + 60
            while time.monotonic() < until:  # not signal.pause, which a signal just before it does not end
                time.sleep(0.01)
            os._exit(0)
        os.read(reading, 1)
        os.close(reading)
        os.close(writing)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    finally:
        noted.remove()
