"""What is simulated: the virtual cluster, what it trains, how long everything takes, what is evaluated.

Setting is all that a result depends on, besides the policy: the same Setting gives the same result.
SimulateSettings is what a user of `echelon simulate` writes: text with units. It makes a Setting of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from echelon.config.describe import described, like
from echelon.config.schema import RunSettings
from echelon.config.units import duration_s, rate_bytes_per_s
from echelon.errors import ConfigError
from echelon.plan.groups import parse_groups
from echelon.simulate.profile import Costs, Profile, VirtualLink
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A virtual cluster and what it trains.

    `batch` is per worker. `speeds` (1 is full speed) and `links` (bytes per second, instead of the
    profile's) are per worker, or empty. `groups`, if any, contain each worker once. `delay` slows the
    fraction `delayed` of workers, the highest ranks. Every transfer is later by a draw from `jitter`, and
    lost and sent again with probability `loss`. There is one run for each of `seeds` seeds, starting
    with `seed`. Without `gradients` nothing is learned, and only times are simulated. `profile` is measured
    if it is not given. Evaluations use `test_samples` test samples (0: all) and `train_samples` fixed
    training samples.
    """

    workers: int = 4
    model: str = "mlp"
    data: str = "digits"
    batch: int = 32
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    speeds: tuple[float, ...] = ()
    links: tuple[float, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    delay: str = ""
    delayed: float = 0.5
    jitter: str = ""
    loss: float = 0.0
    seconds: float = 10.0
    seed: int = 0
    seeds: int = 1
    evaluate_every_s: float | None = None
    test_samples: int = 0
    train_samples: int = 1000
    gradients: bool = True
    profile: Profile | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "batch", "seeds", "train_samples"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("momentum", "weight_decay", "test_samples", "seed"):
            _require(name, getattr(self, name), 0 <= getattr(self, name) < math.inf, "at least 0")
        for name in ("lr", "seconds"):
            _require(name, getattr(self, name), 0 < getattr(self, name) < math.inf, "a number above 0")
        _require("loss", self.loss, 0 <= self.loss < 1, "a fraction from 0 to below 1")
        every_s = self.evaluate_every_s
        if every_s is not None:
            _require("evaluate_every_s", every_s, 0 < every_s < math.inf, "a number above 0")
        if self.links and len(self.links) != self.workers:
            raise ConfigError(
                f"{len(self.links)} links for {self.workers} workers",
                where="links",
                fix="give one for each",
            )
        members = sorted(rank for group in self.groups for rank in group)
        if self.groups and (members != list(range(self.workers)) or not all(self.groups)):
            raise ConfigError(
                f"the groups {self.groups} do not contain each of {self.workers} workers exactly once",
                where="groups",
                fix="put each worker in one group",
            )
        for link in self.links:
            _require("links", link, 0 < link < math.inf, "bytes per second above 0")

    @property
    def cluster(self) -> ClusterInfo:
        """What a policy knows of this cluster, which has one server."""
        return ClusterInfo(
            workers=self.workers,
            servers=1,
            groups=self.groups,
            speeds=self.speeds,
            links=self.links,
            lr=self.lr,
            seed=self.seed,
        )

    @property
    def evaluations(self) -> tuple[float, ...]:
        """The times of evaluations, from the beginning to the end."""
        every_s = self.evaluate_every_s or self.seconds / 20
        count = math.ceil(self.seconds / every_s - 1e-9)
        return (*(index * every_s for index in range(count)), self.seconds)


def _require(name: str, value: float, holds: bool, wanted: str) -> None:
    if not holds:
        raise ConfigError(
            f"{name.replace('_', ' ')} is {value:g}",
            where="--" + name.replace("_", "-"),
            fix=f"give {wanted}",
        )


# Where Setting or Profile raises an error -> the option that the value came from.
_OPTION_OF = {
    "--evaluate-every-s": "--every",
    "links": "--link",
    "groups": "--groups",
    "profile, compute_s": "--compute",
    "costs, queue_s": "--server-costs",
    "costs, apply_s": "--server-costs",
    "costs, hand_s": "--server-costs",
    "link, latency_s": "--latency",
    "link, bytes_per_s": "--link",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSettings:
    """The options of `echelon simulate`, as they are written; everything is checked when one is made."""

    sync: tuple[str, ...] = described(
        ("full",),
        "A policy: see `echelon list sync`. Give several to compare them with the first.",
        metavar="POLICY",
    )
    workers: int = like(Setting, "workers", "How many workers.")
    servers: int = described(1, "How many servers. The virtual cluster always has one.")
    groups: str | None = described(None, "Groups of workers, for policies with levels: 4,4, or 0,1;2,3.")
    speed: str | None = described(None, "A speed in (0, 1] per worker: 1,0.5,0.5,0.25.")
    delay: str | None = described(None, 'Delay workers at every step: "normal(0, 0.25)" seconds.')
    delayed: float = like(Setting, "delayed", "The fraction of workers that --delay applies to.")
    model: str = like(Setting, "model", "The model: see `echelon list model`.")
    data: str = like(Setting, "data", "The data set: see `echelon list data`.")
    batch: int = like(Setting, "batch", "The batch of each worker.")
    optimizer: Literal["sgd", "adamw"] = like(Setting, "optimizer", "The optimizer.")
    lr: float = like(Setting, "lr", "The learning rate.")
    momentum: float = like(Setting, "momentum", "The momentum of sgd.")
    weight_decay: float = like(Setting, "weight_decay", "The weight decay.")
    seconds: float = like(Setting, "seconds", "Virtual seconds per run.")
    seed: int = like(Setting, "seed", "The first seed.")
    seeds: int = like(Setting, "seeds", "How many seeds.")
    no_gradients: bool = described(False, "Train nothing: simulate only the times.")
    compute: str | None = described(
        None, "How long a gradient takes: 20ms, or a number of seconds. Measured if not given."
    )
    server_costs: str | None = described(
        None,
        "How long the server takes for a push, an update, and sending weights: 1ms,2ms,1ms. "
        "Measured if not given.",
        metavar="QUEUE,APPLY,HAND",
    )
    link: str | None = described(None, "A rate such as 100mbit for all, or one per worker. Default: 1gbit.")
    latency: str | None = described(None, "The links' latency, such as 5ms. Default: 0.1ms.")
    jitter: str | None = described(None, 'Delay every transfer: "normal(0, 0.01)" seconds.')
    loss: float = like(Setting, "loss", "The fraction of transfers that are lost and sent again.")
    every: str | None = described(None, "Evaluate every so many virtual seconds. Default: 20 times.")
    test_samples: int = like(Setting, "test_samples", "How many test samples to evaluate on; 0 is all.")
    train_samples: int = like(Setting, "train_samples", "How many samples the train loss is computed on.")
    until_accuracy: float | None = described(
        None, "Also report when this test accuracy was reached, e.g. 0.95."
    )
    jobs: int | None = described(
        None, "Processes to simulate in; results are the same. Default: the usable cores."
    )

    def __post_init__(self) -> None:
        if self.servers != 1:
            raise ConfigError(
                f"{self.servers} servers: the virtual cluster has exactly one",
                where="--servers",
                fix="leave it out; policies that need a server have it",
            )
        if not 0 <= self.delayed <= 1:
            raise ConfigError(f"{self.delayed:g} is not a fraction", where="--delayed", fix="give 0 to 1")
        accuracy = self.until_accuracy
        if accuracy is not None and not 0 < accuracy <= 1:
            raise ConfigError(
                f"{accuracy:g} is not an accuracy", where="--until-accuracy", fix="give 0 to 1"
            )
        if self.jobs is not None:
            _require("jobs", self.jobs, self.jobs >= 1, "at least 1")
        try:
            self.setting()
            Profile(compute_s=1.0 if self.compute_s is None else self.compute_s, link=self.virtual_link)
            _ = self.costs
        except ConfigError as error:
            error.where = _OPTION_OF.get(error.where, error.where)
            raise

    def setting(self) -> Setting:
        """The Setting that these options describe, without its profile."""
        rates = self._rates
        return Setting(
            workers=self.workers,
            model=self.model,
            data=self.data,
            batch=self.batch,
            optimizer=self.optimizer,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            speeds=RunSettings(speed=self.speed).speeds,
            links=rates if len(rates) > 1 else (),
            groups=parse_groups(self.groups, self.workers) if self.groups else (),
            delay=self.delay or "",
            delayed=self.delayed,
            jitter=self.jitter or "",
            loss=self.loss,
            seconds=self.seconds,
            seed=self.seed,
            seeds=self.seeds,
            evaluate_every_s=None if self.every is None else duration_s(self.every, where="--every"),
            test_samples=self.test_samples,
            train_samples=self.train_samples,
            gradients=not self.no_gradients,
        )

    @property
    def compute_s(self) -> float | None:
        """Seconds per gradient; None if they are to be measured."""
        return None if self.compute is None else duration_s(self.compute, where="--compute")

    @property
    def costs(self) -> Costs | None:
        """The server's costs; None if they are to be measured."""
        if self.server_costs is None:
            return None
        parts = [duration_s(part, where="--server-costs") for part in self.server_costs.split(",")]
        if len(parts) != 3:
            raise ConfigError(
                f"{self.server_costs!r} are not three durations",
                where="--server-costs",
                fix="give the costs of a push, an update, and sending weights: 1ms,2ms,1ms",
            )
        return Costs(queue_s=parts[0], apply_s=parts[1], hand_s=parts[2])

    @property
    def virtual_link(self) -> VirtualLink:
        """The link of every worker that has none of its own."""
        usual = VirtualLink()
        latency_s = usual.latency_s
        if self.latency is not None:
            latency_s = duration_s(self.latency, where="--latency")
        return VirtualLink(latency_s=latency_s, bytes_per_s=(*self._rates, usual.bytes_per_s)[0])

    @property
    def _rates(self) -> tuple[float, ...]:
        if not self.link:
            return ()
        return tuple(rate_bytes_per_s(part, where="--link") for part in self.link.split(","))
