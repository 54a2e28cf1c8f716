"""Who is still in the run? The launcher's service for runs that go on when workers are lost.

The launcher tells it which processes have ended. Workers tell it where they stand when an operation has
failed, and get the next view, as membership/survival.py decides. Only processes with the run's token are
answered. Workers that step without losses ask nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import signal
import socket
import threading
import time
from typing import Any

import msgspec

from echelon.membership.survival import Survival, SurvivorState
from echelon.train.service import ADDRESS_VARIABLE, TOKEN_VARIABLE

_GET_S = 0.1
_NOBODY_S = 5.0
_MOST_BYTES = 1 << 20


class Members:
    """The members of one run, in a thread for each worker.

    limit_s  how long survivors wait for one that has not come to the operation that failed
    """

    def __init__(self, workers: int, fewest: int, *, limit_s: float) -> None:
        self._survival = Survival(workers, fewest)
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._ended: dict[int, int] = {}
        self._news: list[str] = []
        self._raised = False  # a worker has raised an error, which ends the run
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, name="echelon-members", daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What workers need to find it."""
        host, port = self._listener.getsockname()[:2]
        return {ADDRESS_VARIABLE: f"{host}:{port}", TOKEN_VARIABLE: self._token}

    @property
    def leader(self) -> int:
        """The slot of the first worker that is there."""
        with self._changed:
            return next(iter(self._survival.living), 0)

    def ended(self, slot: int, code: int) -> bool:
        """A process has ended with this code; whether the others go on without it.

        Only after a signal: one that has raised would raise again, on any worker.
        """
        with self._changed:
            if slot in self._ended:
                return slot in self._survival.gone
            self._ended[slot] = code
            if code >= 0 or not self._survival.lose(slot):
                self._changed.notify_all()
                return False
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            left = len(self._survival.living)
            self._news.append(f"rank {slot} was lost ({name}); {left} workers go on")
            self._follow()
            self._changed.notify_all()
            return True

    def news(self) -> list[str]:
        """What is to be told since the last call."""
        with self._changed:
            told, self._news = self._news, []
        return told

    def close(self) -> None:
        """Answer nobody any more."""
        self._listener.close()

    def _follow(self) -> None:
        if self._survival.follow() is not None:
            self._changed.notify_all()

    # One thread for each worker ------------------------------------------------------------------

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(
                    target=self._serve, args=(sock,), name="echelon-member", daemon=True
                ).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, msgspec.ValidationError), sock:
            file = sock.makefile("rwb")
            slot = -1
            while line := file.readline(_MOST_BYTES):
                request = json.loads(line)
                if slot < 0:
                    if not hmac.compare_digest(str(request.get("token")), self._token):
                        return
                    slot = int(request["slot"])
                    answer: dict[str, Any] = {}
                else:
                    answer = self._answer(slot, request)
                with self._changed:
                    answer["gone"] = sorted(self._survival.gone)
                file.write(json.dumps(answer).encode() + b"\n")
                file.flush()

    def _answer(self, slot: int, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "set":
                with self._changed:
                    self._values[request["key"]] = request["value"]
                    self._changed.notify_all()
                return {}
            case "get":
                key = request["key"]
                with self._changed:
                    self._changed.wait_for(lambda: key in self._values, _GET_S)
                    return {"value": self._values.get(key)}
            case "check":
                with self._changed:
                    known = self._values.keys() | self._counts.keys()
                    return {"value": set(request["keys"]) <= known}
            case "add":
                with self._changed:
                    count = self._counts.get(request["key"], 0) + int(request["count"])
                    self._counts[request["key"]] = count
                    return {"value": count}
            case "ready":
                with self._changed:
                    self._survival.ready(slot)
                return {}
            case "left":
                with self._changed:
                    self._survival.left(slot)
                    self._raised |= bool(request["failed"])
                    self._follow()
                    self._changed.notify_all()
                return {}
            case "stand":
                return self._stand(msgspec.convert(request["standing"], SurvivorState, strict=False))
        return {}

    def _stand(self, standing: SurvivorState) -> dict[str, Any]:
        """Wait for the view after the one that the worker is in."""
        began = time.monotonic()
        with self._changed:
            self._survival.stand(standing)
            self._follow()
            while self._survival.view.number <= standing.view:
                waited_s = time.monotonic() - began
                if waited_s > (self._limit_s if self._survival.broken else _NOBODY_S):
                    return {}
                if self._failed():
                    return {}
                self._changed.wait(_GET_S)
            view = self._survival.view
            if standing.slot not in view.members:
                return {}
            return {"view": msgspec.to_builtins(view, str_keys=True)}

    def _failed(self) -> bool:
        """Whether a process has ended, or will, so that the run ends."""
        return self._raised or any(
            code and slot not in self._survival.gone for slot, code in self._ended.items()
        )
