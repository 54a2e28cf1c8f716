"""How does a worker ask the launcher about the run's members? Over a connection that is made at the start.

The launcher answers (start/members.py): it knows which processes have ended, and keeps the values through
which workers find each other in a new view. Each request is a line of JSON, and so is each answer.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from echelon.errors import PeerLost, WorkerError
from echelon.membership.survival import SurvivorState, SurvivorView

ADDRESS_VARIABLE = "ECHELON_MEMBERS"
TOKEN_VARIABLE = "ECHELON_MEMBERS_TOKEN"
RETURNS_VARIABLE = "ECHELON_RETURNS"  # set if the worker was started again
NODE_VARIABLE = "ECHELON_NODE"  # the machine of a worker that joins from another one
SILENT_VARIABLE = "ECHELON_SILENT_S"  # after so long without a sign a machine is taken to be lost
EPOCHS_KEY = "epochs"  # set once workers train in `session.epochs`, where one can come back
MOST_KEY = "most"  # how many workers can share a batch
UNFIT_ROUNDS = 3  # a worker whose gradients are not finite in so many rounds in a row is left out
_CONNECT_S = 10.0


class MemberService:
    """A worker's connection to the launcher's service."""

    def __init__(self, address: str, token: str, slot: int, limit_s: float) -> None:
        self.slot = slot
        self._lock = threading.Lock()
        try:
            self._sock = _connected(address)
        except OSError as error:
            raise WorkerError(
                f"the launcher does not answer at {address}: {error}",
                where=f"rank {slot}",
                fix="start the run again; without --min-workers the launcher is not asked",
            ) from error
        self._sock.settimeout(limit_s)
        self._file = self._sock.makefile("rwb")
        self.ask(token=token, slot=slot)

    @classmethod
    def from_environment(cls, env: Mapping[str, str], slot: int, limit_s: float) -> MemberService | None:
        """The launcher's service; None if this run has none."""
        address = env.get(ADDRESS_VARIABLE)
        return cls(address, env[TOKEN_VARIABLE], slot, limit_s) if address else None

    @staticmethod
    def silent_s(env: Mapping[str, str]) -> float:
        """After so long without a sign the launcher takes a machine to be lost; 0 if it is never asked."""
        return float(env.get(SILENT_VARIABLE, 0))

    def close(self) -> None:
        """Ask nothing any more."""
        self._file.close()
        self._sock.close()

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer."""
        with self._lock:
            try:
                self._file.write(json.dumps(request).encode() + b"\n")
                self._file.flush()
                line = self._file.readline()
            except OSError as error:
                raise self._silent() from error
        if not line:
            raise self._silent()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _silent(self) -> WorkerError:
        return WorkerError("the launcher has ended", where=f"rank {self.slot}", fix="see its output")

    def stand(self, standing: SurvivorState) -> SurvivorView | None:
        """Say where this worker stands, and wait for the next view; None if there is none to come."""
        answer = self.ask(do="stand", standing=msgspec.to_builtins(standing, str_keys=True))
        found = answer.get("view")
        return msgspec.convert(found, SurvivorView, strict=False) if found is not None else None

    def leave(self) -> str:
        """Ask to leave between two steps; why that is refused, if it is."""
        return str(self.ask(do="leave").get("refusal", ""))

    def come_back(self, limit_s: float) -> SurvivorView:
        """Wait until the others admit this worker, which was started again; its first view."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            found = self.ask(do="return").get("view")
            if found is not None:
                return msgspec.convert(found, SurvivorView, strict=False)
        raise WorkerError(
            f"the others did not admit this worker within {limit_s:g} s",
            where=f"rank {self.slot}",
            fix="train in `for epoch in session.epochs(n)`; workers come back in an epoch's first pass",
        )


def _connected(address: str) -> socket.socket:
    """A connection to the launcher: HOST:PORT, or the path of a socket, which workers of a lab reach."""
    if address.startswith("/"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(_CONNECT_S)
        sock.connect(address)
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_CONNECT_S)


class ServiceStore:
    """The values that members of one view publish; as much of c10d's Store as meetings need.

    Asking raises PeerLost once a member of the view is lost, so nobody waits for it.
    """

    def __init__(self, service: MemberService, view: int, members: Sequence[int]) -> None:
        self._service = service
        self._prefix = f"{view}/"
        self._members = set(members)

    def _ask(self, **request: Any) -> dict[str, Any]:
        answer = self._service.ask(**request)
        lost = sorted(self._members & set(answer["gone"]))
        if lost:
            names = ", ".join(f"rank {slot}" for slot in lost)
            raise PeerLost(f"{names} was lost while workers met again", ranks=tuple(lost))
        return answer

    def set(self, key: str, value: str) -> None:
        """Publish a value."""
        self._ask(do="set", key=self._prefix + key, value=value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        while True:
            value = self._ask(do="get", key=self._prefix + key)["value"]
            if value is not None:
                return str(value).encode()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have been published."""
        return bool(self._ask(do="check", keys=[self._prefix + key for key in keys])["value"])

    def add(self, key: str, count: int) -> int:
        """Add to a counter; returns its value after that."""
        return int(self._ask(do="add", key=self._prefix + key, count=count)["value"])
