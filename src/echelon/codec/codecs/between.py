"""Between: full precision inside a site, a codec on the thin links between sites.

Workers of a site add up their gradients as they are; each then exchanges one part of every parameter with
its counterparts of the other sites, encoded. Sites are the groups of the run: those of --groups, or of a
lab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.codec.codec import CODECS, Codec, StandIn
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Between(StandIn):
    """A codec between sites only; inside a site gradients are added in full precision."""

    name: ClassVar[str] = "between"
    codec: str = "top-k(ratio=0.01)"

    def __post_init__(self) -> None:
        if isinstance(self.inner, StandIn):
            raise ConfigError(
                f"{self.codec} stands for another codec",
                where="codec between",
                fix="name the codec itself; auto alone chooses per level as well",
            )
        if self.inner.whole:
            raise ConfigError(
                f"{self.codec} writes whole parameters, and workers of a site have parts of them",
                where="codec between",
                fix="use top-k, one-bit or another codec that writes elements",
            )

    @property
    def inner(self) -> Codec:
        """What is used between sites."""
        return CODECS.build(self.codec, where="codec between")
