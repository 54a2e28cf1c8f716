"""A real sshd on this machine, with keys and a client configuration of its own, for tests."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

SERVER = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MARK = "ECHELON_TEST_SSHD"  # in the environment of all processes that came by this server
MISSING = "" if SERVER and shutil.which("ssh") else "sshd and ssh are not installed (openssh-server)"


class SshServer:
    """Answers under the names a and b; both are this machine."""

    def __init__(self, folder: Path, source: Path, env: dict[str, str] | None = None) -> None:
        assert SERVER is not None
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True
            )
        (folder / "authorized").write_bytes((folder / "user.pub").read_bytes())
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # A shell there knows nothing of this process's environment.
        self.python = folder / "python"
        self.mark = str(folder)
        set_there = {"PYTHONPATH": source, MARK: folder, **(env or {})}
        variables = " ".join(f'{name}="{value}"' for name, value in set_there.items())
        self.python.write_text(f'#!/bin/sh\n{variables} exec "{sys.executable}" "$@"\n')
        self.python.chmod(0o755)
        (folder / "server").write_text(
            f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {folder}/authorized\nPasswordAuthentication no\nPidFile none\n"
        )
        self.config = folder / "client"
        self.config.write_text(
            f"Host a b\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user\n"
            f"  IdentitiesOnly yes\n  StrictHostKeyChecking no\n  UserKnownHostsFile {folder}/known\n"
            "  LogLevel ERROR\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # where sshd separates its privileges
        self._process = subprocess.Popen([SERVER, "-D", "-e", "-f", str(folder / "server")], stderr=-3)
        self._wait(port)

    @property
    def launcher(self) -> str:
        """How `--on` names it."""
        return f'ssh(python="{self.python}", command="ssh -F {self.config}")'

    def processes(self) -> list[psutil.Process]:
        """The processes that were started by it."""
        found = psutil.process_iter(["environ"])
        return [one for one in found if (one.info["environ"] or {}).get(MARK) == self.mark]

    def _wait(self, port: int) -> None:
        until = time.monotonic() + 90
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > until or self._process.poll() is not None:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
