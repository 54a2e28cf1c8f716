"""What workers read: the leader, what the launcher was given on its standard input; the others, nothing.

Workers lead sessions of their own, so the launcher's terminal is not theirs: the kernel does not stop them
for reading it, and Ctrl-C reaches the launcher only. Two workers that read the same terminal would share
its lines at random, so only the leader gets it.

Scripts also ask their standard input how wide the terminal is (`stty size`), on every worker. In a terminal
the others therefore get one of their own, of the same size, in which nothing is ever typed: a read ends at
once, as at the end of a file.
"""

from __future__ import annotations

import fcntl
import os
import sys
import termios

_LOCAL_FLAGS, _SPECIAL = 3, 6  # positions in what `tcgetattr` returns


class WorkerInput:
    """The standard inputs of a run's workers, as file descriptors; closed when all workers have ended."""

    def __init__(self, given: int = 0) -> None:
        self._open: list[int] = []
        self.others = self._nothing(given)
        self.leader = self._passed_on(given) if _may_be_read(given) else self.others

    def of(self, rank: int) -> int:
        """The standard input of one worker."""
        return self.leader if rank == 0 else self.others

    def _passed_on(self, given: int) -> int:
        self._open.append(os.dup(given))
        return self._open[-1]

    def _nothing(self, given: int) -> int:
        """An input that is always at its end; a terminal, if `given` is one."""
        if _is_terminal(given):
            try:
                keyboard, screen = os.openpty()
            except OSError:  # there are no more terminals
                pass
            else:
                self._open += [keyboard, screen]  # without its keyboard a terminal answers nothing
                _imitate(given, screen)
                return screen
        self._open.append(os.open(os.devnull, os.O_RDONLY))
        return self._open[-1]

    def close(self) -> None:
        """Close what was opened."""
        while self._open:
            os.close(self._open.pop())


def _imitate(real: int, screen: int) -> None:
    """Make a terminal as large as the real one, in which a read that finds nothing is at its end."""
    fcntl.ioctl(screen, termios.TIOCSWINSZ, fcntl.ioctl(real, termios.TIOCGWINSZ, bytes(8)))
    modes = termios.tcgetattr(screen)
    modes[_LOCAL_FLAGS] &= ~(termios.ICANON | termios.ECHO)
    modes[_SPECIAL][termios.VMIN] = modes[_SPECIAL][termios.VTIME] = 0
    termios.tcsetattr(screen, termios.TCSANOW, modes)


def _may_be_read(given: int) -> bool:
    """Not if it is closed, nor if it is the terminal of a shell that runs the launcher in the background.

    The shell reads that terminal itself. Because it is not the workers' own, the kernel would not stop a
    worker that takes the shell's input.
    """
    try:
        return os.tcgetpgrp(given) == os.getpgrp()
    except OSError:  # no terminal, or not one that has jobs
        return _is_open(given)


def _is_terminal(given: int) -> bool:
    return _is_open(given) and os.isatty(given)


def _is_open(given: int) -> bool:
    if given == 0 and sys.__stdin__ is None:  # closed when Python started, and perhaps another file since
        return False
    try:
        os.fstat(given)
    except OSError:
        return False
    return True
