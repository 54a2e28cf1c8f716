"""The messages between a launcher and its agents: plain msgspec values, decoded strictly.

launcher                        agent
          <- Introduction       who it is: versions, addresses
Listen    ->
          <- Listening          a port, to find out which addresses the other machines reach
TryReach  ->
          <- Reached
Begin     ->                    the run: settings, plan, workers
          <- Grown ...          what workers write: events, logs, errors
          <- WorkerEnded ...
Interrupt, Finish ->
Alive     <->                   every few seconds, in both directions
"""

from __future__ import annotations

import msgspec

from echelon.observe.growth import Grown


class Introduction(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent is there.

    `machine` is the same for agents between which no network lies; `order` is the engine's number of the
    agent's slot; `cpus` are the cores that it may use.
    """

    host: str
    pid: int
    cores: int
    machine: str = ""
    order: int = 0
    cpus: list[int] = []
    echelon: str
    python: str
    torch: str
    addresses: list[str]


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Open a port for the others to try."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The port is open on all addresses."""

    port: int


class TryReach(msgspec.Struct, frozen=True, tag=True):
    """Try to connect to each of these addresses."""

    addresses: list[str]
    port: int
    timeout_s: float


class Reached(msgspec.Struct, frozen=True, tag=True):
    """What came of it, by address: an empty text, or why it failed."""

    outcomes: dict[str, str]


class AgentWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, or a server, to start on the agent's machine."""

    rank: int
    node: str
    program: list[str]
    env: dict[str, str]
    fork: bool = True


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start these workers in `cwd`; if there are `files`, in a temporary folder that holds them.

    `call` is the pickled call that workers carry out, if they run a function rather than a script.
    """

    run: str
    config: str
    plan: str
    cwd: str
    workers: list[AgentWorker]
    files: dict[str, bytes] = {}
    call: bytes = b""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent cannot start the workers."""

    message: str
    where: str = ""
    fix: str = ""


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """A worker has ended; a negative code is a signal."""

    rank: int
    code: int


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Send the workers the signal of Ctrl-C."""


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End the workers that are left, and the agent."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The sender is alive."""


Message = (
    Introduction
    | Listen
    | Listening
    | TryReach
    | Reached
    | Begin
    | Refusal
    | Grown
    | WorkerEnded
    | Interrupt
    | Finish
    | Alive
)
