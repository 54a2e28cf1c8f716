"""`echelon check` with wrong input, and its help; nothing is started."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["missing.py"], "there is no script missing.py"),
        (["--wokers", "2", "there.py"], "there is no script --wokers"),
        (["there.py", "--workers", "1"], "workers is 1"),
        (["there.py", "--steps", "0"], "steps is 0"),
        (["there.py", "--tolerance", "-1"], "tolerance is -1"),
        (["there.py", "--shares", "1,2,3"], "3 shares for 2 workers"),
        ([], "Missing argument"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_started(echelon, tmp_path, words, text):
    (tmp_path / "there.py").write_text("raise SystemExit('it was started')")
    ended = echelon("check", *words)
    assert ended.code == 2
    assert text in ended.err
    assert "started" not in ended.err


def test_the_help_has_examples_and_says_what_happens_to_saves(echelon):
    ended = echelon("check", "--help")
    assert "echelon check train.py --workers 4" in ended.out
    assert "goes to a temporary folder" in ended.out
