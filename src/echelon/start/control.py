"""How is a running run asked to let workers leave or join? Its launcher listens; a file says where.

The file is in the run's folder, and only the user who started the run can read it. It has the address, on
this machine, and a token without which nothing is answered. A request is a line of JSON, and so is each
answer. What is asked is decided in members.py.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from echelon.config.units import show_bytes
from echelon.observe.run_folder import RunFolder
from echelon.start.agents.invite import Invitations
from echelon.start.further import ScriptDigest
from echelon.start.members import Members

_MOST_BYTES = 1 << 16
_SILENT_S = 60.0
WORKER_BYTES = 250_000_000
NO_JOIN_FIX = "a run that saves goes on with others: echelon resume RUN --workers N"


class ControlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says: the machine, the port there, and the token."""

    host: str
    port: int
    token: str


class RunControl:
    """The launcher's side, in threads of its own."""

    def __init__(
        self,
        folder: RunFolder,
        members: Members,
        script: ScriptDigest,
        obstacle: str,
        invitations: Invitations | None = None,
    ) -> None:
        """`script` is what workers run, `obstacle` what further workers cannot take part in yet, if any.

        `invitations` lets workers of further machines join, if they can.
        """
        self._invitations = invitations
        self._file = folder.control
        self._members = members
        self._script = script
        self._obstacle = obstacle
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        told = ControlAddress(host=socket.gethostname(), port=port, token=self._token)
        opened = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(msgspec.json.encode(told))
        threading.Thread(target=self._accept, name="echelon-control", daemon=True).start()

    def close(self) -> None:
        """Answer nobody any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._file.unlink(missing_ok=True)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(sock,), name="echelon-control", daemon=True
                ).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), sock:
            sock.settimeout(_SILENT_S)
            file = sock.makefile("rwb")
            while line := file.readline(_MOST_BYTES):
                request = json.loads(line)
                known = hmac.compare_digest(str(request.get("token")).encode(), self._token.encode())
                answer = self._answer(request) if known else {"refusal": "the token is wrong"}
                file.write(json.dumps(answer).encode() + b"\n")
                file.flush()
                if not known:
                    return

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "leave":
                slots = [int(slot) for slot in request["ranks"]]
                return {"refusal": self._members.leave(slots, "echelon leave")}
            case "join":
                return self._join(int(request["workers"]))
            case "invite":
                return self._invite(float(request["for_s"]))
            case "where":
                found = self._members.whereabouts([int(slot) for slot in request["ranks"]])
                return {"where": {str(slot): text for slot, text in found.items()}}
        return {"refusal": f"the launcher does not know what {request['do']!r} is"}

    def _invite(self, for_s: float) -> dict[str, Any]:
        if self._invitations is None:
            return {
                "refusal": "workers of other machines can join only a run that was started with --hosts",
                "fix": "start the run with --hosts, which may name this machine alone: localhost:4",
            }
        if self._obstacle:
            return {"refusal": f"nobody can join a run with {self._obstacle} yet", "fix": NO_JOIN_FIX}
        token, addresses = self._invitations.invite(for_s)
        return {"refusal": "", "token": token, "addresses": addresses}

    def _join(self, count: int) -> dict[str, Any]:
        available_bytes = psutil.virtual_memory().available
        refusal, fix, slots = "", "", list[int]()
        if self._obstacle:
            refusal = f"nobody can join a run with {self._obstacle} yet"
            fix = NO_JOIN_FIX
        elif self._invitations is not None:
            refusal = "the launcher of a run on several machines starts no further workers by itself"
            fix = "`echelon invite RUN --file FILE` here, then `echelon join HOST:PORT` there"
        elif name := self._script.changed:
            refusal = f"{name} has changed since the run was started, so who runs it now cannot join"
            fix = "undo the change, or start the run again"
        elif count * WORKER_BYTES > available_bytes:
            refusal = (
                f"{count} workers need at least {show_bytes(count * WORKER_BYTES)} of memory, "
                f"of which {show_bytes(available_bytes)} are available"
            )
            fix = "add fewer"
        else:
            slots, refusal = self._members.add(count)
        return {"refusal": refusal, "fix": fix, "ranks": slots}
