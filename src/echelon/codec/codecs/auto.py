"""Auto: none, or one of a few codecs, whichever takes the least time on the links that there are.

A codec pays if encoding and decoding take less than what it saves on the wire:

    encode + decode  <  (1 - 1/r) wire        r times smaller

Both are measured when the run begins: the links, and the codecs on this machine. On one machine there is
nothing to save, and nothing is measured. Where sites are known, codecs on the links between them only are
candidates as well. Where links are fast, codecs rarely beat dense gradients, so one must win by a margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.codec.codec import CODECS, Codec, StandIn
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCodec(StandIn):
    """None or the cheapest of some codecs, by measured links and speeds.

    `among` are the candidates, with semicolons between them; `margin` is how many times faster one must be.
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
                    f"{text} is no candidate", where="codec auto, among", fix="name codecs themselves"
                )
            if codec.momentum:
                raise ConfigError(
                    f"{text} applies momentum, so the optimizer would have to know whether it is chosen",
                    where="codec auto, among",
                    fix=f"say {codec.name}(momentum=0, ...), or top-k",
                )

    @property
    def candidates(self) -> dict[str, Codec]:
        """The codecs to choose from, by how they are written."""
        texts = [text.strip() for text in self.among.split(";")]
        return {text: CODECS.build(text, where="codec auto, among") for text in texts if text}
