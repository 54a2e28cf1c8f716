"""Layers that the models need and torch.nn does not have.

They are at module level, so that modules can be pickled, and outside of `models/`, so that listing models
does not import torch.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class Frame(nn.Module):
    """Centres a small image in a `side` x `side` one, enlarged by the largest possible integer factor."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, images: Tensor) -> Tensor:
        """Enlarge by repeating pixels, then pad with zeros."""
        height, width = images.shape[-2:]
        factor = min(self.side // height, self.side // width)
        if factor > 1:
            images = functional.interpolate(images, scale_factor=float(factor), mode="nearest")
        down, right = self.side - factor * height, self.side - factor * width
        return functional.pad(images, (right // 2, right - right // 2, down // 2, down - down // 2))


class BasicBlock(nn.Module):
    """The residual block of ResNet-18 and -34: two 3 x 3 convolutions and a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both paths."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        return cast(Tensor, self.relu(self.bn2(self.conv2(out)) + shortcut))


class TokenLstm(nn.Module):
    """An LSTM over embedded tokens that returns only its outputs, and starts each window from zero."""

    def __init__(self, vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        # torch warns about dropout in a single layer, where it has no effect.
        between = dropout if depth > 1 else 0.0
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=between)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time) to logits (batch, time, vocabulary)."""
        out, _ = self.lstm(self.embedding(tokens))
        return cast(Tensor, self.head(out))


class TokenEmbedding(nn.Module):
    """The sum of a token's embedding and its learnt position."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time) to (batch, time, width); time is at most the context."""
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return cast(Tensor, self.token(tokens) + self.position(at))


class CausalBlock(nn.Module):
    """A pre-norm transformer block: attention to earlier positions, then a wider layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        x = x + self._drop(self.join(self._attend(self.norm1(x))))
        return x + self._drop(self.narrow(functional.gelu(self.widen(self.norm2(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        by_head = self.mix(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = by_head.unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).flatten(-2)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)
