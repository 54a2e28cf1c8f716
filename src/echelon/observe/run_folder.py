"""The folder of one run: `runs/<time>-<name>/`.

    config.toml     every resolved setting
    plan.toml       the workers' shares, threads and speeds, and how they communicate
    events/         rank-N.jsonl of each worker, launcher.jsonl
    logs/           rank-N.log: a worker's output
    errors/         rank-N.json: why a worker failed
    summary.json    the figures of the whole run
    cluster.toml    machines, links and the job, as the first steps showed them
    command.json    the script or module with its arguments, and the folder it was started in
    checkpoints/    checkpoints, if the run saves some and no other folder was given
    control.json    where the launcher can be asked to let workers leave or join; gone at the end

While workers run a function, and not a script, there are also `call`, which holds it, and `results/`. While
the launcher of a lab asks how far workers are, there is `ready/`.

A folder is never reused; its name is the run's id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from echelon.errors import ConfigError
from echelon.observe.events import LAUNCHER


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str) -> RunFolder:
        """A new folder under `root`; two runs of the same second get different ones."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{_safe(name)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            for attempt in range(100):
                path = root / (stem if attempt == 0 else f"{stem}-{attempt + 1}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                return cls(path.resolve()).with_subfolders()
        except OSError as error:
            raise ConfigError(
                f"cannot create a run folder: {error.strerror}",
                where=str(root),
                fix="free some disk space or check permissions, or choose another folder with --runs",
            ) from error
        raise ConfigError(
            f"100 runs named {stem} exist already",
            where=str(root),
            fix="start the run again with another --name",
        )

    def with_subfolders(self) -> RunFolder:
        """Create the subfolders if they are missing."""
        for folder in (self.events, self.logs, self.errors):
            folder.mkdir(parents=True, exist_ok=True)
        return self

    @classmethod
    def find(cls, text: str, root: Path = Path("runs")) -> RunFolder:
        """An existing run: by path, by its folder's name under `root`, or "latest"."""
        if text == "latest":
            found = sorted(p for p in root.glob("*") if (p / "events").is_dir())
            if found:
                return cls(found[-1].resolve())
        for path in (Path(text), root / text):
            if (path / "events").is_dir():
                return cls(path.resolve())
        recent = sorted((p.name for p in root.glob("*") if (p / "events").is_dir()), reverse=True)
        known = f"recent runs: {', '.join(recent[:3])}" if recent else f"no run in {root}/ yet"
        raise ConfigError(f"there is no run {text!r}", where=str(root), fix=f"give its folder; {known}")

    @property
    def name(self) -> str:
        """The run's id."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.toml"

    @property
    def plan(self) -> Path:
        """The plan."""
        return self.path / "plan.toml"

    @property
    def cluster(self) -> Path:
        """Machines, links and the job, if they were profiled."""
        return self.path / "cluster.toml"

    @property
    def summary(self) -> Path:
        """The figures of the whole run."""
        return self.path / "summary.json"

    @property
    def events(self) -> Path:
        """The folder of events."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        """The folder of the workers' output."""
        return self.path / "logs"

    @property
    def errors(self) -> Path:
        """The folder of the workers' errors."""
        return self.path / "errors"

    @property
    def call(self) -> Path:
        """The function that the workers run, with its arguments; gone at the end of the run."""
        return self.path / "call"

    @property
    def results(self) -> Path:
        """The folder of what the function returned; gone at the end of the run."""
        return self.path / "results"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, if the run saves some and no other folder was given."""
        return self.path / "checkpoints"

    @property
    def command(self) -> Path:
        """What the run runs, and where it was started, for `echelon resume`."""
        return self.path / "command.json"

    @property
    def control(self) -> Path:
        """How `echelon leave` and `join` reach the launcher; only the user can read it."""
        return self.path / "control.json"

    @property
    def ready(self) -> Path:
        """Where workers say how far they are, see readiness.py; gone at the end of the run."""
        return self.path / "ready"

    def result_of(self, rank: int) -> Path:
        """What the function returned on one worker."""
        return self.results / f"rank-{rank}.result"

    def events_of(self, rank: int) -> Path:
        """One worker's events; rank -1 is the launcher."""
        return self.events / ("launcher.jsonl" if rank == LAUNCHER else f"rank-{rank}.jsonl")

    def log_of(self, rank: int) -> Path:
        """One worker's output."""
        return self.logs / f"rank-{rank}.log"

    def error_of(self, rank: int) -> Path:
        """The error of one worker; exists only if it failed."""
        return self.errors / f"rank-{rank}.json"


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[:60] or "run"
