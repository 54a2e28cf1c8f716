"""An engine's job that is a command: it starts agents elsewhere and lasts as long as they do."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from echelon.errors import LaunchError
from echelon.start.agents.orphan import ending_with_this

_MOST_TEXT = 2000
_END_S = 2.0


class CommandJob:
    """A command that starts agents elsewhere and lasts as long as they do: mpirun, srun.

    It is named by its whole path, and ends with the launcher.
    """

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._name = Path(argv[0]).name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        try:
            self._process = subprocess.Popen(
                ending_with_this(argv),  # also while it waits, when no agent could notice
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the launcher, which ends the job in its own way
            )
        except OSError as error:
            self._errors.close()
            raise LaunchError(f"{argv[0]} cannot be started: {error}", where=argv[0]) from error
        self._said = ""

    def waiting_for(self) -> str:
        """What the command has printed so far."""
        return self._text()

    def why_ended(self) -> str | None:
        """What the command has printed, once it has ended."""
        code = self._process.poll()
        if code is None:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return self._text() or f"{self._name} {how}"

    def end(self) -> None:
        """End the command, and by it the agents."""
        if self._errors.closed:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
        self._said = self._text()
        self._process.wait()
        self._errors.close()

    def _text(self) -> str:
        if self._errors.closed:
            return self._said
        self._errors.seek(0)
        return self._errors.read()[-_MOST_TEXT:].decode(errors="replace").strip()
