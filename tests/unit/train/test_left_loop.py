"""A loop over a generator of ours: was it left by an exception?"""

from __future__ import annotations

import contextlib
import sys

import pytest

from echelon.train.left_loop import when_unwound

found: list[BaseException] = []


def numbers():
    try:
        yield from range(5)
    except GeneratorExit:
        when_unwound(found.append)
        raise


def raises():
    for _ in numbers():
        raise ValueError("sample 17 is broken")


def raises_in_two_loops():
    for _ in numbers():
        for _ in numbers():
            _ = {}["a"]


def raises_in_a_program():
    exec("for _ in numbers():\n    raise OSError('gone')", globals())


def raises_below_a_builtin():
    sorted([1], key=lambda _: raises())


def raises_and_is_caught_in_the_same_function():
    try:
        for _ in numbers():
            raise KeyError("a")
    except KeyError:
        return


def raises_and_is_suppressed_in_the_same_function():
    with contextlib.suppress(KeyError):
        for _ in numbers():
            raise KeyError("a")


def raises_with_cleaning_up():
    with contextlib.ExitStack():
        try:
            raises()
        finally:
            found_before = len(found)
            assert found_before >= 0


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (raises, ValueError),
        (raises_in_two_loops, KeyError),
        (raises_in_a_program, OSError),
        (raises_below_a_builtin, ValueError),
        (raises_and_is_caught_in_the_same_function, KeyError),
        (raises_and_is_suppressed_in_the_same_function, KeyError),
        (raises_with_cleaning_up, ValueError),
    ],
)
def test_the_exception_that_leaves_a_loop_is_found_though_it_is_caught(act, kind):
    if sys.gettrace() is not None:
        pytest.skip("a debugger or a coverage tool traces this process")
    found.clear()
    with contextlib.suppress(kind):
        act()
    assert {type(error) for error in found} == {kind}
    assert found[0].__traceback__ is not None
    assert sys.gettrace() is None


def breaks():
    for _ in numbers():
        break
    with contextlib.suppress(ValueError):
        int("x")


def breaks_and_raises():
    for _ in numbers():
        break
    int("x")


def returns():
    for _ in numbers():
        return 1
    return 2


def returns_before_an_exception():
    return [returns(), int("x")]


def forgets():
    iterator = numbers()
    next(iterator)
    del iterator
    int("x")


def runs_to_its_end():
    for _ in numbers():
        pass
    int("x")


def breaks_while_an_exception_is_handled():
    try:
        int("x")
    except ValueError:
        breaks()


@pytest.mark.parametrize(
    "act",
    [
        breaks,
        breaks_and_raises,
        returns,
        returns_before_an_exception,
        forgets,
        runs_to_its_end,
        breaks_while_an_exception_is_handled,
    ],
)
def test_a_loop_that_is_left_otherwise_is_not_taken_for_one(act):
    found.clear()
    with contextlib.suppress(ValueError):
        act()
    assert found == []
    assert sys.gettrace() is None


def test_a_tracer_that_is_there_already_is_left_alone():
    def tracer(frame, event, arg):
        return None

    found.clear()
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with contextlib.suppress(ValueError):
            raises()
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(before)
    assert found == []
