"""Which agents of an engine's job start workers, and in which order? One for each machine.

An engine has slots, and starts one agent in each. Ranks of one machine are to be neighbours, and workers of
one machine start faster from one process, so one agent of each machine starts the workers of all its slots,
and the others are dismissed. Agents that are confined to different cores stay by themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence

from echelon.errors import WorkerError
from echelon.start.agents.callback import EngineJob, Reception
from echelon.start.agents.driver import ConnectedAgent, expect
from echelon.start.agents.protocol import Finish, Introduction

_FLUSH_S = 1.0


class JobPart:
    """One agent's part of an engine's job. The job is ended when all its parts are."""

    def __init__(self, job: EngineJob, parts: set[JobPart]) -> None:
        self._job = job
        self._parts = parts
        parts.add(self)

    def why(self) -> str:
        """Why the engine has ended the job, if it has."""
        until = time.monotonic() + _FLUSH_S  # the engine may notice later than we do
        while (ended := self._job.why_ended()) is None and time.monotonic() < until:
            time.sleep(0.05)
        return ended or ""

    def end(self) -> None:
        """End this part, and with the last one the job."""
        self._parts.discard(self)
        if not self._parts:
            self._job.end()


def gather(
    reception: Reception, job: EngineJob, count: int, *, engine: str, timeout_s: float, share: bool = True
) -> list[ConnectedAgent]:
    """The agents of a job with so many slots, one for each machine; on an error the job is ended.

    `share`: one agent may start the workers of all slots of its machine.
    """
    parts: set[JobPart] = set()
    try:
        channels = reception.receive(count, job, engine)
        called = [
            ConnectedAgent(node=f"{engine} agent {at}", channel=channel, handle=JobPart(job, parts))
            for at, channel in enumerate(channels)
        ]
        said = expect(called, Introduction, timeout_s, "starting")
        for agent, words in zip(called, said, strict=True):
            assert isinstance(words, Introduction)
            agent.introduction = words
        return _chosen(called, share)
    except BaseException:
        job.end()
        raise
    finally:
        reception.close()


def _chosen(called: Sequence[ConnectedAgent], share: bool) -> list[ConnectedAgent]:
    said = [_of(agent) for agent in called]
    groups = grouped(said, share)
    for group, node in zip(groups, named([said[group[0]] for group in groups]), strict=True):
        called[group[0]].slots = len(group)
        called[group[0]].node = node
        for at in group[1:]:
            _dismiss(called[at])
    return [called[group[0]] for group in groups]


def grouped(said: Sequence[Introduction], share: bool = True) -> list[list[int]]:
    """The agents that one of them stands for, it first; machines in the order of their first slots."""
    order = sorted(range(len(said)), key=lambda at: said[at].order)
    first: dict[str, int] = {}
    for place, at in enumerate(order):
        first.setdefault(said[at].machine, place)
    order.sort(key=lambda at: first[said[at].machine])  # stable: by machine, then by slot
    groups: dict[tuple[object, ...], list[int]] = {}
    for at in order:
        key = (said[at].machine, tuple(said[at].cpus)) if share else (at,)
        groups.setdefault(key, []).append(at)
    return list(groups.values())


def named(said: Sequence[Introduction]) -> list[str]:
    """The nodes' names: their hosts'; of several machines with one name, all but the first get a number."""
    machines: dict[str, list[str]] = {}
    names = []
    for one in said:
        known = machines.setdefault(one.host, [])
        if one.machine not in known:
            known.append(one.machine)
        number = known.index(one.machine)
        names.append(f"{one.host}-{number + 1}" if number else one.host)
    return names


def _dismiss(agent: ConnectedAgent) -> None:
    agent.send(Finish())
    with contextlib.suppress(WorkerError):
        agent.channel.flush(_FLUSH_S)
    agent.channel.close()
    agent.handle.end()


def _of(agent: ConnectedAgent) -> Introduction:
    assert agent.introduction is not None
    return agent.introduction


def threads_each(agents: Sequence[ConnectedAgent]) -> list[int]:
    """How many threads each agent's workers get: the agent's cores over the workers that share them."""
    keys = [(_of(agent).machine, tuple(_of(agent).cpus)) for agent in agents]
    sharing: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for key, agent in zip(keys, agents, strict=True):
        sharing[key] += agent.slots
    return [max(1, _of(agent).cores // sharing[key]) for key, agent in zip(keys, agents, strict=True)]
