"""The launcher's side of members on other machines: their agents pass on what is said (member_relay.py).

A thread reads the agents' channels, so that members are answered at once. What it does not need itself it
keeps for the launcher's own thread. All messages to an agent keep their order: what is published reaches
the members before any answer that is given later.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from echelon.errors import Corrupt, PeerLost
from echelon.membership.stuck import WorkerSeen, WorkPhase
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.member_relay import MemberStreams
from echelon.start.agents.protocol import (
    MemberGone,
    MemberOpened,
    MemberSaid,
    Message,
    Progressed,
    Publish,
    Published,
)
from echelon.start.member_board import Serve

_TICK_S = 0.1
_FRESH_S = 1.5
_MOST_UNSENT_BYTES = 1 << 20
_STOP_S = 5.0


@dataclass(slots=True, eq=False)
class _Machine:
    """An agent, and what it has said."""

    agent: ConnectedAgent
    streams: MemberStreams
    kept: list[Message] = field(default_factory=list)
    lost: PeerLost | Corrupt | None = None
    published: int = 0
    told_at: float = 0.0
    seen: dict[int, tuple[WorkerSeen, bool]] = field(default_factory=dict)


class AgentBoard:
    """The members of one run, on the machines of its agents."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._machines: list[_Machine] = []
        self._last = Publish(number=0, waiting=0, after_round=0)
        self._serve: Serve | None = None
        self._woken, self._wake = os.pipe()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="echelon-agents", daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Nothing: agents say where they are themselves."""
        return {}

    def open(self, serve: Serve) -> None:
        """Once there are agents."""
        self._serve = serve

    def attach(self, agents: Sequence[ConnectedAgent]) -> None:
        """These agents have started workers: read their channels from now on."""
        with self._changed:
            for agent in agents:
                machine = _Machine(agent, MemberStreams(agent.send))
                agent.reader = lambda machine=machine: self._taken(machine)
                if self._last.number:
                    agent.send(self._last)
                self._machines.append(machine)
        if not self._thread.ident:
            self._thread.start()
        self._notify()

    def detach(self, agent: ConnectedAgent) -> None:
        """An agent is gone, or will be; nobody waits for it any more."""
        with self._changed:
            for machine in [one for one in self._machines if one.agent is agent]:
                self._machines.remove(machine)
                machine.streams.close()
                agent.reader = list
            self._changed.notify_all()
        self._notify()

    def publish(self, waiting: int, after_round: int) -> None:
        """Send it to all agents."""
        with self._changed:
            told = self._last.waiting, self._last.after_round
            if told == (waiting, after_round):
                return
            self._last = Publish(number=self._last.number + 1, waiting=waiting, after_round=after_round)
            for machine in self._machines:
                machine.agent.send(self._last)

    def settle(self, limit_s: float) -> None:
        """Wait for the agents' confirmations; one that is lost meanwhile is not awaited."""
        with self._changed:
            number = self._last.number
            self._changed.wait_for(lambda: all(one.published >= number for one in self._machines), limit_s)

    @property
    def is_current(self) -> bool:
        """Whether all agents have said a moment ago how far their workers are."""
        with self._changed:
            now = time.monotonic()
            return all(now - machine.told_at < _FRESH_S for machine in self._machines)

    def read(self, slot: int) -> WorkerSeen | None:
        """As its agent has said."""
        with self._changed:
            return next((one.seen[slot][0] for one in self._machines if slot in one.seen), None)

    def stopped(self, slots: Collection[int]) -> list[int]:
        """As their agents have said."""
        with self._changed:
            known = {slot: stops for one in self._machines for slot, (_, stops) in one.seen.items()}
        return [slot for slot in slots if known.get(slot)]

    def clear(self, slot: int) -> None:
        """The agent does so, too."""
        with self._changed:
            for machine in self._machines:
                machine.seen.pop(slot, None)

    def close(self) -> None:
        """Read the channels no longer; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._notify()
        if self._thread.ident:
            self._thread.join(_STOP_S)
        with self._changed:
            for machine in self._machines:
                machine.streams.close()
            self._machines = []
        os.close(self._wake)
        os.close(self._woken)

    def _notify(self) -> None:
        os.write(self._wake, b"x")

    # The thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            with self._changed:
                channels = [one for one in self._machines if one.lost is None]
                reading = [self._woken, *(one.agent.channel.fileno() for one in channels)]
                writing = [
                    one.agent.channel.writes_to for one in channels if one.agent.channel.unsent_bytes
                ]
                for machine in channels:
                    if machine.agent.channel.unsent_bytes < _MOST_UNSENT_BYTES:
                        reading += [sock.fileno() for sock in machine.streams.sockets]
                    writing += [sock.fileno() for sock in machine.streams.blocked]
            with contextlib.suppress(OSError, ValueError):  # one was closed meanwhile
                readable, _, _ = select.select(reading, writing, [], _TICK_S)
                if self._woken in readable:
                    os.read(self._woken, 1024)
            with self._changed:
                for machine in channels:
                    if machine in self._machines:
                        self._hear(machine)

    def _hear(self, machine: _Machine) -> None:
        """Take what has come from an agent, and carry what its members are told."""
        try:
            for message in machine.agent.channel.poll():
                self._take(machine, message)
            if machine.agent.channel.unsent_bytes < _MOST_UNSENT_BYTES:
                machine.streams.carry()
        except (PeerLost, Corrupt) as error:
            machine.lost = error

    def _take(self, machine: _Machine, message: Message) -> None:
        match message:
            case MemberOpened():
                ours, theirs = socket.socketpair()
                machine.streams.add(message.connection, ours)
                assert self._serve is not None
                threading.Thread(
                    target=self._serve, args=(theirs,), name="echelon-member", daemon=True
                ).start()
            case MemberSaid() | MemberGone():
                machine.streams.hear(message)
            case Published():
                machine.published = message.number
                self._changed.notify_all()
            case Progressed():
                machine.told_at = time.monotonic()
                machine.seen = {
                    one.rank: (
                        WorkerSeen(
                            operation=one.operation,
                            phase=WorkPhase(one.phase),
                            batches=one.batches,
                            rounds=one.rounds,
                        ),
                        one.stopped,
                    )
                    for one in message.workers
                }
            case _:
                machine.kept.append(message)

    def _taken(self, machine: _Machine) -> list[Message]:
        """What the launcher's own thread has not seen yet; raises once the agent is gone."""
        with self._changed:
            kept, machine.kept = machine.kept, []
            if machine.lost is not None and not kept:
                raise machine.lost
            return kept
