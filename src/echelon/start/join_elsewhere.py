"""How does a machine join the run of another one? It calls the launcher, and is an agent from then on."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from echelon.errors import LaunchError
from echelon.start.agents.agent import Agent
from echelon.start.agents.invite import JoinToken, call_run
from echelon.start.agents.protocol import JoinRequest

_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def read_token(name: str) -> JoinToken:
    """The token in a file, or on standard input; raises LaunchError."""
    if name == "-":
        return JoinToken.decode(sys.stdin.readline())
    try:
        text = Path(name).read_text(errors="replace")
    except OSError as error:
        raise LaunchError(
            f"the token cannot be read from {name}: {error.strerror}",
            where="--token-file",
            fix="give the file that `echelon invite RUN --file FILE` has written",
        ) from error
    return JoinToken.decode(text)


def write_token(file: Path, token: str) -> None:
    """Write a token into a new file that only this user can read."""
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise LaunchError(
            f"the token cannot be written to {file}: {error.strerror}",
            where="--file",
            fix="give a file that is not there yet",
        ) from error
    with os.fdopen(opened, "w") as out:
        out.write(token + "\n")


def join_elsewhere(
    address: str, token: JoinToken, workers: int, node: str, say: Callable[[str], None]
) -> None:
    """Start workers here for the run whose launcher answers there, and wait until they have ended."""
    channel = call_run(address, token)
    asks = JoinRequest(invitation=token.invitation, node=node, workers=workers)
    agent = Agent(channel, asks=asks, env=token.env)

    def leave(number: int, frame: FrameType | None) -> None:
        agent.asked_to_end += 1

    before = {number: signal.signal(number, leave) for number in _LEAVING}
    say(f"{node} joins the run at {address} with {workers} workers; their output is in the run's folder")
    try:
        agent.run()
    finally:
        channel.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if agent.refusal is not None:
        where = agent.refusal.where or f"echelon join {address}"
        raise LaunchError(agent.refusal.message, where=where, fix=agent.refusal.fix)
    failed = {rank: code for rank, code in agent.codes.items() if code}
    for rank, code in agent.codes.items():
        say(f"rank {rank} has ended" + (f" with exit code {code}" if code else ""))
    if failed or not agent.codes:
        why = next((f"rank {one.rank} failed: {one.kind}: {one.message}" for one in agent.failures), "")
        raise LaunchError(
            why or (f"{len(failed)} of {workers} workers failed" if failed else "the run has ended"),
            where=socket.gethostname(),
            fix="see their logs in the run's folder, on the machine of the launcher",
        )
