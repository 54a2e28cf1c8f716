"""A lab that is up: seats to start programs in, and controls for its CPUs and links.

    with Lab.up(read_lab("two-sites"), run_id) as lab:
        for seat in lab.seats:
            subprocess.Popen([*seat.prefix, "python", "train.py"])

A lab is built completely or not at all. Any process can remove it with `down`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from echelon.cluster.lab import needs
from echelon.cluster.lab.commands import tool
from echelon.cluster.lab.cpu import CpuGroups, find_controller
from echelon.cluster.lab.names import INTERFACE, NAMESPACES, PREFIX, Names, short_id
from echelon.cluster.lab.network import LinkCondition, Network
from echelon.cluster.lab.processes import command_of, in_namespaces
from echelon.cluster.lab.remove import lab_ids, remove, uninterrupted
from echelon.cluster.lab.spec import LabSpec
from echelon.cluster.lab.state import LabState, claim, maker, read_states
from echelon.errors import LabError

# Enters the group before the program starts, so that all threads are in it; `exec` keeps the process id.
# If the hosts file cannot be mounted, only the nodes' names are missing; addresses still work.
_ENTER = 'echo $$ > "$0/cgroup.procs" && { mount --bind "$1" /etc/hosts 2>/dev/null; shift; exec "$@"; }'


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A place for one worker: a node, and the words to put before a command so that it runs there."""

    node: str
    site: str
    speed: float | None
    address: str
    interface: str
    prefix: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node as the kernel sees it now."""

    seat: Seat
    cpu: float | None
    processes: dict[int, str]


class Lab:
    """One emulated cluster that is up."""

    def __init__(self, state: LabState) -> None:
        controller = find_controller()
        if controller is None:
            raise LabError("the lab needs a kernel with CPU quotas", where=f"lab {state.spec.name}")
        self.state = state
        self.network = Network(state.spec, state.names, netem=state.netem)
        self.groups = CpuGroups(controller, state.names.stem)
        self.changing = threading.RLock()
        """Held by whoever changes links: faults, and the thread that varies them."""
        self._conditions: dict[str, LinkCondition] = {}

    @classmethod
    def up(cls, spec: LabSpec, run_id: str, *, keep: bool = False, prefix: str = PREFIX) -> Lab:
        """Build a lab, completely or not at all. With `keep`, it outlives this process."""
        needs.check(spec.name)
        netem = (spec.wants_latency or spec.varies) and needs.has_netem()
        pid, started = maker()
        state = LabState(
            id=short_id(run_id),
            prefix=prefix,
            run_id=run_id,
            spec=spec,
            kept=keep,
            created=time.time(),
            maker_pid=pid,
            maker_started=started,
            netem=netem,
            notes=spec.notes(cores=len(os.sched_getaffinity(0)), netem=netem, kept=keep),
        )
        claimed = False
        try:
            with uninterrupted():
                claim(state)
                claimed = True
            lab = cls(state)
            lab.groups.create()
            for node in spec.nodes:
                lab.groups.add(node.name, node.cpu)
            lab.network.build()
        except BaseException:
            if claimed:
                remove(state.names)
            raise
        return lab

    @classmethod
    def all(cls, prefix: str = PREFIX) -> list[Lab]:
        """The labs that are up, oldest first."""
        return [cls(state) for state in read_states(prefix)]

    @classmethod
    def find(cls, name: str, prefix: str = PREFIX) -> Lab:
        """The lab with that id, run id or name; labs made by `lab up` come before a run's own."""
        found = _named(name, cls.all(prefix))
        if len(found) > 1:
            raise LabError(
                f"{len(found)} labs are named {name!r}",
                fix=f"give the id of one: {', '.join(lab.id for lab in found)}",
            )
        if not found:
            up = ", ".join(f"{lab.name} ({lab.id})" for lab in cls.all(prefix)) or "none"
            raise LabError(
                f"lab {name!r} is not up",
                where=f"labs that are up: {up}",
                fix=f"run: echelon lab up {name}",
            )
        return found[0]

    @property
    def id(self) -> str:
        """The short id in all its names."""
        return self.state.id

    @property
    def name(self) -> str:
        """The name in its file."""
        return self.state.spec.name

    @property
    def spec(self) -> LabSpec:
        """The contents of its file."""
        return self.state.spec

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the user: what is not emulated, or how; quotas too large."""
        return self.state.notes

    @property
    def latency_emulated(self) -> bool:
        """Whether latencies are in effect."""
        return self.state.netem

    @property
    def in_use(self) -> bool:
        """Whether it belongs to a run that is still going on."""
        return not self.state.kept and self.state.maker_lives

    @property
    def seats(self) -> list[Seat]:
        """One per node, in the order of the file."""
        return [
            Seat(
                node=node.name,
                site=node.site,
                speed=node.cpu,
                address=self.state.names.address(index),
                interface=INTERFACE,
                prefix=self.prefix_of(node.name, self.groups.of(node.name)),
            )
            for index, node in enumerate(self.spec.nodes)
        ]

    def prefix_of(self, node: str, group: Path) -> tuple[str, ...]:
        """The words to put before a command so that it runs in a node, in this group."""
        # Not `ip netns exec`, which remounts /sys and would hide the groups.
        namespace = NAMESPACES / self.state.names.namespace(node)
        enter = (tool("nsenter") or "nsenter", f"--net={namespace}", "--")
        own_mounts = (tool("unshare") or "unshare", "--mount", "--propagation", "slave", "--")
        hosts = str(self.state.names.hosts)
        return (*enter, *own_mounts, tool("sh") or "sh", "-c", _ENTER, str(group), hosts)

    def pids(self, node: str) -> list[int]:
        """The processes in a node, found by its group and by its namespace."""
        self.spec.index_of(node)
        namespace = NAMESPACES / self.state.names.namespace(node)
        return sorted(self.groups.pids(self.groups.of(node)) | in_namespaces([namespace]))

    def set_cpu(self, node: str, cpu: float | None) -> None:
        """Limit a node to this number of cores from now on; None is unlimited."""
        self.spec.index_of(node)
        self.groups.limit(node, cpu)

    def lift_quotas(self) -> None:
        """Remove all CPU limits, for example while programs start and import."""
        self.groups.lift_quotas()

    def apply_quotas(self) -> None:
        """Give every node the CPU limit of its file."""
        for node in self.spec.nodes:
            self.groups.limit(node.name, node.cpu)

    @property
    def link_names(self) -> tuple[str, ...]:
        """Every node's link, by the node's name, and the uplinks."""
        return self.spec.link_names

    def condition(self, link: str) -> LinkCondition:
        """How a node's link or an uplink should behave: as in the file, or as a fault has changed it."""
        return self._conditions.get(link) or self.network.link(link).condition

    def set_rate(self, link: str, bytes_per_s: float | None) -> None:
        """Give a node's link or an uplink this rate in both directions; None is unlimited."""
        self._change(link, replace(self.condition(link), rate_bytes_per_s=bytes_per_s))

    def set_jitter(self, link: str, jitter_s: float) -> None:
        """Give a link this jitter. Without netem it takes effect while `variation.varying` runs."""
        self._change(link, replace(self.condition(link), jitter_s=jitter_s))

    def set_loss(self, link: str, loss: float) -> None:
        """Let a link lose this fraction. Without netem it takes effect while `variation.varying` runs."""
        self._change(link, replace(self.condition(link), loss=loss))

    def cut(self, link: str) -> None:
        """Silently drop all traffic on a node's link or an uplink."""
        self._change(link, replace(self.condition(link), is_cut=True))

    def restore(self, link: str) -> None:
        """Reconnect a node's link or an uplink and give it the rate, jitter and loss of its file."""
        self._change(link, self.network.link(link).condition)

    def _change(self, link: str, condition: LinkCondition) -> None:
        with self.changing:
            self._conditions[link] = condition
            self.settle(link)

    def settle(self, link: str) -> None:
        """Make the kernel's link as its condition says; jitter and loss only with netem."""
        condition = self.condition(link)
        with self.changing:
            if condition.is_cut:
                self.network.cut(link)
            else:
                self.network.mend(link)
            self.network.shape(link, condition)

    def status(self) -> list[NodeStatus]:
        """Every node with its current CPU limit and processes."""
        return [
            NodeStatus(
                seat=seat,
                cpu=self.groups.limit_of(seat.node),
                processes={pid: command_of(pid) for pid in self.pids(seat.node)},
            )
            for seat in self.seats
        ]

    def down(self) -> None:
        """End its processes and remove it. May be called repeatedly."""
        remove(self.state.names)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()


