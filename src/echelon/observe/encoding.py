"""How many bytes a codec saved, and how long encoding and decoding took.

Read from bucket events; with a parameter server, from the servers' closing events.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.events import BucketReduced, ServerEnded

_NOT_ENCODED = ("dense", "factors")


class CodecFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Encoded traffic of all workers together.

    `dense_bytes` is what a ring would have sent instead, 2 (P-1)/P of the gradients. `coded_bytes` is the
    encoded part of `sent_bytes`: all of it, unless gradients are summed inside sites first. `coding_s` is
    the time for encoding and decoding.

    With a parameter server these figures are of pushes, and `dense_bytes` is the size of the gradients;
    weights took `pulled_bytes` instead of `dense_pulled_bytes`. Servers do not know the number of workers
    or the time for encoding, so both are 0.
    """

    codec: str
    workers: int
    rounds: int
    dense_bytes: float
    sent_bytes: int
    coded_bytes: int
    coding_s: float
    pulled_bytes: int = 0
    dense_pulled_bytes: int = 0

    @property
    def sentence(self) -> str:
        """The figures in one sentence, per worker and step."""
        times = max(1, self.rounds)
        if self.pulled_bytes:
            return (
                f"Codec {self.codec}: a worker pushed {show_bytes(self.sent_bytes / times)} per step "
                f"instead of {show_bytes(self.dense_bytes / times)}, "
                f"{_less(self.dense_bytes, self.sent_bytes)}; "
                f"the weights it received took {_less(self.dense_pulled_bytes, self.pulled_bytes)}."
            )
        took = f"encoding and decoding took {show_seconds(self.coding_s / times)}"
        if self.coded_bytes < self.sent_bytes:  # inside a site, gradients are not encoded
            return (
                f"Codec {self.codec}: per step, a worker sent {show_bytes(self.coded_bytes / times)} to "
                f"other sites, encoded, and {show_bytes((self.sent_bytes - self.coded_bytes) / times)} "
                f"inside its own site; {took}."
            )
        return (
            f"Codec {self.codec}: per step, a worker sent {show_bytes(self.sent_bytes / times)}; a ring "
            f"without a codec sends {show_bytes(self.dense_bytes / times)}, so it sent "
            f"{_less(self.dense_bytes, self.sent_bytes)}; {took}."
        )


def _less(dense_bytes: float, sent_bytes: float) -> str:
    return f"{dense_bytes / sent_bytes if sent_bytes else 1.0:,.1f} times fewer bytes"


class CodecTally:
    """Takes bucket events and servers' closing events one by one."""

    def __init__(self) -> None:
        self._codecs: dict[str, None] = {}
        self._ranks: set[int] = set()
        self._rounds: dict[tuple[int, int], None] = {}
        self._size_bytes = self._sent_bytes = self._coded_bytes = 0
        self._coding_s = 0.0
        self._servers: list[ServerEnded] = []

    def server(self, event: ServerEnded) -> None:
        """Take a server's closing event into account, if it had a codec."""
        if event.codec != "none":
            self._servers.append(event)

    def bucket(self, event: BucketReduced) -> None:
        """Take a bucket into account, if it was encoded."""
        if event.how in _NOT_ENCODED:
            return
        self._codecs[event.how] = None
        self._ranks.add(event.rank)
        self._rounds[event.rank, event.step] = None
        self._size_bytes += event.size_bytes
        self._sent_bytes += event.sent_bytes
        self._coded_bytes += event.coded_bytes
        self._coding_s += event.encode_s + event.adding_s

    def figures(self) -> CodecFigures | None:
        """The figures so far; None if nothing was encoded."""
        if self._servers:
            return _served(self._servers)
        if not self._codecs or not self._sent_bytes:
            return None
        workers = len(self._ranks)
        return CodecFigures(
            codec=", ".join(self._codecs),
            workers=workers,
            rounds=len(self._rounds),
            dense_bytes=2 * (workers - 1) / workers * self._size_bytes,
            sent_bytes=self._sent_bytes,
            coded_bytes=self._coded_bytes,
            coding_s=self._coding_s,
        )


def _served(servers: Sequence[ServerEnded]) -> CodecFigures:
    """Each push sends one shard to every server, so pushes are counted once and bytes are summed."""
    return CodecFigures(
        codec=servers[0].codec,
        workers=0,
        rounds=max(server.pushes for server in servers),
        dense_bytes=sum(server.dense_pushed_bytes for server in servers),
        sent_bytes=sum(server.pushed_bytes for server in servers),
        coded_bytes=sum(server.pushed_bytes for server in servers),
        coding_s=0.0,
        pulled_bytes=sum(server.pulled_bytes for server in servers),
        dense_pulled_bytes=sum(server.dense_pulled_bytes for server in servers),
    )
