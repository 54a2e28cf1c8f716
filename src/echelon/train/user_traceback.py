"""Tracebacks without the thin layers that Echelon puts around the user's own.

A prepared `nn.Linear` computes in linear.py, batch normalisation in batchnorm.py, convolutions in
convolution.py; weighing.py stands around every call of a prepared model, and loaders and `torch.save` are
called through others. If the user's tensor has the wrong shape, torch complains about the user's layer; a
traceback that ends in Echelon's files would tell the user to look there.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from echelon.errors import EchelonError

_WRAPPERS = frozenset(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("batchnorm", "convolution", "forgotten", "linear", "loader", "saving", "weighing")
)
_BUGS = (AssertionError, AttributeError, KeyError, NameError)  # raised in a wrapper, these are its own


def hide_wrappers(error: BaseException) -> None:
    """Take the wrappers' frames out of the traceback of an error, and of those that led to it.

    An error of Echelon's own keeps its traceback, and so does one that a wrapper made itself.
    """
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        found = waiting.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        waiting += [found.__cause__, found.__context__]
        if not _is_echelons(found):
            found.__traceback__ = _without_wrappers(found.__traceback__) or found.__traceback__


def _is_echelons(error: BaseException) -> bool:
    return isinstance(error, EchelonError) or (
        isinstance(error, _BUGS) and _is_wrapper(_innermost(error.__traceback__))
    )


def _innermost(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_wrapper(trace: TracebackType | None) -> bool:
    return trace is not None and trace.tb_frame.f_code.co_filename in _WRAPPERS


def _without_wrappers(trace: TracebackType | None) -> TracebackType | None:
    kept = []
    while trace is not None:
        if not _is_wrapper(trace):
            kept.append(trace)
        trace = trace.tb_next
    rest: TracebackType | None = None
    for one in reversed(kept):
        rest = TracebackType(rest, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return rest
