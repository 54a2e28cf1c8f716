"""How does a worker notice that its machine will be taken away? By SIGTERM.

The signal is only noted: the training thread asks the launcher to let this worker leave, when its loop asks
for the next batch. If that is refused, a second signal ends the process, as it does where nobody asks.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class LeaveSignal:
    """Notes SIGTERM, from the first epoch on, unless the script or the session handles it already."""

    def __init__(self) -> None:
        self.received = False
        self._installed = False
        self._pid = 0

    def install(self) -> None:
        """Note the signal from now on; only the main thread can do this."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def remove(self) -> None:
        """Let the signal end the process again."""
        self.received = False
        if self._installed and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._note:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self.received = True
            return
        signal.signal(number, signal.SIG_DFL)  # a process that the worker has forked
        os.kill(os.getpid(), number)
