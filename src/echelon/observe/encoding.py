"""How much smaller a codec made what was sent, and what that took.

From the events of buckets; with a parameter server, from what servers say in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.events import BucketReduced, ServerEnded

_AS_THEY_ARE = ("dense", "factors")


class CodecFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What travelled encoded, of all workers together.

    `dense_bytes` is what a ring would have sent in its place, 2 (P-1)/P of the gradients. `coded_bytes` of
    what was sent were encoded: all, unless gradients are added up inside sites first. `coding_s` is what
    writing and reading took.

    With a parameter server these are the pushes, `dense_bytes` the gradients as they are, and in return
    `pulled_bytes` were handed out instead of `dense_pulled_bytes`. Servers know neither how many workers
    there are (0) nor what coding took (0).
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
        """What a reader wants to know."""
        times = max(1, self.rounds)
        if self.pulled_bytes:
            return (
                f"Codec {self.codec}: a worker pushed {show_bytes(self.sent_bytes / times)} where a "
                f"gradient has {show_bytes(self.dense_bytes / times)}, "
                f"{_less(self.dense_bytes, self.sent_bytes)}; "
                f"weights that it was handed took {_less(self.dense_pulled_bytes, self.pulled_bytes)}."
            )
        if self.coded_bytes < self.sent_bytes:  # inside a site, gradients travel as they are
            return (
                f"Codec {self.codec}: a worker sent {show_bytes(self.coded_bytes / times)} a step to other "
                f"sites, encoded, and {show_bytes((self.sent_bytes - self.coded_bytes) / times)} inside "
                f"its own; it took {show_seconds(self.coding_s / times)} to write and read."
            )
        return (
            f"Codec {self.codec}: a worker sent {show_bytes(self.sent_bytes / times)} a step where a ring "
            f"sends {show_bytes(self.dense_bytes / times)}, {_less(self.dense_bytes, self.sent_bytes)}; it "
            f"took {show_seconds(self.coding_s / times)} to write and read."
        )


def _less(dense_bytes: float, sent_bytes: float) -> str:
    return f"{dense_bytes / sent_bytes if sent_bytes else 1.0:,.1f} times less"


class CodecTally:
    """Takes events of buckets, and of servers that end, one by one."""

    def __init__(self) -> None:
        self._codecs: dict[str, None] = {}
        self._ranks: set[int] = set()
        self._rounds: dict[tuple[int, int], None] = {}
        self._size_bytes = self._sent_bytes = self._coded_bytes = 0
        self._coding_s = 0.0
        self._servers: list[ServerEnded] = []

    def server(self, event: ServerEnded) -> None:
        """Take one into account, if it had a codec."""
        if event.codec != "none":
            self._servers.append(event)

    def bucket(self, event: BucketReduced) -> None:
        """Take one into account, if it travelled encoded."""
        if event.how in _AS_THEY_ARE:
            return
        self._codecs[event.how] = None
        self._ranks.add(event.rank)
        self._rounds[event.rank, event.step] = None
        self._size_bytes += event.size_bytes
        self._sent_bytes += event.sent_bytes
        self._coded_bytes += event.coded_bytes
        self._coding_s += event.encode_s + event.adding_s

    def coding(self) -> CodecFigures | None:
        """The figures so far; None if nothing travelled encoded."""
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
    """A push goes to all servers, a shard to each."""
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
