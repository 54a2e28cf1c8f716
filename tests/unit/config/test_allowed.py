"""Which words of a user's texts name code that may be imported."""

from __future__ import annotations

import pytest

from echelon.config import allowed


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch):
    monkeypatch.setattr(allowed, "_given", set())
    monkeypatch.setenv("ECHELON_ALLOW", "")


@pytest.mark.parametrize(
    "text",
    [
        "smooth-switch(threshold=function('mine:grow'))",
        'replicate(2, validate="mine:grow")',
        "x(\nf(mine:grow))",
    ],
)
def test_a_function_is_named_as_an_argument_of_a_strategy(text):
    allowed.allow_names_in(text)
    assert allowed.is_allowed("mine:grow")


@pytest.mark.parametrize("text", ["mine:grow", "runs/mine:grow", "--replay=mine:grow", "full"])
def test_a_text_that_is_no_strategy_with_arguments_names_no_function(text):
    allowed.allow_names_in(text)
    assert not allowed.is_allowed("mine:grow")


def test_the_variable_names_code_too(monkeypatch):
    monkeypatch.setenv("ECHELON_ALLOW", "theirs mine:grow")
    assert allowed.is_allowed("mine:grow")
    assert allowed.is_allowed("theirs")
    assert not allowed.is_allowed("mine")
