"""Slows a node's CPU down with a quota in the kernel's `cpu` control group, v1 or v2.

Every process of a node enters the node's group before its program starts, so that all its threads are in
it. A quota is some microseconds of CPU time in each period; a short period keeps the slowdown smooth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from echelon.cluster.lab.names import stem_id
from echelon.errors import LabError

_PERIOD_US = 20_000
# The kernel refuses quotas below 1 ms and periods above 1 s.
_LEAST_QUOTA_US = 1_000
_LONGEST_PERIOD_US = 1_000_000
# The kernel's usual and largest weights of a group, for versions 1 and 2 of the interface.
_WEIGHTS = {1: ("cpu.shares", 1024, 262_144), 2: ("cpu.weight", 100, 10_000)}


@dataclass(frozen=True, slots=True)
class Controller:
    """Where CPU groups are mounted, and the version of the interface."""

    version: int
    root: Path

    def labs(self, prefix: str) -> list[str]:
        """The ids of labs that have groups here."""
        found = (stem_id(path.name, prefix) for path in self.root.iterdir() if path.is_dir())
        return [lab for lab in found if lab is not None]


def find_controller(mounts: str | None = None) -> Controller | None:
    """The mounted `cpu` controller that can set quotas, or None. `mounts` replaces /proc/mounts."""
    if mounts is None:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        root = Path(place.replace("\\040", " "))
        if kind == "cgroup" and "cpu" in options.split(",") and (root / "cpu.cfs_quota_us").exists():
            return Controller(1, root)
        if kind == "cgroup2" and "cpu" in _read(root / "cgroup.controllers").split():
            return Controller(2, root)
    return None


def quota_us(cpu: float) -> tuple[int, int]:
    """Quota and period, in microseconds, for this number of cores."""
    period = _PERIOD_US
    if cpu * period < _LEAST_QUOTA_US:
        period = min(round(_LEAST_QUOTA_US / cpu), _LONGEST_PERIOD_US)
    return max(round(cpu * period), _LEAST_QUOTA_US), period


class CpuGroups:
    """The groups of one lab: one per node, which may have subgroups."""

    def __init__(self, controller: Controller, stem: str) -> None:
        self.controller = controller
        self.path = controller.root / stem

    def of(self, node: str) -> Path:
        """A node's group. The prefix separates node names from the kernel's own files."""
        return self.path / f"node-{node}"

    def create(self) -> None:
        """Create the lab's own group, which contains the nodes' groups."""
        self._do("make a CPU group", self.path.mkdir)
        if self.controller.version == 2:
            for group in (self.controller.root, self.path):
                self._write(group / "cgroup.subtree_control", "+cpu")

    def add(self, node: str, cpu: float | None) -> None:
        """Create a node's group with its CPU limit."""
        self._do("make a CPU group", self.of(node).mkdir)
        if cpu is not None:
            self.limit(node, cpu)

    def limit(self, node: str, cpu: float | None) -> None:
        """Limit a node to this number of cores from now on; None is unlimited."""
        group = self.of(node)
        quota, period = quota_us(cpu) if cpu is not None else (-1, _PERIOD_US)
        if self.controller.version == 2:
            self._write(group / "cpu.max", f"{quota if quota > 0 else 'max'} {period}")
            return
        self._write(group / "cpu.cfs_period_us", str(period))
        self._write(group / "cpu.cfs_quota_us", str(quota))

    def prefer(self, preferred: bool) -> None:
        """Let the lab's nodes go before the machine's other programs, so that they have their quotas.

        Only for quotas that leave time to others.
        """
        file, usual, most = _WEIGHTS[self.controller.version]
        self._write(self.path / file, str(most if preferred else usual))

    def limit_of(self, node: str) -> float | None:
        """A node's current limit in cores; None is unlimited."""
        group = self.of(node)
        if self.controller.version == 2:
            quota, _, period = _read(group / "cpu.max").strip().partition(" ")
        else:
            quota = _read(group / "cpu.cfs_quota_us").strip()
            period = _read(group / "cpu.cfs_period_us").strip()
        if quota in ("", "max", "-1"):
            return None
        return int(quota) / int(period)

    def pids(self, group: Path | None = None) -> set[int]:
        """The processes in a group and its subgroups; by default those of the whole lab."""
        files = (group or self.path).glob("**/cgroup.procs")
        return {int(pid) for file in files for pid in _read(file).split()}

    def lift_quotas(self) -> None:
        """Remove all limits, so that processes can end quickly."""
        for group in self.path.glob("node-*"):
            try:
                self.limit(group.name.removeprefix("node-"), None)
            except LabError:
                continue  # another process is removing it

    def remove(self, group: Path | None = None, *, deadline_s: float = 5.0) -> None:
        """Remove a group, or the whole lab's, once its processes are gone."""
        top = group or self.path
        until = time.monotonic() + deadline_s
        while top.exists():
            for path in sorted((p for p in top.glob("**/") if p.is_dir()), reverse=True):
                _rmdir(path)
            if not top.exists():
                return
            if time.monotonic() > until:
                raise LabError(
                    f"the CPU group still holds processes {sorted(self.pids(top))}",
                    where=str(top),
                    fix="end them and run: echelon lab down",
                )
            time.sleep(0.02)

    def _write(self, file: Path, text: str) -> None:
        self._do(f"write {text!r}", lambda: file.write_text(text, encoding="ascii"), file)

    def _do(self, what: str, action: Callable[[], object], where: Path | None = None) -> None:
        try:
            action()
        except OSError as error:
            raise LabError(
                f"cannot {what}: {error.strerror}",
                where=str(where or self.path),
                fix="allow writing to the cpu control group: containers often forbid it",
            ) from error


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return  # still busy, or gone already: the caller tries again


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
