"""What a traceback shows after a user's mistake, and after Echelon's."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest

import echelon
from echelon.errors import ConfigError
from echelon.train import linear
from echelon.train.user_traceback import _WRAPPERS, hide_wrappers


def _through_wrapper(raising) -> BaseException:
    """What is caught if a function is called by code of linear.py."""
    code = compile("def call(raising):\n    raising()\n", linear.__file__, "exec")
    names: dict = {}
    exec(code, names)
    with pytest.raises(BaseException) as caught:
        names["call"](raising)
    return caught.value


def _raise(error: BaseException) -> None:
    raise error


def _files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_wrong_shape_in_a_users_layer_does_not_point_to_echelons_files():
    def chained() -> None:
        try:
            _raise(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        except RuntimeError as first:
            raise ValueError("bad sample") from first

    error = _through_wrapper(chained)
    error.__cause__.__traceback__ = _through_wrapper(lambda: _raise(RuntimeError())).__traceback__
    assert linear.__file__ in _files(error)
    hide_wrappers(error)
    for shown in (error, error.__cause__):
        assert linear.__file__ not in _files(shown)
        assert __file__ in _files(shown)


def test_error_of_echelons_own_keeps_its_traceback():
    error = _through_wrapper(lambda: _raise(ConfigError("no")))
    before = _files(error)
    hide_wrappers(error)
    assert _files(error) == before


def test_bug_in_a_wrapper_is_not_hidden():
    names: dict = {}
    exec(compile("def call():\n    return missing\n", linear.__file__, "exec"), names)
    with pytest.raises(NameError) as caught:
        names["call"]()
    hide_wrappers(caught.value)
    assert linear.__file__ in _files(caught.value)


def test_traceback_of_nothing_but_wrappers_is_kept_and_cycles_end():
    names: dict = {}
    exec(compile("def call():\n    raise RuntimeError\n", linear.__file__, "exec"), names)
    with pytest.raises(RuntimeError) as caught:
        names["call"]()
    error = caught.value
    error.__traceback__ = error.__traceback__.tb_next
    error.__cause__ = error
    hide_wrappers(error)
    assert _files(error) == [linear.__file__]


def test_uncaught_error_is_printed_without_the_wrappers(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    error = _through_wrapper(lambda: _raise(RuntimeError("shapes")))
    with echelon.join(record=False):
        sys.excepthook(type(error), error, error.__traceback__)
    printed = capsys.readouterr().err
    assert "linear.py" not in printed
    assert printed.splitlines()[-1] == "RuntimeError: shapes"


def test_all_wrappers_exist():
    assert [path for path in _WRAPPERS if not Path(path).is_file()] == []
