"""Does the leader's name lead to an address? If not, it is said at once; a machine may still come up."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

from echelon.errors import JoinTimeout

_AGAIN_S = 0.5
_log = logging.getLogger(__name__)


def await_address(
    name: str, port: int, timeout_s: float, *, warn: Callable[[str], None] = _log.warning
) -> None:
    """Return once the name resolves; JoinTimeout names it if it does not in time."""
    until = time.monotonic() + timeout_s
    warned = False
    while True:
        try:
            socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
            return
        except OSError as error:  # a name that is no text of a host at all is a UnicodeError
            problem = error.strerror or str(error)
        except UnicodeError as error:
            problem = str(error)
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise JoinTimeout(
                f"MASTER_ADDR is {name!r}, which is not known here: {problem}; tried for {timeout_s:g} s",
                ranks=(0,),
                where=socket.gethostname(),
                fix="set MASTER_ADDR to a name or address of the first machine that this machine knows",
            )
        if not warned:
            warned = True
            warn(f"MASTER_ADDR is {name!r}, which is not known here: {problem}; trying for {left_s:.0f} s")
        time.sleep(min(_AGAIN_S, left_s))
