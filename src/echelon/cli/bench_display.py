"""What goes on in a measurement: in one line of a terminal that disappears, or line by line in a log."""

from __future__ import annotations

from rich.console import Console
from rich.status import Status
from rich.text import Text


class BenchDisplay:
    """Shows what is going on: in one line of a terminal that disappears, or line by line."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console) if console.is_terminal else None
        self._told = ""

    def __enter__(self) -> BenchDisplay:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def progress(self, text: str, done: float) -> None:
        """Show it; in a log, each text once."""
        if self._status is not None:
            self._status.update(f"{text}, {done:.0%}" if done else text)
        elif text != self._told:
            self._told = text
            self._console.print(Text(text), soft_wrap=True)
