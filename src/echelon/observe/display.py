"""Shows a run in the terminal: the script's output and sentences, and below them the panel.

Only a terminal has a panel. Elsewhere (a file, a pipe, a CI log) there are lines.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from echelon.observe.events import AnyEvent
from echelon.observe.pane import Pane, can_have_pane
from echelon.observe.progress import Progress

_DRAW_EVERY_S = 0.1
_DRAW_AGAIN_S = 2.0  # in case the script has cleared the screen
_SCRIPTS_PART = 3  # of a terminal's height, the panel takes one part; the script's output has the rest
_ABOVE = 4  # lines above the panel if there is no such output


class Display:
    """The display of one run, on `console`. Call `update` often, also without events.

    output  where the leader's output is shown, if it is; the panel is below it if it is a terminal, too
    """

    def __init__(
        self,
        console: Console,
        *,
        output: BinaryIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self._output = output
        self._clock = clock
        has_pane = can_have_pane(console) and (output is None or output.isatty())
        self._pane = Pane(console) if has_pane else None
        self._progress = Progress(clock(), lines=not has_pane, script=output is not None)
        self._drawn_at = self._drawn_again_at = clock()
        self._in_line = False
        self._is_to_stop = False
        self._on_stop: Callable[[int, FrameType | None], object] | int | None = signal.SIG_DFL

    def __enter__(self) -> Display:
        if self._pane is not None:
            self._on_stop = signal.signal(signal.SIGTSTP, self._stop_soon)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pane is not None:
            self._pane.hide()
            signal.signal(signal.SIGTSTP, self._on_stop)
        for line in self._progress.end():
            self.say(line)
        self._end_line()

    def update(self, events: Iterable[AnyEvent]) -> None:
        """Take new events into account, and draw if enough time has passed."""
        now = self._clock()
        for line in self._progress.take(events, now):
            self.say(line)
        if self._pane is None:
            return
        if self._is_to_stop:
            self._stop()
        if now - self._drawn_at >= _DRAW_EVERY_S:
            self._drawn_at = now
            self._draw(now)

    def show_output(self, data: bytes) -> None:
        """Show what the leader has printed, unchanged."""
        if self._output is None:
            return
        self._output.write(data)
        self._output.flush()
        self._in_line = not data.endswith(b"\n")

    def say(self, text: str) -> None:
        """Print a sentence on a line of its own, without markup and unbroken: paths can be copied."""
        self._end_line()
        self.console.print(Text(text), soft_wrap=True)

    def _end_line(self) -> None:
        """On a terminal, end the line that the script has left unfinished."""
        if self._in_line and self._output is not None and self._pane is not None:
            self.show_output(b"\n")

    def _draw(self, now: float) -> None:
        assert self._pane is not None
        _, height = self._pane.size
        panel = self._progress.panel(
            now,
            height=height // _SCRIPTS_PART if self._output is not None else height - _ABOVE,
            ascii_only=self.console.options.ascii_only,
        )
        if panel is None:
            return
        again = now - self._drawn_again_at >= _DRAW_AGAIN_S
        if again:
            self._drawn_again_at = now
        self._pane.show(panel, again=again)

    def _stop_soon(self, number: int, frame: FrameType | None) -> None:
        self._is_to_stop = True

    def _stop(self) -> None:
        """Ctrl-Z: leave the terminal tidy to the shell. The workers go on."""
        self._is_to_stop = False
        assert self._pane is not None
        self._pane.hide()
        os.kill(os.getpid(), signal.SIGSTOP)
