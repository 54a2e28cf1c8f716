"""Waits for items of a queue between threads end: with an item, or in time."""

from __future__ import annotations

import ast
import queue
import sys
import threading
from pathlib import Path

import pytest

import echelon
from echelon.comm import inbox as module
from echelon.comm.inbox import Inbox

PATIENCE_S = 60.0


def test_items_come_in_order_and_an_empty_inbox_says_so():
    inbox = Inbox()
    for item in (1, None, 3):
        inbox.put(item)
    assert not inbox.empty()
    assert [inbox.get(), inbox.get_within(0.0), inbox.get()] == [1, None, 3]
    assert inbox.empty()
    with pytest.raises(queue.Empty):
        inbox.get_within(0.0)


def test_a_reader_that_looks_after_its_deadline_does_not_wait_for_ever(monkeypatch):
    """It finds the lock free, but no item, and its time is over: where SimpleQueue waits without limit."""
    inbox = Inbox()
    inbox.put("taken")
    assert inbox.get() == "taken"  # the token of this item is still there
    times = iter((0.0, 0.0, 1.0, 1.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times, 2.0))
    outcome = []

    def read():
        try:
            inbox.get_within(0.5)
        except queue.Empty:
            outcome.append("empty")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(PATIENCE_S)
    assert outcome == ["empty"]


def test_every_item_reaches_one_of_several_readers_however_threads_are_switched():
    inbox, count, readers = Inbox(), 3000, 3
    found = [[] for _ in range(readers)]

    def read(mine):
        while True:
            try:
                item = inbox.get_within(PATIENCE_S) if len(mine) % 2 else inbox.get()
            except queue.Empty:
                return
            if item is None:
                return
            mine.append(item)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=read, args=(mine,), daemon=True) for mine in found]
        for thread in threads:
            thread.start()
        for item in range(count):
            inbox.put(item)
        for _ in threads:
            inbox.put(None)
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(before)
    assert sorted(item for mine in found for item in mine) == list(range(count))
    assert all(mine == sorted(mine) for mine in found)


def test_no_thread_waits_for_a_simple_queue_with_a_time_limit():
    """In CPython 3.11 such a wait may have no end; see inbox.py."""
    root = Path(echelon.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "SimpleQueue(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr == "get":
                names = [keyword.arg for keyword in node.keywords]
                assert "timeout" not in names, f"{path.relative_to(root)}:{node.lineno}"
