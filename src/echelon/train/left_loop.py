"""Did an exception end the script's loop? For engines that catch it, so that `sys.excepthook` never runs.

A Ray actor, a notebook and a test runner catch what a script raises, and the process goes on. The other
workers would wait for this one until the deadline. But a `for` loop over a prepared loader, or over
`session.epochs`, holds a generator of ours. Python closes it when the loop is left, by an exception as by
`break`, and at that moment it does not say which. So from then on the frame of the loop and its caller are
traced for an event or two: either an exception appears that has gone through the frame at that very
instruction, or lines follow.

Nothing is traced while the loop goes on. If a debugger or a coverage tool traces already, nothing is found.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_MOST_EVENTS = 2  # a `with` around the loop has a line of its own before its exception can be seen


def when_unwound(told: Callable[[BaseException], None]) -> None:
    """Call `told` with the exception that leaves the loop, if one does.

    The generator that the loop is over calls this while it is being closed.
    """
    generator = sys._getframe(1)
    loop = generator.f_back
    if loop is None or sys.gettrace() is not None:
        return
    _Tracer(loop, told).begin()


class _Tracer:
    """Traces a frame and its caller until an event tells, or enough have passed."""

    def __init__(self, loop: FrameType, told: Callable[[BaseException], None]) -> None:
        self._loop: FrameType | None = loop
        self._instruction = loop.f_lasti
        self._told = told
        self._events = 0

    def begin(self) -> None:
        assert self._loop is not None
        for frame in (self._loop, self._loop.f_back):
            if frame is not None:
                frame.f_trace = self._event
        sys.settrace(self._event)

    def _event(self, frame: FrameType, event: str, arg: Any) -> Any:
        loop = self._loop
        if loop is None:
            return None
        if event == "return" and frame is loop:  # by an exception too: the caller's next event tells
            return None
        error = arg[1] if event == "exception" else sys.exc_info()[1]
        trace = arg[2] if event == "exception" else error.__traceback__ if error is not None else None
        found = isinstance(error, BaseException) and self._went_through(loop, trace)
        self._events += 1
        if not found and self._events < _MOST_EVENTS:
            return self._event
        sys.settrace(None)
        self._loop = None
        for one in (loop, loop.f_back):
            if one is not None:
                one.f_trace = None
        if found and error is not None:
            self._told(error.with_traceback(trace))
        return None

    def _went_through(self, loop: FrameType, trace: TracebackType | None) -> bool:
        while trace is not None:
            if trace.tb_frame is loop and trace.tb_lasti == self._instruction:
                return True
            trace = trace.tb_next
        return False
