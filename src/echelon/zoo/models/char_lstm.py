"""A character-level language model of LSTM layers: Graves, "Generating sequences with RNNs", 2013."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model, is_tokens
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CharLstm(Model):
    """An LSTM that predicts the next character: embedding, `depth` layers of `width`, one linear layer.

    For v characters it has 2 v w + v + 8 d (w² + w) parameters. The state starts from zero in each window.
    """

    name: ClassVar[str] = "char-lstm"
    takes: ClassVar[str] = "sequences of tokens (length, int64), to predict the next token of each"
    fits: ClassVar[tuple[str, ...]] = ("text",)

    width: int = 128
    depth: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_range("model char-lstm", "width", self.width, least=1)
        check_range("model char-lstm", "depth", self.depth, least=1)
        check_range("model char-lstm", "dropout", self.dropout, least=0, most=1)

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Tokens (batch, time) to logits (batch, time, vocabulary)."""
        from echelon.zoo.layers import TokenLstm

        if not is_tokens(sample):
            raise self.misfit(sample)
        return TokenLstm(sample.classes, self.width, self.depth, self.dropout)
