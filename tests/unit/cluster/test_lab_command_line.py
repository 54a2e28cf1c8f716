"""`echelon lab`: command lines that are refused before anything is done."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from echelon.cli.lab import app
from echelon.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["exec", "two-sites", "--", "true"], "neither --node nor --all"),
        (["exec", "two-sites", "--all", "--node", "a", "--", "true"], "both --node and --all"),
        (["down"], "no lab is given"),
        (["down", "two-sites", "--all"], "both a lab and --all"),
        (["down", "two-site-typo"], "unknown lab"),
        (["up", "two-site"], "unknown lab"),
    ],
)
def test_a_contradictory_command_line_is_refused(words: list[str], said: str) -> None:
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    assert said in error.message
