"""A real Slurm on this machine, with a configuration, ports and keys of its own, for tests: two nodes.

A controller, a daemon for each node and an authentication service, all in a temporary folder. Each node is
this machine under a host name of its own, and has four processors to give, whatever the machine has.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sinfo", "scancel")
_START_S = 60.0


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if absent:
        return f"{', '.join(absent)} not installed (apt-get install slurm-wlm munge)"
    if os.geteuid() != 0:
        return "slurmd starts tasks only for root"
    return ""


class SlurmCluster:
    """Starts all daemons, and waits until both nodes are idle."""

    def __init__(self) -> None:
        # A short path: names of sockets have at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "-D", "-c")
            for node in ("n1", "n2"):
                (self.folder / node).mkdir()
                self._start("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', node,
                            _program("slurmd"), "-D", "-c", "-N", node)  # fmt: skip
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def env(self) -> dict[str, str]:
        """What makes a command of Slurm use this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *argv: str) -> str:
        """Run a command of Slurm, and return what it prints."""
        done = subprocess.run(
            argv, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        """End all of it, and what it still runs."""
        if self._processes:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                self.command("scancel", f"--user={getpass.getuser()}")
        for process in reversed(self._processes):
            process.terminate()
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _configure(self) -> None:
        ports = _free_ports(3)
        host, user = socket.gethostname(), getpass.getuser()
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for name, port in zip(("n1", "n2"), ports[1:], strict=True)
        )
        (self.folder / "slurm.conf").write_text(f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={self.folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/%n.log
ReturnToService=2
KillWait=2
{nodes}
PartitionName=tests Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
""")
        (self.folder / "state").mkdir()

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge.pid", f"--log-file={self.folder}/munge.log",
            f"--seed-file={self.folder}/munge.seed", "--num-threads=2",
        )  # fmt: skip
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged to listen")

    def _start(self, name: str, *argv: str) -> None:
        self._processes.append(
            subprocess.Popen(
                [_program(name), *argv],
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def _wait(self) -> None:
        def idle() -> bool:
            try:
                return self.command("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * 2
            except AssertionError:
                return False  # the controller does not answer yet

        self._until(idle, "both nodes to be idle")

    def _until(self, done: object, what: str) -> None:
        assert callable(done)
        until = time.monotonic() + _START_S
        while not done():
            ended = [process.args[0] for process in self._processes if process.poll() is not None]  # type: ignore[index]
            if ended or time.monotonic() > until:
                logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))
                raise RuntimeError(f"waited for {what}; ended: {ended}\n{logs}")
            time.sleep(0.05)


def _program(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    assert found is not None, name
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
