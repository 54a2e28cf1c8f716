"""`echelon probe`: mistakes are named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.errors import EchelonError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "lenett"], "did you mean 'lenet'"),
        (["--model", "lenet", "--data", "digit"], "did you mean 'digits'"),
        (["--model", "char-lstm", "--data", "digits"], "takes"),
        (["--optimizer", "sdg"], "unknown optimizer"),
        (["--lab", "two-site"], "did you mean 'two-sites'"),
    ],
)
def test_mistake_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.start.function.run", lambda *_: pytest.fail("a run was started"))
    ended = CliRunner().invoke(app, ["probe", *words])
    assert isinstance(ended.exception, EchelonError), ended.output
    assert message in str(ended.exception)


def test_help_has_examples() -> None:
    shown = CliRunner().invoke(app, ["probe", "--help"])
    assert shown.exit_code == 0
    assert "echelon probe --lab two-sites" in shown.output
