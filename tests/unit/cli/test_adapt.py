"""`echelon adapt`: what goes where, exit codes, and what is written."""

from __future__ import annotations

import codecs
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import shapes

CHECK = shapes.FLAT.replace("import torch\n", "import torch\nname = input()\n", 1)


def _script(text: str, name: str = "train.py") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_diff_is_on_standard_output_and_the_reasons_are_not(echelon):
    script = _script(shapes.FLAT)
    ended = echelon("adapt", "train.py")
    assert ended.code == 0
    assert ended.out.startswith("--- a/train.py\n+++ b/train.py\n@@ ")
    assert "+session = echelon.join()\n" in ended.out
    assert "why:" not in ended.out
    assert "train.py:10: change (prepare)\n" in ended.err
    assert ended.err.splitlines()[-1] == (
        "4 changes, 0 to check by hand, 0 notes; nothing is written yet: --write makes the changes"
    )
    assert script.read_text() == shapes.FLAT


def test_explanations_fit_80_columns_but_for_code_that_cannot_be_broken(echelon):
    _script(shapes.SUMS)
    lines = echelon("adapt", "train.py").err.splitlines()[:-1]
    assert max(map(len, lines)) <= 80


def test_the_diff_applied_is_what_write_writes(echelon):
    script = _script(shapes.DDP, "folder/train.py")
    diff = echelon("adapt", "folder/train.py").out
    ended = echelon("adapt", "folder/train.py", "--write")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.splitlines()[-1].endswith("; written")
    written = script.read_text()
    script.write_text(shapes.DDP)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True)
    assert script.read_text() == written
    assert "session = echelon.join()" in written
    assert list(script.parent.iterdir()) == [script]


def test_a_script_elsewhere_is_patched_in_its_own_folder(echelon, tmp_path_factory):
    script = tmp_path_factory.mktemp("elsewhere") / "train.py"
    script.write_text(shapes.FLAT)
    assert echelon("adapt", str(script)).out.startswith("--- a/train.py\n+++ b/train.py\n")


def test_findings_for_a_person_exit_with_one_and_the_rest_is_written(echelon):
    script = _script(CHECK)
    assert echelon("adapt", "train.py").code == 1
    ended = echelon("adapt", "train.py", "--write")
    assert ended.code == 1
    assert "train.py:2: check (terminal)" in ended.err
    assert "session = echelon.join()" in script.read_text()
    assert "name = input()" in script.read_text()


def test_nothing_to_change_is_said_and_nothing_is_written(echelon):
    script = _script(shapes.FLAT)
    echelon("adapt", "train.py", "--write")
    before = script.stat()
    ended = echelon("adapt", "train.py", "--write")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "0 changes, 0 to check by hand, 0 notes; nothing to change\n"
    assert script.stat().st_mtime_ns == before.st_mtime_ns
    assert script.stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("name", "data", "where", "text"),
    [
        ("train.py", None, None, "there is no script train.py"),
        ("train.py", b"import torch\ndef f(:\n", "train.py, line 2", "not valid Python"),
        ("train.py", b"name = '\xff'\n", "train.py", "not text in UTF-8"),
        ("train.py", b"a = 1\0\n", None, ""),
        ("train.ipynb", b"{}", "train.ipynb", "a notebook is not a script"),
    ],
    ids=["missing", "syntax", "encoding", "null byte", "notebook"],
)
def test_what_cannot_be_read_is_an_error_in_three_lines(echelon, name, data, where, text):
    if data is not None:
        Path(name).write_bytes(data)
    ended = echelon("adapt", name, "--write")
    assert (ended.code, ended.out) == (2, "")
    lines = ended.err.splitlines()
    assert len(lines) == 3, ended.err
    assert lines[0].startswith("ConfigError: ")
    assert text in lines[0]
    assert where is None or lines[1] == f"  where: {where}"
    if data is not None:
        assert Path(name).read_bytes() == data


def test_a_read_only_script_is_refused_only_if_it_would_be_written(echelon):
    script = _script(shapes.FLAT)
    script.chmod(0o444)
    assert echelon("adapt", "train.py").code == 0
    ended = echelon("adapt", "train.py", "--write")
    assert ended.code == 2
    assert "the script is not writable" in ended.err
    assert script.read_text() == shapes.FLAT


def test_json_has_findings_and_diff(echelon):
    _script(CHECK)
    ended = echelon("adapt", "train.py", "--json")
    answer = json.loads(ended.out)
    assert (ended.code, ended.err) == (1, "")
    assert answer["script"] == "train.py"
    assert answer["needs_a_person"] is True
    assert answer["written"] is False
    assert answer["diff"].startswith("--- a/train.py\n")
    assert {"line": 2, "rule": "terminal", "level": "check"}.items() <= answer["findings"][0].items()
    assert json.loads(echelon("adapt", "train.py", "--json", "--write").out)["written"] is True


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_encoding_and_line_ends_are_those_of_the_script_also_in_the_diff(tmp_path, monkeypatch, encoding):
    monkeypatch.chdir(tmp_path)
    head = "# coding: latin-1\n" if encoding == "latin-1" else ""
    data = (head + "# Größe\n" + shapes.FLAT).replace("\n", "\r\n").encode(encoding)
    script = Path("train.py")
    script.write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "adapt", "train.py"], capture_output=True, check=True
    )
    subprocess.run(["git", "apply", "--ignore-whitespace", "-"], input=done.stdout, check=True)
    patched = script.read_bytes()
    script.write_bytes(data)
    subprocess.run(
        [sys.executable, "-m", "echelon", "adapt", "train.py", "--write"], check=True, capture_output=True
    )
    assert script.read_bytes() == patched
    assert patched.startswith(codecs.BOM_UTF8) == (encoding == "utf-8-sig")
    assert "# Größe\r\n".encode(encoding.removesuffix("-sig")) in patched
    assert b"\r\nimport echelon\r\n" in patched
    assert patched.count(b"\n") == patched.count(b"\r\n")


def test_a_terminal_shows_the_diff_in_colours(tmp_path):
    (tmp_path / "train.py").write_text(shapes.FLAT)
    leader, follower = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    try:
        subprocess.run(
            [sys.executable, "-m", "echelon", "adapt", "train.py"],
            cwd=tmp_path,
            env={**environment, "TERM": "xterm-256color", "COLUMNS": "100"},
            stdout=follower,
            stderr=subprocess.DEVNULL,
            timeout=120,
            check=True,
        )
        os.close(follower)
        follower = -1
        shown = b""
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
    finally:
        os.close(leader)
        if follower >= 0:
            os.close(follower)
    assert b"\x1b[32m+session = echelon.join()" in shown
    assert b"\x1b[36m@@ " in shown


def test_torch_is_not_imported(tmp_path):
    (tmp_path / "train.py").write_text(shapes.FLAT)
    code = (
        "import sys; sys.argv = ['echelon', 'adapt', 'train.py']\nfrom echelon.cli import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    code = ended.code\n"
        "sys.exit('torch' in sys.modules or code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
