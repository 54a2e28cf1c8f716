"""Machines that ssh reaches: one connection each, with the user's own configuration, keys and aliases.

The agent talks over the connection, so nothing else has to be open towards the launcher's machine. Nothing
secret is on a command line. When the connection breaks, the agent ends its workers.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import IO, ClassVar

from echelon.errors import LaunchError
from echelon.start.agents.channel import Channel
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.hosts import Host
from echelon.start.launcher import Launcher, Wanted

_MOST_TEXT = 2000
_END_S = 2.0


class SshProcess:
    """The ssh client of one agent."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        self._process = process
        self._errors = errors

    def why(self) -> str:
        """What ssh, or the other machine, has printed; or its exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        self._errors.seek(0)
        said = self._errors.read()[-_MOST_TEXT:].decode(errors="replace").strip()
        code = self._process.poll()
        return said or (f"ssh ended with exit code {code}" if code is not None else "")

    def end(self) -> None:
        """End the client; the agent ends with its connection."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ssh(Launcher):
    """Machines that ssh reaches, named by --hosts."""

    name: ClassVar[str] = "ssh"
    python: str = ""  # the interpreter there; default: the same path as here
    command: str = "ssh"  # the client, with options if wanted

    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """One connection for each host."""
        if not wanted.hosts:
            raise LaunchError("ssh needs to know the machines", where="--on ssh", fix="--hosts a:2,b:4")
        client = shlex.split(self.command)
        if shutil.which(client[0]) is None:
            raise LaunchError(
                f"there is no {client[0]} on this machine", where="--on ssh", fix="install OpenSSH's client"
            )
        agents: list[ConnectedAgent] = []
        try:
            for host in wanted.hosts:
                agents.append(self._open(client, host, wanted.timeout_s))  # noqa: PERF401 - ended on error
        except BaseException:
            for agent in agents:
                agent.handle.end()
            raise
        return agents

    def _open(self, client: list[str], host: Host, timeout_s: float) -> ConnectedAgent:
        python = self.python or sys.executable
        # A login shell of the user's runs this; exec, so that the agent is what the connection's end ends.
        remote = f"exec {shlex.quote(python)} -m echelon.start.agents.agent"
        argv = [
            *client,
            "-T",
            "-o", "BatchMode=yes",
            "-o", f"ConnectTimeout={max(1, round(timeout_s))}",
            "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3",
            host.name,
            remote,
        ]  # fmt: skip
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by SshProcess
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        # Descriptors of our own: the Popen's files would be closed with it.
        channel = Channel(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()), peer=host.name)
        process.stdin.close()
        process.stdout.close()
        return ConnectedAgent(
            node=host.name,
            channel=channel,
            handle=SshProcess(process, errors),
            slots=host.slots,
            private=True,
        )
