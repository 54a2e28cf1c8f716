"""What workers read, with a terminal, a pipe and nothing behind the launcher's standard input."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import termios
from collections.abc import Callable, Iterator

import pytest

from echelon.start.input import WorkerInput


@pytest.fixture
def reads() -> Iterator[Callable[[int], WorkerInput]]:
    made = []

    def make(given: int) -> WorkerInput:
        made.append(WorkerInput(given))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.close()  # twice is harmless


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """A keyboard, and a terminal of 33 lines and 77 columns."""
    keyboard, screen = os.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    yield keyboard, screen
    os.close(keyboard)
    os.close(screen)


def _stty(fd: int) -> str:
    return subprocess.run(["stty", "size"], stdin=fd, capture_output=True, text=True, check=False).stdout


def test_leader_reads_what_is_typed_and_others_read_nothing(reads, terminal):
    keyboard, screen = terminal
    given = reads(screen)
    os.write(keyboard, b"yes\n")
    assert [os.read(given.of(rank), 100) for rank in (1, 2, 1)] == [b"", b"", b""]
    assert os.read(given.of(0), 100) == b"yes\n"


def test_all_workers_know_how_large_the_terminal_is(reads, terminal):
    given = reads(terminal[1])
    assert [_stty(given.of(rank)) for rank in (0, 1, 2)] == ["33 77\n"] * 3


def test_pipe_is_the_leaders_and_others_read_nothing(reads):
    ours, theirs = os.pipe()
    given = reads(ours)
    os.write(theirs, b"yes\n")
    os.close(theirs)
    assert os.read(given.of(1), 100) == b""
    assert os.read(given.of(0), 100) == b"yes\n"
    assert os.read(given.of(0), 100) == b""
    os.close(ours)


def test_closed_standard_input_is_at_its_end_for_all(reads):
    ours, theirs = os.pipe()
    os.close(ours)
    os.close(theirs)
    given = reads(ours)
    assert [os.read(given.of(rank), 100) for rank in (0, 1)] == [b"", b""]


def test_terminal_of_a_background_job_is_left_to_the_shell(reads, terminal, monkeypatch):
    keyboard, screen = terminal
    monkeypatch.setattr(os, "tcgetpgrp", lambda fd: os.getpgrp() + 1)
    given = reads(screen)
    os.write(keyboard, b"ls\n")
    assert os.read(given.of(0), 100) == b""
    assert _stty(given.of(0)) == "33 77\n"
    assert os.read(screen, 100) == b"ls\n"
