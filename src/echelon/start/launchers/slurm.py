"""srun starts the agents: in a new allocation, or in that of the batch script or salloc that this runs in.

There is one task for each worker. Slurm gives CPUs, memory and devices to tasks, and decides which nodes
have room for how many; under its control groups a worker in a task of its own has exactly what was given.
Tasks of one node that may use the same CPUs and devices get one agent for all, which starts their workers
faster. Where to call back is in a variable, which srun hands on; it is on no command line.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import LaunchError
from echelon.start.agents.callback import INVITATION_VARIABLE, Reception
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.gather import gather
from echelon.start.engines.command_job import CommandJob
from echelon.start.launcher import Launcher, Wanted

_ANSWER_S = 10.0
_QUEUED = re.compile(r"job (\d+) queued")
_GROUP = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm(Launcher):
    """Tasks of Slurm's srun, in a new allocation or in the one that this runs in."""

    name: ClassVar[str] = "slurm"
    options: str = ""  # of srun, such as "--partition=gpu --time=1:00:00 --cpus-per-task=4"
    python: str = ""  # the interpreter there; default: the same path as here

    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """One agent in each task."""
        if wanted.hosts:
            raise LaunchError(
                "Slurm decides which nodes workers run on",
                where="--hosts",
                fix="leave it out, or ask for nodes: --on \"slurm(options='--nodelist=a,b')\"",
            )
        program = shutil.which("srun")
        if program is None:
            raise LaunchError(
                "there is no srun on this machine",
                where="--on slurm",
                fix="start the run on a login node or inside a job of a Slurm cluster; elsewhere, "
                "--on ssh or --on mpi",
            )
        count = wanted.workers or tasks_of(os.environ)
        argv = [program, *srun_options(count, os.environ), *shlex.split(self.options)]
        argv += [self.python or sys.executable, "-m", "echelon.start.agents.agent"]
        reception = Reception(wanted.timeout_s, wanted.env)
        text = reception.invitation(order_from="SLURM_PROCID").encode()
        try:
            job = SlurmJob(argv, {**os.environ, INVITATION_VARIABLE: text})
        except BaseException:
            reception.close()
            raise
        return gather(reception, job, count, engine="slurm", timeout_s=wanted.timeout_s)


def tasks_of(env: Mapping[str, str]) -> int:
    """How many tasks the allocation has in which a process with these variables runs; without one, 1."""
    if env.get("SLURM_NTASKS", "").isdigit():
        return int(env["SLURM_NTASKS"])
    groups = _GROUP.findall(env.get("SLURM_TASKS_PER_NODE", ""))  # such as 4(x2),1
    return sum(int(tasks) * int(nodes or 1) for tasks, nodes in groups) or 1


def srun_options(count: int, env: Mapping[str, str]) -> list[str]:
    """Options for so many tasks, in the allocation that these variables tell of, or in a new one."""
    options = [f"--ntasks={count}", "--export=ALL", "--mpi=none", "--input=none"]
    # An agent that is not needed ends early; neither that nor an agent's failure may end the others.
    options += ["--wait=0", "--kill-on-bad-exit=0"]
    if "SLURM_JOB_ID" not in env:
        return [*options, "--job-name=echelon"]
    if env.get("SLURM_CPUS_PER_TASK"):
        options.append(f"--cpus-per-task={env['SLURM_CPUS_PER_TASK']}")  # a step does not inherit it
    if env.get("SLURM_STEP_ID"):
        options.append("--overlap")  # started by srun: that step has the CPUs, and this one runs within it
    return options


class SlurmJob(CommandJob):
    """An srun, and what squeue says about its job while it waits."""

    def waiting_for(self) -> str:
        """The job's state, the reason, and how many are before it."""
        number = self._number()
        if not number:
            return super().waiting_for()
        queue = _squeue("--states=PENDING", "--sort=-p", "--format=%i|%P")
        own = _squeue(f"--jobs={number}", "--format=%T|%r|%P|%S")
        return described(number, own, queue) if own else super().waiting_for()

    def end(self) -> None:
        """End srun, and cancel its job if it has waited in the queue."""
        super().end()
        number = self._number()
        if number:
            _said(["scancel", number])

    def _number(self) -> str:
        found = _QUEUED.search(self._text())
        return found.group(1) if found else ""


def described(number: str, own: Sequence[str], queue: Sequence[str]) -> str:
    """A waiting job in words, from lines of squeue: its own, and those of all that wait by priority."""
    state, reason, partition, start = (*own[0].split("|"), "", "", "")[:4]
    text = f"job {number} is {state}" + (f" ({reason})" if reason not in ("", "None") else "")
    waiting = [line.split("|")[0] for line in queue if line.endswith(f"|{partition}")]
    if number in waiting:
        text += f", number {waiting.index(number) + 1} of {len(waiting)} that wait in partition {partition}"
    if state == "PENDING" and start not in ("", "N/A"):
        text += f", expected to start at {start} or earlier"
    return text


def _squeue(*options: str) -> list[str]:
    return _said(["squeue", "--noheader", *options]).splitlines()


def _said(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_ANSWER_S).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
