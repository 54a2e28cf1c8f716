"""All that one model needs to send its gradients encoded: codec, states, route and relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from echelon.codec.codec import Codec
from echelon.comm.coded.parcel import Coded
from echelon.comm.coded.relay import Relay
from echelon.comm.coded.route import Route
from echelon.comm.coded.states import States

_JOIN_S = 5.0
LEAST_BYTES = 1 << 20
IN_FLIGHT = 4


class Coding:
    """Makes encoded parcels for one model."""

    def __init__(self, codec: Codec, route: Route, *, rank: int, who: Callable[[int], str]) -> None:
        self.codec = codec
        self.states = States(codec)
        self.route = route
        self._rank = rank
        self._who = who
        self._relay = Relay()

    def fits(self, p: nn.Parameter) -> bool:
        """Whether a parameter's gradient is encoded; all others travel as they are."""
        return p.dtype == torch.float32 and p.device.type == "cpu" and p.numel() > 0

    def parcel(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> Coded:
        """A bucket of parameters that fit."""
        return Coded(
            parameters,
            self.codec,
            self.states,
            self.route,
            self._relay,
            rank=self._rank,
            who=self._who,
        )

    def close(self) -> None:
        """No more parcels."""
        self._relay.close()

    def join(self) -> None:
        """Wait until nothing is under way; after its group was closed."""
        self._relay.join(_JOIN_S)


def bucket_bytes(total_bytes: int) -> int:
    """How many bytes of gradients travel together: encoded they are few, and messages cost as ever."""
    return max(LEAST_BYTES, -(-total_bytes // IN_FLIGHT))
