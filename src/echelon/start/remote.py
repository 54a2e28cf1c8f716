"""Workers on other machines: which machine gets which ranks, where they meet, what they are told."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec

from echelon.comm.meet import secret
from echelon.comm.meet.place import LISTEN_VARIABLE, PORT_VARIABLE, SERVERS_VARIABLE
from echelon.config.allowed import ALLOW_VARIABLE
from echelon.config.schema import RunSettings
from echelon.errors import ConfigError, LaunchError
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.agents.board import AgentBoard
from echelon.start.agents.driver import ConnectedAgent, introduce
from echelon.start.agents.gather import threads_each
from echelon.start.agents.invite import Joiner
from echelon.start.agents.pairs import meet
from echelon.start.agents.processes import AgentProcesses
from echelon.start.agents.protocol import AgentWorker, Begin
from echelon.start.hosts import Host, read_hosts
from echelon.start.launcher import LAUNCHERS, Wanted
from echelon.start.members import Members
from echelon.train.service import NODE_VARIABLE, RETURNS_VARIABLE

# What the user has set here also holds there; secrets travel over the agents' connections only.
_HANDED_ON = (
    "ECHELON_TLS_CERT", "ECHELON_TLS_KEY", "ECHELON_TLS_CA", "ECHELON_DATA",
    ALLOW_VARIABLE,
)  # fmt: skip
_MOST_COPIED_BYTES = 64 << 20


@contextmanager
def connected(settings: RunSettings) -> Iterator[list[ConnectedAgent]]:
    """One agent on each machine, none if the workers are to run here; all are gone at the end."""
    name = "ssh" if settings.on == "local" and settings.hosts else settings.on
    launcher = LAUNCHERS.build(name, where="--on")
    hosts = fitted(read_hosts(settings.hosts), settings.workers) if settings.hosts else []
    if launcher.name != "local":
        _check(settings)
    timeout_s = settings.join_timeout_s
    env = handed_on()
    wanted = Wanted(workers=settings.workers or 0, hosts=hosts, timeout_s=timeout_s, env=env)
    agents = launcher.connect(wanted)
    try:
        for agent in agents:
            agent.env = env if agent.private else {}
            agent.shared = env
        introduce(agents, timeout_s)
        meet(agents, port=settings.port, both_ways=bool(settings.servers))
        yield agents
    finally:
        for agent in agents:
            agent.handle.end()


def handed_on() -> dict[str, str]:
    """The variables of this process that workers need wherever they are, and the run's secret."""
    found = {name: os.environ[name] for name in _HANDED_ON if os.environ.get(name)}
    return found | secret.for_workers(os.environ)


def _check(settings: RunSettings) -> None:
    for name in ("lab", "speed", "delay"):
        if getattr(settings, name):
            raise ConfigError(
                f"--{name} emulates machines, and --hosts or --on names real ones",
                where=f"--{name}",
                fix="leave one of them out",
            )


def fitted(hosts: Sequence[Host], workers: int | None) -> list[Host]:
    """The hosts with as many slots as there are workers, from the first host on."""
    if workers is None:
        return list(hosts)
    if workers > sum(host.slots for host in hosts):
        raise ConfigError(
            f"{workers} workers do not fit the {sum(host.slots for host in hosts)} slots of the hosts",
            where="--workers",
            fix="give hosts more slots (a:4), or start fewer workers",
        )
    out, left = [], workers
    for host in hosts:
        taken = min(host.slots, left)
        left -= taken
        if taken:
            out.append(Host(host.name, taken))
    return out


def nodes(agents: Sequence[ConnectedAgent]) -> list[str]:
    """The machine of each rank: ranks of one machine are next to each other."""
    return [agent.node for agent in agents for _ in range(agent.slots)]


def threads_on(agents: Sequence[ConnectedAgent]) -> dict[str, int]:
    """How many threads each machine has cores for, for one of its workers."""
    return {agent.node: own for agent, own in zip(agents, threads_each(agents), strict=True)}


def with_threads(plan: Plan, agents: Sequence[ConnectedAgent], threads: int | None) -> Plan:
    """The plan with as many threads for each worker as its machine has cores for."""
    found = zip(agents, threads_each(agents), strict=True)
    each = [threads or own for agent, own in found for _ in range(agent.slots)]
    return replace(plan, workers=tuple(replace(w, threads=each[w.rank]) for w in plan.workers))


