"""How large may this worker's share become before its memory is full? Measured while it trains.

What a sample needs is what the process grew by since its models were prepared, over its largest share so
far. The room is what the machine still has for this worker, less a reserve. On a device other than the
processor nothing is known, and nothing is limited.
"""

from __future__ import annotations

import resource
import sys

from echelon.cluster.allowance import allowance

_USED = 0.8  # of the room: the rest is for what else grows
_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


class MemoryRoom:
    """The most samples of one worker, beside so many workers on its machine."""

    def __init__(self, workers_here: int) -> None:
        self._workers_here = workers_here
        self._base_bytes = _peak_bytes()
        self._largest = 0

    def drew(self, share: int) -> None:
        """This worker drew so many samples."""
        self._largest = max(self._largest, share)

    def most(self) -> int:
        """The most samples that fit; 0 if it is not known."""
        grown = _peak_bytes() - self._base_bytes
        if grown <= 0 or not self._largest:
            return 0
        free = allowance(self._workers_here).memory_bytes
        return self._largest + int(_USED * free * self._largest / grown)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT
