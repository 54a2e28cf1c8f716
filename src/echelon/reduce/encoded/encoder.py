"""All that one model needs to send its gradients encoded: codec, states, route and relay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from echelon.codec.codec import Codec
from echelon.reduce.encoded.bucket import EncodedBucket
from echelon.reduce.encoded.route import Route
from echelon.reduce.encoded.states import States
from echelon.reduce.encoded.thread import CodecThread

_JOIN_S = 5.0
LEAST_BYTES = 1 << 20
IN_FLIGHT = 4


class ModelEncoder:
    """Makes encoded buckets for one model."""

    def __init__(self, codec: Codec, route: Route, *, rank: int, names: Mapping[int, str]) -> None:
        self.codec = codec
        self.states = States(codec)
        self.route = route
        self._rank = rank
        self._names = names
        self._thread = CodecThread()

    def fits(self, p: nn.Parameter) -> bool:
        """Whether a parameter's gradient is encoded; all others travel as they are."""
        return p.dtype == torch.float32 and p.device.type == "cpu" and p.numel() > 0

    def bucket(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> EncodedBucket:
        """A bucket of parameters that fit."""
        return EncodedBucket(
            parameters,
            self.codec,
            self.states,
            self.route,
            self._thread,
            rank=self._rank,
            names=self._names,
        )

    def close(self) -> None:
        """No more buckets."""
        self._thread.close()

    def join(self) -> None:
        """Wait until nothing is under way; after its group was closed."""
        self._thread.join(_JOIN_S)


def bucket_bytes(total_bytes: int) -> int:
    """How many bytes of gradients travel together: encoded they are few, and messages cost as ever."""
    return max(LEAST_BYTES, -(-total_bytes // IN_FLIGHT))
