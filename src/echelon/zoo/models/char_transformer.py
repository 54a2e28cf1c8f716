"""A character-level transformer: the decoder of Radford et al. (GPT-2, 2019), small."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.errors import ConfigError
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model, is_tokens
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CharTransformer(Model):
    """A transformer that predicts the next character: `depth` causal blocks of `width`, `heads` heads.

    For v characters and a context of t it has 2 v w + v + t w + d (12 w² + 13 w) + 2 w parameters. The
    context is the length of the samples; the module also takes shorter sequences.
    """

    name: ClassVar[str] = "char-transformer"
    takes: ClassVar[str] = "sequences of tokens (length, int64), to predict the next token of each"
    fits: ClassVar[tuple[str, ...]] = ("text",)

    width: int = 128
    depth: int = 4
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        where = "model char-transformer"
        for option, value in (("width", self.width), ("depth", self.depth), ("heads", self.heads)):
            check_range(where, option, value, least=1)
        check_range(where, "dropout", self.dropout, least=0, most=1)
        if self.width % self.heads:
            raise ConfigError(
                f"width={self.width} cannot be divided among heads={self.heads}",
                where=where,
                fix="give a width that is a multiple of heads",
            )

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Tokens (batch, time) to logits (batch, time, vocabulary)."""
        from torch import nn

        from echelon.zoo.layers import CausalBlock, TokenEmbedding

        if not is_tokens(sample):
            raise self.misfit(sample)
        blocks = [CausalBlock(self.width, self.heads, self.dropout) for _ in range(self.depth)]
        module = nn.Sequential(
            OrderedDict(
                embedding=TokenEmbedding(sample.classes, sample.shape[0], self.width),
                blocks=nn.Sequential(*blocks),
                norm=nn.LayerNorm(self.width),
                head=nn.Linear(self.width, sample.classes),
            )
        )
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)
        return module
