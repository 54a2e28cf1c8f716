"""The messages between a launcher and its agents: plain msgspec values, decoded strictly.

launcher                        agent
          <- Introduction       who it is: versions, addresses
Describe  ->                    only `echelon doctor` asks
          <- MachineDescription the machine, its interfaces and its clock
Listen    ->
          <- Listening          a port, to find out which addresses the other machines reach
TryReach  ->
          <- Reached
Begin     ->                    the run: settings, plan, workers
          <- Grown ...          what workers write: events, logs, errors
          <- WorkerEnded ...
Interrupt, Finish ->
Alive     <->                   every few seconds, in both directions

In a run that goes on when workers are lost (board.py, member_relay.py):

          <- MemberOpened       a worker there has a question for the launcher
MemberSaid, MemberGone <->      what a worker and the launcher say to each other
Publish   ->                    what all workers there see
          <- Published
          <- Progressed ...     how far workers are
StartAgain, EndWorker ->        one worker
          <- JoinRequest        after its introduction, an agent that asks to join a running run

A Refusal may go both ways.
"""

from __future__ import annotations

import msgspec

from echelon.cluster.interfaces import Interface
from echelon.cluster.machine import Machine
from echelon.observe.growth import Grown


class Introduction(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent is there.

    `network` is the same for agents that have the same network interfaces, `machine` for those that also
    have the same host name. `order` is the engine's number of the agent's slot; `cpus` are the cores that
    it may use, `devices` those that the engine gave to it.
    """

    host: str
    pid: int
    cores: int
    machine: str = ""
    network: str = ""
    order: int = 0
    cpus: list[int] = []
    devices: str = ""
    echelon: str
    python: str
    torch: str
    addresses: list[str]


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Describe the machine."""


class MachineDescription(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent's machine; `t` is what its clock says, `executable` its Python."""

    t: float
    executable: str
    machine: Machine
    interfaces: list[Interface]


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Open this port for the others to try; 0 is any that is free.

    `steady`: any that the system gives to no other program while the run's leader has not opened it yet.
    """

    port: int = 0
    steady: bool = False


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The port is open on all addresses, and answers with the token; or why it cannot be opened."""

    port: int
    token: str = ""
    problem: str = ""


class ReachTarget(msgspec.Struct, frozen=True):
    """An address of another machine, where a port answers with the token."""

    node: str
    address: str
    port: int
    token: str


class TryReach(msgspec.Struct, frozen=True, tag=True):
    """Try to connect to all of these at once.

    When each machine was reached at one address, the others have `spare_s` more.
    """

    targets: list[ReachTarget]
    timeout_s: float
    spare_s: float


class ReachOutcome(msgspec.Struct, frozen=True):
    """How one attempt ended: "" is success, `source` the own address of that connection."""

    problem: str
    source: str = ""


class Reached(msgspec.Struct, frozen=True, tag=True):
    """What came of it, in the order of the targets."""

    outcomes: list[ReachOutcome]


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
    `members`: the run goes on when workers are lost. `digests` are those of the script's files by path,
    which have to be the same there.
    """

    run: str
    config: str
    plan: str
    cwd: str
    workers: list[AgentWorker]
    files: dict[str, bytes] = {}
    call: bytes = b""
    members: bool = False
    digests: dict[str, str] = {}


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An agent's machine, called `node`, offers so many workers; `invitation` is what its token names."""

    invitation: str
    node: str
    workers: int


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent cannot start the workers; or the launcher does not want them."""

    message: str
    where: str = ""
    fix: str = ""


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """A worker has ended; a negative code is a signal."""

    rank: int
    code: int


class Interrupt(msgspec.Struct, frozen=True, tag=True):
    """Send the workers the signal of Ctrl-C, or ask them to save and stop."""

    saves: bool = False


class StartAgain(msgspec.Struct, frozen=True, tag=True):
    """Start a new process in the place of a worker that has ended."""

    rank: int


class EndWorker(msgspec.Struct, frozen=True, tag=True):
    """End one worker at once."""

    rank: int


class MemberOpened(msgspec.Struct, frozen=True, tag=True):
    """A worker has opened a connection to the launcher's service of members."""

    connection: int


class MemberSaid(msgspec.Struct, frozen=True, tag=True):
    """What came over such a connection."""

    connection: int
    data: bytes


class MemberGone(msgspec.Struct, frozen=True, tag=True):
    """Such a connection was closed."""

    connection: int


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Let all workers see how many others wait, and after which round they are admitted."""

    number: int
    waiting: int
    after_round: int


class Published(msgspec.Struct, frozen=True, tag=True):
    """All workers there see what was published with this number."""

    number: int


class WorkerProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a worker is, as membership/stuck.py wants it; whether its process is stopped."""

    rank: int
    operation: int
    phase: int
    batches: int
    rounds: int
    stopped: bool


class Progressed(msgspec.Struct, frozen=True, tag=True):
    """How far the workers are that have said so."""

    workers: list[WorkerProgress]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End the workers that are left, and the agent."""


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The sender is alive."""


Message = (
    Introduction
    | Describe
    | MachineDescription
    | Listen
    | Listening
    | TryReach
    | Reached
    | Begin
    | JoinRequest
    | Refusal
    | Grown
    | WorkerEnded
    | Interrupt
    | StartAgain
    | EndWorker
    | MemberOpened
    | MemberSaid
    | MemberGone
    | Publish
    | Published
    | Progressed
    | Finish
    | Alive
)
