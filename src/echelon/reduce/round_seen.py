"""Who is told how a round of gradients goes: who records it, takes it in flight, or looks at it?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from echelon.reduce.bucket import Bucket

if TYPE_CHECKING:
    from echelon.reduce.reducer import Reducer


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """How one bucket's reduction went; times are on the performance counter.

    `filled_at`: the worker began to copy gradients into it, which took `encode_s`. `begun`, `sent` and
    `ended` are as in `future.Timing` (0 if unknown). `wait_s`: how long the trainer was blocked for it.
    `how`: its form. `coded_bytes`: the encoded part of `sent_bytes`.
    """

    index: int
    size_bytes: int
    sent_bytes: int
    filled_at: float
    encode_s: float
    begun: float
    sent: float
    ended: float
    adding_s: float
    wait_s: float
    how: str = "dense"
    coded_bytes: int = 0


class RoundObserver(Protocol):
    """Records how a round goes."""

    def computing(self) -> None:
        """Backward goes on: one more gradient is computed."""

    def arrived(self) -> None:
        """All of this worker's gradients are computed."""

    def bucket(self, times: BucketTimes) -> None:
        """One bucket has been reduced."""

    def reduced(self, sent_bytes: int) -> None:
        """The reduced gradients have arrived, or are in flight and handed to the receiver."""

    def waited(self, wait_s: float) -> None:
        """The trainer was blocked for gradients that were in flight after the round."""


class Receiver(Protocol):
    """Takes the buckets in flight when backward ends."""

    def take(self, reducer: Reducer, buckets: Sequence[Bucket]) -> None:
        """Take them; wait for each with `reducer.receive` when it is needed."""

    def settle(self) -> None:
        """Wait for all of them now: another round begins."""


class Inspector(Protocol):
    """Looks at every round before its sums are assigned; see verify/verifier.py."""

    def sending(self, bucket: Bucket) -> None:
        """A bucket is about to be filled with this worker's gradients."""

    def sent(self, reducer: Reducer) -> None:
        """All buckets are in flight."""

    def received(self) -> Tensor:
        """Wait for what all workers tell about their gradients."""

    def landed(self, reducer: Reducer, told: Tensor) -> bool:
        """All sums have arrived, `p.grad` is still this worker's own; whether to reduce these again."""
