"""A queue between the threads of a process, whose readers may wait for a limited time.

`queue.SimpleQueue` is not used for that: its `get(timeout=...)` in CPython 3.11 can wait for ever. `put`
may leave the queue's lock free although the queue is empty again. The next `get` takes the lock at once,
finds nothing, and computes how long it may still wait. If the time is over by then, as it may be on a busy
machine where timeouts are short, it hands a negative number to the system, which means no limit.

The lock is a token here, too: free if something may have been put since it was taken.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Items in the order in which they were put."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._token = threading.Lock()
        self._token.acquire()

    def put(self, item: T) -> None:
        """Add an item; never waits."""
        self._items.append(item)
        self._wake()

    def get(self) -> T:
        """Take the first item, however long it takes to come."""
        while True:
            try:
                return self._take()
            except IndexError:
                self._token.acquire()

    def get_within(self, timeout_s: float) -> T:
        """Take the first item; raises queue.Empty if none comes in time."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                return self._take()
            except IndexError:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise queue.Empty from None
                self._token.acquire(timeout=left_s)

    def empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._items

    def _take(self) -> T:
        item = self._items.popleft()
        if self._items:
            self._wake()  # another reader may have missed its token
        return item

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is free already
            self._token.release()
