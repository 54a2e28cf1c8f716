"""The settings of a run: each with its type, its default and its help.

The command line's options, the keys of `echelon.toml` and the output of `echelon config show` come from
these classes. RunSettings is the table [run]; the fields that TrainSettings adds are the table [train].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from echelon.config.choices import (
    CHOICES,
    LARGEST_FLOAT32,
    Choices,
    FactorRule,
    Integrity,
    Overlap,
    Transport,
    check_above,
    check_at_least,
    check_servers,
    choice,
    flag,
    setting,
)
from echelon.config.every import Every
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """How many workers, where, and how they share the work."""

    workers: int | None = setting(None, "How many workers. Default: one per node of the lab, else one.")
    name: str | None = setting(
        None, "The name of the run's folder. Default: the name of the script or model."
    )
    runs: str = setting("runs", "The folder in which the run's folder is made.")
    plan: str | None = setting(
        None,
        "Follow a plan's file, from `echelon plan -o`, perhaps edited; none makes no plan. Default: one is "
        "made if machines and job are known.",
    )
    shares: str = setting(
        "auto",
        "Parts of a batch: auto (by measured speed), equal, by-speed (stated), or numbers: 4,2,1,1.",
    )
    speed: str | None = setting(
        None, "Emulate slower processors, without root: a speed in (0, 1] per worker: 1,0.5,0.5,0.25."
    )
    delay: str | None = setting(None, 'Delay workers at every step, e.g. by "normal(0, 0.25)" seconds.')
    delayed: float = setting(0.5, "The fraction of workers that --delay applies to, highest ranks first.")
    lab: str | None = setting(
        None, "Place the workers in an emulated cluster: a lab file, or a shipped one."
    )
    on: str = setting("local", "What starts the workers: local, or a launcher (`echelon list launcher`).")
    hosts: str | None = setting(
        None, "Machines, with workers on each: a:2,b:4, or a file. By ssh, if --on says nothing else."
    )
    copy: bool = setting(False, "Copy the script's folder to the other machines, for this run.")
    transport: Transport = choice("transport")  # noqa: RUF009
    integrity: Integrity = choice("integrity")  # noqa: RUF009
    collective: str = choice("collective")
    codec: str = choice("codec")
    sync: str = choice("sync")
    verify: str = choice("verify")
    groups: str | None = setting(
        None,
        "Groups of workers, for levels and codecs: sizes 4,4, or ranks 0,1;2,3. Default: a lab's sites.",
    )
    servers: int = setting(
        0, "Parameter servers: processes besides the workers; in a lab, on its last nodes."
    )
    colocate_servers: bool = setting(False, "Put the servers on the workers' nodes, from the first on.")
    replicas: int = choice("replicas")
    parallel: str = choice("parallel")
    local: Literal["none", "auto"] = setting(
        "none",
        "On one machine, auto measures for up to 5 s how to use it: workers, threads, chunks.",
    )
    pin: Literal["none", "cores", "numa"] = setting(
        "none",
        "On one machine: each worker has cores of its own (cores), or those of a NUMA node (numa).",
    )
    overlap: Overlap = choice("overlap")  # noqa: RUF009
    factors: FactorRule = choice("factors")  # noqa: RUF009
    start: Literal["fork", "exec"] = setting(
        "fork", "Fork workers from a process that has imported torch, or let each import it (exec)."
    )
    threads: int | None = setting(None, "Threads per worker. Default: the usable cores over the workers.")
    port: int | None = setting(None, "The port where workers meet. Default: a free one.")
    seed: int = choice("seed")
    min_workers: int | None = setting(
        None,
        "Go on when workers are killed or stuck, as long as so many are left. Default: a loss ends it.",
    )
    respawn: int = setting(
        3,
        "With --min-workers: how often in a row a lost worker is started again. 0: never.",
    )
    leave_out: str = setting(
        "none",
        "With --min-workers: leave out workers that slow the others down, as a detector says, until they "
        "are well: median-mad, or `echelon list detector`.",
    )
    join_timeout_s: float = choice("join_timeout_s")
    round_timeout_s: float = choice("round_timeout_s")
    checkpoint: str | None = setting(
        None,
        "Save in this folder, and continue from its newest checkpoint, if there is one. Default with "
        "--checkpoint-every: checkpoints in the run's folder.",
    )
    checkpoint_every: str | None = setting(
        None,
        "How often to save: 5min, 500steps or 1epoch. Default with --checkpoint: 1epoch. On SIGTERM a last "
        "one is written.",
    )
    checkpoint_keep: int = setting(3, "How many checkpoints stay, the newest ones.")
    checkpoint_best: str | None = setting(
        None,
        "One more stays, the best: loss, accuracy, or NAME:min, NAME:max. Saves at the end of every epoch.",
    )

    def __post_init__(self) -> None:
        check_at_least(self, "workers", 1)
        check_at_least(self, "min_workers", 1)
        check_at_least(self, "respawn", 0)
        check_at_least(self, "checkpoint_keep", 1)
        if self.checkpoint_every is not None:
            Every.parse(self.checkpoint_every, where="--checkpoint-every")
        check_at_least(self, "threads", 1)
        check_at_least(self, "servers", 0)
        if self.pin != "none" and (self.lab or self.hosts or self.on != "local"):
            raise ConfigError(
                "workers are pinned to cores on one machine only",
                where="--pin",
                fix="leave out --pin, or --lab, --hosts and --on",
            )
        if self.replicas and self.replicas >= self.servers:
            raise ConfigError(
                f"{self.replicas} replicas of each part need more servers than {self.servers}",
                where="--replicas",
                fix=f"start at least --servers {self.replicas + 1}",
            )
        check_servers(self.servers, self.choices, sums=self.sync == "full")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"{self.port} is not a port", where="--port", fix="give 1 to 65535")
        if not 0 <= self.delayed <= 1:
            raise ConfigError(f"{self.delayed:g} is not a fraction", where="--delayed", fix="give 0 to 1")

    @property
    def choices(self) -> Choices:
        """The choices that are also the plan's."""
        return Choices(**{name: getattr(self, name) for name in CHOICES})

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints by itself."""
        return self.checkpoint is not None or self.checkpoint_every is not None

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

    model: str = setting("lenet", "The model: see `echelon list model`.")
    data: str = setting("digits", "The data set: see `echelon list data`.")
    epochs: int = setting(3, "How many passes over the data.")
    batch: int = setting(64, "The global batch: the samples of all workers together in a step.")
    optimizer: Literal["sgd", "adamw"] = setting("sgd", "The optimizer.")
    lr: float = setting(0.02, "The learning rate.")
    momentum: float = setting(0.9, "The momentum of sgd.")
    weight_decay: float = setting(0.0, "The weight decay.")
    until_accuracy: float | None = setting(None, "Stop when the test accuracy reaches this, e.g. 0.95.")
    loader_workers: int = setting(0, "Processes per worker that load data.")

    def __post_init__(self) -> None:
        # Not super(): slots=True replaces the class, and a bare super() refers to the old one.
        RunSettings.__post_init__(self)
        check_at_least(self, "epochs", 1)
        check_at_least(self, "batch", 1)
        check_at_least(self, "loader_workers", 0)
        check_at_least(self, "momentum", 0)
        check_at_least(self, "weight_decay", 0)
        check_above(self, "lr", 0)
        for name in ("lr", "momentum", "weight_decay"):
            if getattr(self, name) > LARGEST_FLOAT32:
                raise ConfigError(
                    f"{name.replace('_', ' ')} is {getattr(self, name):g}, which float32 cannot hold",
                    where=flag(name),
                    fix="give a smaller number",
                )
        if self.until_accuracy is not None and not 0 < self.until_accuracy <= 1:
            raise ConfigError(
                f"{self.until_accuracy:g} is not an accuracy", where="--until-accuracy", fix="give 0 to 1"
            )


SECTIONS: dict[str, type[RunSettings]] = {"run": RunSettings, "train": TrainSettings}


def section_of(name: str) -> str:
    """The TOML table that a setting belongs to."""
    return "run" if name in {f.name for f in fields(RunSettings)} else "train"
