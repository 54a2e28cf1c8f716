"""Auto: none, or one of a few codecs, whichever takes the least time on the run's links.

A codec pays off if encoding and decoding take less time than it saves on the wire:

    encode + decode  <  (1 - 1/r) wire        r times smaller

Both are measured when the run begins: the links, and the codecs on this machine. On one machine there is
nothing to save, and nothing is measured. If sites are known, codecs that apply only between sites are
candidates too. On fast links codecs rarely beat dense gradients, so one must win by a margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.codec.codec import CODECS, Codec, StandIn
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCodec(StandIn):
    """Chooses none or the cheapest of some codecs, by measured links and speeds.

    `among` lists the candidates, separated by semicolons; `margin` is how many times faster one must be.
    """

    name: ClassVar[str] = "auto"
    among: str = "error-feedback(bf16); one-bit; top-k(ratio=0.01)"
    margin: float = 1.2

    def __post_init__(self) -> None:
        if self.margin < 1:
            raise ConfigError(
                f"margin cannot be {self.margin:g}", where="codec auto, margin", fix="give 1 or more"
            )
        for text, codec in self.candidates.items():
            if isinstance(codec, StandIn):
                raise ConfigError(
                    f"{text} cannot be a candidate",
                    where="codec auto, among",
                    fix="name codecs other than auto and between",
                )
            if codec.momentum:
                raise ConfigError(
                    f"{text} applies momentum, so the optimizer would have to know whether it is chosen",
                    where="codec auto, among",
                    fix=f"use {codec.name}(momentum=0, ...), or top-k",
                )

    @property
    def candidates(self) -> dict[str, Codec]:
        """The codecs to choose from, by their text."""
        texts = [text.strip() for text in self.among.split(";")]
        return {text: CODECS.build(text, where="codec auto, among") for text in texts if text}
