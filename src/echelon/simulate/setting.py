"""What is simulated: the workers, the model and data, the durations and the evaluations.

A result depends only on the setting and the policy, so it can be reproduced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from echelon.errors import ConfigError
from echelon.simulate.profile import Profile
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A virtual cluster and what it trains.

    `batch` is per worker. `speeds` (1 is full speed) and `links` (bytes per second, instead of the
    profile's) are per worker, or empty. `groups`, if any, contain each worker once. `delay` slows the
    fraction `delayed` of workers, the highest ranks. There is one run for each of `seeds` seeds, starting
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