def start(
    agents: Sequence[ConnectedAgent],
    plan: Plan,
    settings: RunSettings,
    program: Sequence[str],
    folder: RunFolder,
    call: bytes = b"",
    *,
    members: Members | None = None,
    board: AgentBoard | None = None,
) -> AgentProcesses:
    """Start the plan's workers and servers. `members`: they may be lost, and `board` is how they ask."""
    common = {"WORLD_SIZE": str(len(plan.workers)), SERVERS_VARIABLE: str(len(plan.servers))}
    common[LISTEN_VARIABLE] = " ".join(dict.fromkeys(agent.meets_at[0] for agent in agents))
    if members is None:
        board = None
    else:
        common |= members.environment
    files = copied(Path(program[0])) if settings.copy else {}
    begins = []
    for agent, workers in zip(agents, _divided(agents, plan, settings, program), strict=True):
        address, port = agent.meets_at
        # The next port is for the script's own torch.distributed, if it uses it.
        torch_port = port + 1 if port < 65535 else port - 1
        env = {**common, "MASTER_ADDR": address, "MASTER_PORT": str(torch_port), PORT_VARIABLE: str(port)}
        env |= agent.env
        begins.append(
            Begin(
                run=folder.name,
                config=folder.config.read_text(),
                plan=folder.plan.read_text(),
                cwd=str(Path.cwd()),
                workers=[msgspec.structs.replace(one, env={**env, **one.env}) for one in workers],
                files=files,
                call=call,
                members=board is not None,
            )
        )
    return AgentProcesses(folder, agents, begins, saves=settings.saves, board=board)


def start_of_joiner(
    joiner: Joiner,
    agents: Sequence[ConnectedAgent],
    plan: Plan,
    settings: RunSettings,
    program: Sequence[str],
    folder: RunFolder,
    members: Members,
    digests: dict[str, str],
) -> Begin:
    """What a further machine is told: its workers are as the last one that was planned."""
    address, port = _for_joiner(joiner.agent, agents), agents[0].meets_at[1]
    said = joiner.agent.introduction
    threads = settings.threads or max(1, (said.cores if said is not None else 1) // len(joiner.slots))
    common = {
        **members.environment,
        SERVERS_VARIABLE: "0",
        LISTEN_VARIABLE: address,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port + 1 if port < 65535 else port - 1),
        PORT_VARIABLE: str(port),
        NODE_VARIABLE: joiner.agent.node,
        RETURNS_VARIABLE: "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
    }
    workers = [
        AgentWorker(
            rank=slot,
            node=joiner.agent.node,
            program=list(program),
            env={**common, "RANK": str(slot), "WORLD_SIZE": str(slot + 1), "LOCAL_RANK": str(place)},
            fork=False,
        )
        for place, slot in enumerate(joiner.slots)
    ]
    return Begin(
        run=folder.name,
        config=folder.config.read_text(),
        plan=folder.plan.read_text(),
        cwd="",
        workers=workers,
        files=copied(Path(program[0])) if settings.copy else {},
        call=b"",
        members=True,
        digests={} if settings.copy else digests,
    )


def _for_joiner(joiner: ConnectedAgent, agents: Sequence[ConnectedAgent]) -> str:
    """An address of the first machine: the way to it is the way to the others."""
    first = agents[0].introduction
    here = joiner.introduction
    if first is None or here is None or first.network == here.network != "":
        return agents[0].meets_at[0]
    known = [agent.meets_at[0] for agent in agents if not secret.is_loopback(agent.meets_at[0])]
    return [*known, *first.addresses, agents[0].meets_at[0]][0]


def _divided(
    agents: Sequence[ConnectedAgent], plan: Plan, settings: RunSettings, program: Sequence[str]
) -> list[list[AgentWorker]]:
    """The workers and servers that each agent starts."""
    names = [agent.node for agent in agents]
    places = [at for at, agent in enumerate(agents) for _ in range(agent.slots)]
    if [w.node for w in plan.workers] != [names[at] for at in places]:  # a plan with an order of its own
        places = [names.index(w.node) for w in plan.workers]
    jobs = [
        (places[w.rank], w.rank, w.node, w.threads, list(program), settings.start == "fork")
        for w in plan.workers
    ]
    jobs += [
        (names.index(node), rank, node, 1, ["-m", "echelon.server.process"], False)
        for rank, node in enumerate(plan.servers, start=len(plan.workers))
    ]
    divided: list[list[AgentWorker]] = [[] for _ in agents]
    on_node: Counter[str] = Counter()
    for at, rank, node, threads, what, fork in jobs:
        env = {"RANK": str(rank), "LOCAL_RANK": str(on_node[node])}
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        on_node[node] += 1
        divided[at].append(AgentWorker(rank=rank, node=node, program=what, env=env, fork=fork))
    return divided


def copied(script: Path) -> dict[str, bytes]:
    """The Python files below the script's folder, by their path from the current folder.

    A module or a function has no script: then it is the current folder itself.
    """
    here = Path.cwd().resolve()
    root = script.resolve().parent if script.is_file() else here
    if not root.is_relative_to(here):
        raise LaunchError(
            f"{script} is not below the current folder, so it cannot be copied to the same place",
            where="--copy",
            fix="start the run in the script's folder",
        )
    found: dict[str, bytes] = {}
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(here)
        if not any(part.startswith(".") or part in ("venv", "site-packages") for part in below.parts):
            found[str(below)] = path.read_bytes()
    size = sum(map(len, found.values()))
    if size > _MOST_COPIED_BYTES:
        raise LaunchError(
            f"the Python files below {root} have {size / 1e6:.0f} MB, too much to copy for each run",
            where="--copy",
            fix="put them on the other machines yourself",
        )
    return found