def take_down(name: str, prefix: str = PREFIX) -> list[str]:
    """Remove the labs with that id, run id or name; returns their ids.

    The lab of a run that is still going on is removed only by its id.
    """
    if name in lab_ids(prefix):  # works even if its state file cannot be read
        remove(Names(name, prefix))
        return [name]
    found = [lab for lab in Lab.all(prefix) if name in (lab.name, lab.state.run_id)]
    busy = [lab for lab in found if lab.in_use]
    if found and busy == found:
        raise LabError(
            f"lab {name!r} belongs to a run that is still going on, process {busy[0].state.maker_pid}",
            fix=f"end that run, or remove the lab under it: echelon lab down {busy[0].id}",
        )
    idle = [lab for lab in found if not lab.in_use]
    for lab in idle:
        lab.down()
    return [lab.id for lab in idle]


def _named(name: str, labs: list[Lab]) -> list[Lab]:
    """The labs that match a name, by the most specific criterion that matches any."""
    ways: tuple[Callable[[Lab], bool], ...] = (
        lambda lab: lab.id == name,
        lambda lab: lab.state.run_id == name,
        lambda lab: lab.name == name and lab.state.kept,
        lambda lab: lab.name == name,
    )
    for matches in ways:
        found = [lab for lab in labs if matches(lab)]
        if found:
            return found
    return []
