"""Between: full precision inside a site, a codec on the slow links between sites.

Workers of a site add up their gradients unencoded; each then exchanges one part of every parameter,
encoded, with its counterparts of the other sites. Sites are the groups of the run: those of --groups, or of
a lab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.codec.codec import CODECS, Codec, StandIn
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Between(StandIn):
    """Uses a codec between sites only; inside a site gradients are added in full precision."""

    name: ClassVar[str] = "between"
    codec: str = "top-k(ratio=0.01)"

    def __post_init__(self) -> None:
        if isinstance(self.inner, StandIn):
            raise ConfigError(
                f"{self.codec} cannot be used inside between",
                where="codec between",
                fix="name another codec, such as top-k; --codec auto also considers codecs between sites",
            )
        if self.inner.whole:
            raise ConfigError(
                f"{self.codec} writes whole parameters, but here each worker of a site has a part of them",
                where="codec between",
                fix="use top-k, one-bit or another codec that writes elements",
            )

    @property
    def inner(self) -> Codec:
        """The codec used between sites."""
        return CODECS.build(self.codec, where="codec between")
