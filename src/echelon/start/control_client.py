"""How does a command ask the launcher of a running run? By the address and token of the run's folder."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from echelon.errors import LaunchError
from echelon.observe.events import LAUNCHER, RunEnded, read_events
from echelon.observe.run_folder import RunFolder
from echelon.start.control import ControlAddress

_CONNECT_S = 5.0
_ANSWER_S = 60.0


class ControlClient:
    """A command's connection to the launcher of a run; raises LaunchError if there is none."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        address = _address(folder)
        self._token = address.token
        try:
            self._sock = socket.create_connection(("127.0.0.1", address.port), timeout=_CONNECT_S)
        except OSError as error:
            raise LaunchError(
                f"the launcher of run {folder.name} does not answer: {error}",
                where=str(folder.control),
                fix="it was killed; start the run again",
            ) from error
        self._sock.settimeout(_ANSWER_S)
        self._file = self._sock.makefile("rwb")

    def close(self) -> None:
        """End the connection."""
        self._file.close()
        self._sock.close()

    def leave(self, ranks: Sequence[int]) -> None:
        """Let these workers leave; raises LaunchError if they do not."""
        self._ask(do="leave", ranks=list(ranks))

    def join(self, workers: int) -> list[int]:
        """Let so many further workers join; their ranks. Raises LaunchError if they do not."""
        return [int(rank) for rank in self._ask(do="join", workers=workers)["ranks"]]

    def invite(self, for_s: float) -> tuple[str, list[str]]:
        """A token with which another machine may join for so long, and where; raises LaunchError."""
        answer = self._ask(do="invite", for_s=for_s)
        return str(answer["token"]), [str(address) for address in answer["addresses"]]

    def where(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where these workers are on their way out or in: leaving, left, joining, waiting, member, gone."""
        found = self._ask(do="where", ranks=list(ranks))["where"]
        return {int(rank): str(text) for rank, text in found.items()}

    def _ask(self, **request: Any) -> dict[str, Any]:
        try:
            self._file.write(json.dumps({**request, "token": self._token}).encode() + b"\n")
            self._file.flush()
            line = self._file.readline()
        except OSError:
            line = b""
        if not line:
            raise _ended(self._folder)
        answer: dict[str, Any] = json.loads(line)
        if answer.get("refusal"):
            raise LaunchError(
                str(answer["refusal"]),
                where=f"run {self._folder.name}",
                fix=str(answer.get("fix") or "see docs/reference/membership.md"),
            )
        return answer


def _address(folder: RunFolder) -> ControlAddress:
    """Where the launcher listens."""
    try:
        address = msgspec.json.decode(folder.control.read_bytes(), type=ControlAddress)
    except FileNotFoundError:
        raise _without_address(folder) from None
    except (OSError, msgspec.DecodeError) as error:
        raise LaunchError(
            f"the address of run {folder.name} cannot be read: {error}",
            where=str(folder.control),
            fix="only the user who started the run can let workers leave or join",
        ) from error
    here = socket.gethostname()
    if address.host != here:
        raise LaunchError(
            f"run {folder.name} was started on {address.host}, and this is {here}",
            where=str(folder.control),
            fix=f"give the command on {address.host}; other machines join with `echelon invite` there",
        )
    return address


def _without_address(folder: RunFolder) -> LaunchError:
    file = folder.events_of(LAUNCHER)
    if file.exists() and any(isinstance(event, RunEnded) for event in read_events(file)):
        return _ended(folder)
    if folder.config.exists() and "min_workers = " in folder.config.read_text():
        return LaunchError(
            f"the launcher of run {folder.name} lets nobody leave or join",
            where=str(folder.path),
            fix="it starts just now, was killed, or has one worker: start runs with at least two",
        )
    return LaunchError(
        f"run {folder.name} was started without --min-workers, so its workers stay as they are",
        where=str(folder.config),
        fix="start runs with --min-workers: echelon run --workers 4 --min-workers 2 train.py",
    )


def _ended(folder: RunFolder) -> LaunchError:
    return LaunchError(
        f"run {folder.name} has ended",
        where=str(folder.path),
        fix="start it again; `echelon resume` continues a run that saved checkpoints",
    )
