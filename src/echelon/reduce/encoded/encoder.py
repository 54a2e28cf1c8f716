"""Makes the encoded buckets of one model, with its codec, states, route and codec thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from echelon.codec.codec import Codec
from echelon.comm.group import Group
from echelon.reduce.encoded.bucket import EncodedBucket
from echelon.reduce.encoded.route import Route, flat
from echelon.reduce.encoded.states import States
from echelon.reduce.encoded.thread import CodecThread

_JOIN_S = 5.0
LEAST_BYTES = 1 << 20
IN_FLIGHT = 4


class ModelEncoder:
    """The codec, states, route and thread of one model."""

    def __init__(self, codec: Codec, route: Route, *, rank: int, names: Mapping[int, str]) -> None:
        self.codec = codec
        self.states = States(codec)
        self.route = route
        self._rank = rank
        self._names = names
        self._thread = CodecThread()

    def fits(self, p: nn.Parameter) -> bool:
        """Whether a parameter's gradient is encoded; all others are sent unencoded."""
        return p.dtype == torch.float32 and p.device.type == "cpu" and p.numel() > 0

    def bucket(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> EncodedBucket:
        """A bucket of parameters whose gradients are encoded."""
        return EncodedBucket(
            parameters,
            self.codec,
            self.states,
            self.route,
            self._thread,
            rank=self._rank,
            names=self._names,
        )

    def renew(self, group: Group) -> None:
        """Members have changed: encode for those of now. All of them call this between the same rounds.

        A failed exchange has ended the codec thread's work, so there is a new one.
        """
        self._thread.close()
        self._thread = CodecThread()
        self.route = flat(group)
        self._rank, self._names = group.rank, group.names

    def close(self) -> None:
        """End the codec thread after the jobs in flight."""
        self._thread.close()

    def join(self) -> None:
        """Wait for the end of the codec thread; after its group was closed."""
        self._thread.join(_JOIN_S)


def bucket_bytes(total_bytes: int) -> int:
    """The bucket size: larger than for dense gradients, because encoded messages are small."""
    return max(LEAST_BYTES, -(-total_bytes // IN_FLIGHT))
