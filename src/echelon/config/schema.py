"""The settings of a run: every one with its type, its default and its help.

The command line's options, the keys of `echelon.toml` and the output of `echelon config show` are all
made from these classes. RunSettings is the table [run], what TrainSettings adds is the table [train].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from echelon.errors import ConfigError

_SEEDS = 2**63  # as far as TOML's whole numbers go


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How many workers, where, and how they share the work."""

    workers: int | None = _setting(None, "How many workers. Default: one per node of the lab, else one.")
    name: str | None = _setting(None, "What the run's folder is called. Default: what is run.")
    runs: str = _setting("runs", "The folder in which the run's folder is made.")
    shares: str = _setting("equal", "Parts of a batch: equal, by-speed, or a number per worker: 4,2,1,1.")
    speed: str | None = _setting(
        None, "Emulate slower processors, without root: a speed in (0, 1] per worker: 1,0.5,0.5,0.25."
    )
    delay: str | None = _setting(None, 'Hold workers up at every step, e.g. "normal(0, 0.25)" seconds.')
    delayed: float = _setting(0.5, "The fraction of workers that --delay applies to, highest ranks first.")
    lab: str | None = _setting(
        None, "Place the workers in an emulated cluster: a lab file, or a shipped one."
    )
    transport: Literal["auto", "shm", "tcp", "c10d"] = _setting(
        "auto", "How bytes move: shared memory on one machine, TCP between machines, or torch.distributed."
    )
    collective: str = _setting("auto", "How gradients are summed: see `echelon list collective`.")
    codec: str = _setting("none", "How gradients are written on the wire: see `echelon list codec`.")
    sync: str = _setting("full", "When workers agree: see `echelon list sync`.")
    groups: str | None = _setting(
        None,
        "Groups of workers, for levels and codecs: sizes 4,4, or ranks 0,1;2,3. Default: a lab's sites.",
    )
    servers: int = _setting(
        0, "Parameter servers: processes besides the workers; in a lab, on its last nodes."
    )
    colocate_servers: bool = _setting(False, "Put the servers on the workers' nodes, from the first on.")
    replicas: int = _setting(0, "Other servers that keep a copy of each server's part, with every update.")
    overlap: Literal["backward", "step"] = _setting(
        "backward",
        "What hides communication: backward, or also the optimizer and the next forward pass (step).",
    )
    factors: Literal["auto", "always", "never"] = _setting(
        "auto", "Send the factors of linear layers' gradients in their place: where cheaper, or as said."
    )
    start: Literal["fork", "exec"] = _setting(
        "fork", "Fork workers from a process that has imported torch, or let each import it (exec)."
    )
    threads: int | None = _setting(None, "Threads per worker. Default: the usable cores over the workers.")
    port: int | None = _setting(None, "The port where workers meet. Default: a free one.")
    seed: int = _setting(0, "Fixes the order of the data and, in `echelon train`, the initial weights.")
    join_timeout_s: float = _setting(60.0, "How long to wait for all workers to join.")
    round_timeout_s: float = _setting(300.0, "How long a worker may keep the others waiting at a round.")

    def __post_init__(self) -> None:
        _at_least(self, "workers", 1)
        _at_least(self, "threads", 1)
        _at_least(self, "servers", 0)
        _at_least(self, "replicas", 0)
        if self.replicas and self.replicas >= self.servers:
            raise ConfigError(
                f"{self.replicas} replicas of each part need more servers than {self.servers}",
                where="--replicas",
                fix=f"start at least --servers {self.replicas + 1}",
            )
        sums = self.sync == "full"
        if self.servers and self.transport == "c10d":
            raise ConfigError(
                "servers use Echelon's own transports, not torch.distributed",
                where="--servers",
                fix="leave --transport at auto, or start no servers",
            )
        if self.servers and sums and (self.transport == "shm" or self.collective not in ("auto", "ps")):
            raise ConfigError(
                f"servers sum over TCP as collective ps, not {self.transport} and {self.collective}",
                where="--servers",
                fix="leave --transport and --collective at auto, or start no servers",
            )
        if not 0 <= self.seed < _SEEDS:
            raise ConfigError(f"seed is {self.seed}", where="--seed", fix=f"give 0 to {_SEEDS - 1}")
        _above(self, "join_timeout_s", 0)
        _above(self, "round_timeout_s", 0)
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"{self.port} is not a port", where="--port", fix="give 1 to 65535")
        if not 0 <= self.delayed <= 1:
            raise ConfigError(f"{self.delayed:g} is not a fraction", where="--delayed", fix="give 0 to 1")

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speeds as numbers; empty if none were given."""
        if not self.speed:
            return ()
        try:
            return tuple(float(part) for part in self.speed.split(","))
        except ValueError:
            raise ConfigError(
                f"{self.speed!r} is not a list of speeds", where="--speed", fix="give 1,0.5,0.5,0.25"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings(RunSettings):
    """What the built-in job trains."""

    model: str = _setting("lenet", "The model: see `echelon list model`.")
    data: str = _setting("digits", "The data set: see `echelon list data`.")
    epochs: int = _setting(3, "How often to go through the data.")
    batch: int = _setting(64, "The global batch: what all workers together compute in a step.")
    optimizer: Literal["sgd", "adamw"] = _setting("sgd", "The optimizer.")
    lr: float = _setting(0.02, "The learning rate.")
    momentum: float = _setting(0.9, "The momentum of sgd.")
    weight_decay: float = _setting(0.0, "The weight decay.")
    until_accuracy: float | None = _setting(None, "Stop when the test accuracy reaches this, e.g. 0.95.")
    checkpoint: str | None = _setting(None, "Save here after every epoch, and go on from here if possible.")
    loader_workers: int = _setting(0, "Processes per worker that load data.")

    def __post_init__(self) -> None:
        # Not super(): slots=True makes a new class, which a bare super() does not know.
        RunSettings.__post_init__(self)
        _at_least(self, "epochs", 1)
        _at_least(self, "batch", 1)
        _at_least(self, "loader_workers", 0)
        _at_least(self, "momentum", 0)
        _at_least(self, "weight_decay", 0)
        _above(self, "lr", 0)
        if self.until_accuracy is not None and not 0 < self.until_accuracy <= 1:
            raise ConfigError(
                f"{self.until_accuracy:g} is not an accuracy", where="--until-accuracy", fix="give 0 to 1"
            )


SECTIONS: dict[str, type[RunSettings]] = {"run": RunSettings, "train": TrainSettings}


def section_of(name: str) -> str:
    """The TOML table that a setting belongs to."""
    return "run" if name in {f.name for f in fields(RunSettings)} else "train"


def _at_least(settings: RunSettings, name: str, least: int) -> None:
    value = getattr(settings, name)
    if value is not None and not least <= value < math.inf:
        raise ConfigError(
            f"{name.replace('_', ' ')} is {value}", where=_flag(name), fix=f"give at least {least}"
        )


def _above(settings: RunSettings, name: str, bound: float) -> None:
    value = getattr(settings, name)
    if not bound < value < math.inf:
        raise ConfigError(
            f"{name.replace('_', ' ')} is {value:g}",
            where=_flag(name),
            fix=f"give a number above {bound:g}",
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
