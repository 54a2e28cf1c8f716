"""Machines for tests: network namespaces with an sshd and a host name each, joined by networks.

A launcher's namespace reaches all of them by ssh, over a network on which they do not reach each other;
they reach each other only over the networks that a test asks for. Nothing outside is touched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from echelon.cluster.lab import needs
from leaks import LAB_PREFIX
from sshd import MARK, SERVER
from sshd import MISSING as NO_SSH

_SSH_PORT = 2222


def missing() -> str:
    """What this machine lacks; empty if nothing."""
    if NO_SSH:
        return NO_SSH
    lacking = needs.missing()
    return f"machines as namespaces need {', '.join(lacking)}" if lacking else ""


class Machines:
    """`networks` maps the first three numbers of its addresses to the machines on a network.

    With `host_name` all machines have that one, as copies of one installation do.

    The number of a machine's address is its place in `names`, from 1 on: with {"10.1.0": "ab"} machine b
    has 10.1.0.2. All have a container bridge with the same address, which leads nowhere.
    """

    def __init__(
        self,
        folder: Path,
        source: Path,
        names: Sequence[str],
        networks: Mapping[str, Sequence[str]],
        *,
        host_name: str = "",
    ) -> None:
        self.folder, self.names, self._host_name = folder, names, host_name
        self._prefix = f"{LAB_PREFIX}{secrets.token_hex(3)}"
        self._servers: list[subprocess.Popen[bytes]] = []
        try:
            self._build(networks)
            self._start_servers(source)
        except BaseException:
            self.close()
            raise

    def space(self, name: str) -> str:
        """The namespace of a machine; of the launcher, if the name is empty."""
        return f"{self._prefix}{name or 'launcher'}"

    def ip(self, name: str, line: str) -> None:
        """Change the network of a machine: `ip("a", "route add blackhole 10.1.0.2")`."""
        subprocess.run(["ip", "-n", self.space(name), *line.split()], check=True)

    @property
    def launcher(self) -> str:
        """How `--on` names it."""
        return f'ssh(python="{self.folder}/python", command="ssh -F {self.folder}/client")'

    def run(
        self, words: Sequence[str], cwd: Path, timeout_s: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """`echelon` with these words, in the launcher's namespace."""
        argv = ["ip", "netns", "exec", self.space(""), sys.executable, "-m", "echelon", *words]
        return subprocess.run(
            argv,
            cwd=cwd,
            env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def processes(self) -> list[psutil.Process]:
        """The processes that were started on the machines."""
        found = psutil.process_iter(["environ"])
        return [one for one in found if (one.info["environ"] or {}).get(MARK) == str(self.folder)]

    def _build(self, networks: Mapping[str, Sequence[str]]) -> None:
        for name in ("", *self.names):
            subprocess.run(["ip", "netns", "add", self.space(name)], check=True)
            self.ip(name, "link set lo up")
        self._network(0, "10.99.0", self.names)
        self.ip("", "addr add 10.99.0.254/24 dev net0")
        for at in range(len(self.names)):
            bridge = ["bridge", "-n", self.space(""), "link", "set", "dev", f"p0-{at}", "isolated", "on"]
            subprocess.run(bridge, check=True)
        for number, (subnet, members) in enumerate(networks.items(), start=1):
            self._network(number, subnet, members)
        for name in self.names:
            self.ip(name, "link add docker0 type veth peer name inside0")
            self.ip(name, "addr add 172.17.0.1/16 dev docker0")
            for device in ("docker0", "inside0"):
                self.ip(name, f"link set {device} up")

    def _network(self, number: int, subnet: str, members: Sequence[str]) -> None:
        self.ip("", f"link add net{number} type bridge")
        self.ip("", f"link set net{number} up")
        for at, name in enumerate(self.names):
            if name in members:
                port, device = f"p{number}-{at}", f"eth{number}"
                self.ip("", f"link add {port} type veth peer name {device} netns {self.space(name)}")
                self.ip("", f"link set {port} master net{number} up")
                self.ip(name, f"addr add {subnet}.{at + 1}/24 dev {device}")
                self.ip(name, f"link set {device} up")

    def _start_servers(self, source: Path) -> None:
        folder = self.folder
        for name in ("host", "user"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(keygen, check=True)
        shutil.copy(folder / "user.pub", folder / "authorized")
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\nPYTHONPATH="{source}" {MARK}="{folder}" exec "{sys.executable}" "$@"\n'
        )
        python.chmod(0o755)
        (folder / "server").write_text(
            f"Port {_SSH_PORT}\nHostKey {folder}/host\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"AuthorizedKeysFile {folder}/authorized\nPasswordAuthentication no\n"
            f"SetEnv PYTHONPATH={source} {MARK}={folder}\n"
        )
        (folder / "client").write_text(
            "".join(f"Host {n}\n  HostName 10.99.0.{at}\n" for at, n in enumerate(self.names, start=1))
            + f"Host *\n  Port {_SSH_PORT}\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  StrictHostKeyChecking no\n  UserKnownHostsFile {folder}/known\n  LogLevel ERROR\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in self.names:
            inside = f"hostname {self._host_name or name}; exec {SERVER} -D -e -f {folder}/server"
            argv = ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "sh", "-c", inside]
            self._servers.append(subprocess.Popen(argv, stderr=subprocess.DEVNULL))
        for name in self.names:
            self._wait(name)

    def _wait(self, name: str) -> None:
        client = ["ssh", "-F", str(self.folder / "client"), "-o", "ConnectTimeout=5", name, "true"]
        until = time.monotonic() + 90
        while subprocess.run(
            ["ip", "netns", "exec", self.space(""), *client], capture_output=True
        ).returncode:
            assert time.monotonic() < until, f"no sshd on {name}"
            time.sleep(0.1)

    def close(self) -> None:
        """End the servers and remove the namespaces."""
        for server in self._servers:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=10)
        for name in ("", *self.names):
            subprocess.run(["ip", "netns", "delete", self.space(name)], check=False, capture_output=True)
