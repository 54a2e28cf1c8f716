"""What would fail late, or with a traceback, is refused in three lines before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

EARLY = [
    (("run", "--workers", "2", "--join-timeout-s", "1e10", "s.py"), "--join-timeout-s", "115 days"),
    (("run", "--workers", "2", "--round-timeout-s", "1e300", "s.py"), "--round-timeout-s", "115 days"),
    (("train", "--lr", "1e308"), "--lr", "smaller"),
    (("train", "--model", "mlp(width=1e99)"), "--model, width", "smaller"),
    (("train", "--checkpoint", "s.py/saved"), "--checkpoint", "another"),
    (("train", "--checkpoint", "s.py"), "--checkpoint", "another"),
    (("bench", "codecs", "--quick", "--out", "s.py"), "--out", "another"),
    (("train", "--workers", "2", "--collective", "rnig"), "--collective", "'ring'"),
    (("run", "--config", "deep.toml", "s.py"), "deep.toml", "[run]"),
    (("run", "--plan", "deep.toml", "s.py"), "deep.toml", "correct"),
    (("run", "--lab", "deep.toml", "s.py"), "deep.toml", "correct"),
    (("plan", "--cluster", "deep.toml"), "deep.toml", "correct"),
]


@pytest.mark.parametrize(("words", "where", "fix"), EARLY)
def test_a_late_error_is_said_at_once(echelon, words, where, fix):
    Path("s.py").write_text("")
    Path("deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    ended = echelon(*words)
    assert ended.code == 2
    assert f"where: {where}" in ended.err
    assert fix in ended.err.partition("fix:")[2]
    assert "Traceback" not in ended.err
    assert not Path("runs").exists()


def test_checking_a_folder_leaves_nothing_behind(tmp_path):
    from echelon.observe.atomic import check_writable

    check_writable(tmp_path / "a" / "b", where="--checkpoint")
    assert list(tmp_path.iterdir()) == []
