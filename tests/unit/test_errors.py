"""Every error says what, where and what to do, and arrives whole in another process."""

from __future__ import annotations

import inspect
import pickle

import pytest

from echelon import errors
from echelon.errors import ConfigError, EchelonError, PeerLost, UnknownName, WorkerError


def _tree(kind=EchelonError):
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]


def _example(kind):
    if issubclass(kind, UnknownName):
        return kind("model", "lenett", ["lenet", "mlp"], where="--model")
    if issubclass(kind, WorkerError):
        return kind("a worker is gone", ranks=(1, 3), where="step 7", fix="start it again")
    return kind("it does not work", where="here", fix="do it otherwise")


OURS = [kind for kind in _tree() if kind.__module__ == errors.__name__]


def test_an_error_prints_three_lines():
    error = ConfigError("batch is 3 for 4 workers", where="run.toml, batch", fix="give at least 4")
    assert str(error).splitlines() == [
        "batch is 3 for 4 workers",
        "  where: run.toml, batch",
        "  fix:   give at least 4",
    ]


def test_empty_lines_of_an_error_are_left_out():
    assert str(ConfigError("that is all")) == "that is all"
    assert str(ConfigError("no place", fix="find one")).splitlines() == ["no place", "  fix:   find one"]


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_all_its_fields(kind):
    error = _example(kind)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert vars(again) == vars(error)
    assert str(again) == str(error)
    assert again.args == error.args


def test_an_error_that_was_pickled_twice_is_still_the_same():
    error = PeerLost("rank 3 is gone", ranks=(3,), where="node b", fix="restart it")
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert (again.ranks, str(again)) == ((3,), str(error))


def test_notes_added_to_an_error_travel_with_it():
    error = ConfigError("wrong")
    error.add_note("seen on rank 2")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen on rank 2"]


def test_docstring_shows_the_actual_error_tree():
    named = [line.strip(" │├└─").split()[0] for line in inspect.getdoc(errors).splitlines() if "─" in line]
    assert ["EchelonError", *named] == [kind.__name__ for kind in OURS]


@pytest.mark.parametrize(
    ("name", "nearest"), [("lenett", "lenet"), ("LeNet", "lenet"), ("resnet-18", "resnet18"), ("zzz", None)]
)
def test_an_unknown_name_names_the_nearest_known_one(name, nearest):
    error = UnknownName("model", name, ["mlp", "resnet18", "lenet"], where="--model")
    assert (error.name, error.nearest) == (name, nearest)
    assert error.message == f"unknown model {name!r}"
    assert error.fix.endswith("known: lenet, mlp, resnet18")
    assert error.fix.startswith(f"did you mean {nearest!r}?") == (nearest is not None)


def test_unknown_name_without_known_names_says_none():
    assert UnknownName("codec", "dgc", []).fix == "known: none"
