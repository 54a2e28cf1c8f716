"""How does a test get the engine of a launcher, or why is it missing? One file for each, by its name.

    local.py  this machine           ssh.py    a real sshd, see tests/sshd.py
    mpi.py    mpirun                 slurm.py  slurmctld and two slurmd, see tests/slurm.py
    ray.py    a Ray of its own       dask.py   a cluster of its own, three workers
    spark.py  sessions of the runs

`tests/conformance/test_launchers.py` runs every registered launcher on its engine. An engine that is not
installed has its tests skipped, with the reason, and the end of a test session lists it.
"""

from __future__ import annotations

import base64
import importlib
import os
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import psutil

ROOT = Path(__file__).parents[2]
PATH = {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
GONE_S = 30.0
MARK = "ECHELON_TEST_ENGINE"  # in the environment of all processes that an engine's runs have


class Engine(ABC):
    """An engine that is ready: `Engine(folder)` starts what it needs, `close` ends it.

    A test starts a run as a command of its own: `echelon run *words(2) train.py`, with `env` added to the
    environment; or `echelon.launch(..., **settings(2))` in a program with that environment.
    """

    name: ClassVar[str]  # the launcher's

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    @abstractmethod
    def missing(cls) -> str:
        """Why it cannot be tested here, and what to install; empty if it can."""

    @property
    def on(self) -> str:
        """What `--on` gets: the launcher's name, with options if the tests need any."""
        return self.name

    @property
    def env(self) -> dict[str, str]:
        """Variables that the launcher's process needs, such as the address of the engine."""
        return {MARK: str(self.folder)}

    def settings(self, workers: int) -> dict[str, Any]:
        """The settings of a run with so many workers."""
        return {"on": self.on, "workers": workers}

    def words(self, workers: int) -> list[str]:
        """The same as words of `echelon run`."""
        return [
            word for name, value in self.settings(workers).items() for word in (f"--{name}", str(value))
        ]

    def processes(self) -> list[psutil.Process]:
        """The processes of runs that are still there: launchers, what they have started, agents, workers.

        Not those of the engine that outlive a run. By default all that have the mark in their environment;
        an engine whose own processes have it too, or does not hand it on to its tasks, says how to
        find them.
        """
        found = psutil.process_iter(["environ", "status"])
        return [
            one
            for one in found
            if (one.info["environ"] or {}).get(MARK) == str(self.folder)
            and one.info["status"] != psutil.STATUS_ZOMBIE
        ]

    def close(self) -> None:  # noqa: B027 - most need it, some do not
        """End it. By default there is nothing to end."""


class KeptEngine(Engine):
    """An engine that a program of its own keeps up; it prints its address, and ends with its input."""

    def __init__(self, folder: Path, keeper: str, argument: str, env: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._keeper = subprocess.Popen(
            [sys.executable, "-c", keeper, argument],
            env={**os.environ, **PATH, MARK: str(folder), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        self.address = self._keeper.stdout.readline().strip()
        assert self.address

    def processes(self) -> list[psutil.Process]:
        """The engine's own processes have the mark too, but are not Echelon's."""
        return [one for one in super().processes() if is_of_a_run(one)]

    def close(self) -> None:
        """End the program, and by it the engine."""
        self._keeper.communicate(timeout=60)


def is_of_a_run(process: psutil.Process) -> bool:
    """Whether a process is Echelon's, by its command line."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return any(word == "echelon" or word.startswith("echelon.") for word in words)


def wait_until_gone(engine: Engine) -> None:
    """Wait until no process of a run is left; what is left after a while is named."""
    until = time.monotonic() + GONE_S
    while left := engine.processes():
        assert time.monotonic() < until, left
        time.sleep(0.05)


def engine_of(launcher: str) -> type[Engine]:
    """The engine's class: the one in the file with the launcher's name."""
    module = importlib.import_module(f"engines.{launcher.replace('-', '_')}")
    (found,) = (
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, Engine) and thing.__module__ == module.__name__
    )
    return found


def decoded(word: str) -> bytes:
    """What is encoded as base64 in a word of a command line, anywhere in it."""
    texts = re.findall(r"[A-Za-z0-9+/]{16,}", word)
    whole = (text if len(text) % 4 != 1 else text[:-1] for text in texts)
    return b" ".join(base64.b64decode(text + "=" * (-len(text) % 4)) for text in whole)
