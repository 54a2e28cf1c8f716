"""The meeting's board as a store of torch's: Gloo and NCCL exchange addresses there, and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store as BaseOfStores
from torch.distributed import DistStoreError

from echelon.comm.meet.board import Store

_LOOK_S = 0.01


class TorchStore(BaseOfStores):
    """Hands on what torch asks to another store. Values are written as hexadecimal digits.

    torch does not keep this object alive, only its own part of it: whoever hands it over has to.
    """

    def __init__(self, store: Store, *, timeout_s: float) -> None:
        super().__init__()
        self._store = store
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(key, (value.encode() if isinstance(value, str) else bytes(value)).hex())

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        self.wait([key])
        return bytes.fromhex(self._store.get(key).decode())

    def add(self, key: str, value: int) -> int:
        """Add to a counter."""
        total = int(self._store.add(f"count/{key}", value))
        self.set(key, str(total))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all are there."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        until = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > until:
                raise DistStoreError(f"timed out after {limit_s:g} s: no worker wrote {', '.join(keys)}")
            time.sleep(_LOOK_S)
