"""Scripts on disk: what is refused, and how they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.adapt.files import read_script, write_script
from echelon.errors import ConfigError


def test_a_missing_script_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"there is no script train\.py") as caught:
        read_script(Path("train.py"))
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("train.ipynb", "a notebook is not"), ("folder", "a folder is not")]
)
def test_what_is_no_script_is_refused(tmp_path, name, text):
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.ipynb").write_text("{}")
    with pytest.raises(ConfigError, match=text):
        read_script(tmp_path / name)


def test_written_script_keeps_permissions_encoding_and_leaves_no_other_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_bytes("# coding: latin-1\nname = 'Müller'\n".encode("latin-1"))
    script.chmod(0o750)
    text = read_script(script)
    write_script(script, text, text.text + "more = 1\n")
    assert script.read_bytes() == "# coding: latin-1\nname = 'Müller'\nmore = 1\n".encode("latin-1")
    assert script.stat().st_mode & 0o777 == 0o750
    assert list(tmp_path.iterdir()) == [script]


def test_a_link_stays_a_link(tmp_path):
    script, link = tmp_path / "real.py", tmp_path / "link.py"
    script.write_text("a = 1\n")
    link.symlink_to(script)
    write_script(link, read_script(link), "b = 2\n")
    assert link.is_symlink()
    assert script.read_text() == "b = 2\n"


def test_a_read_only_script_is_refused_and_unchanged(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("a = 1\n")
    script.chmod(0o444)
    with pytest.raises(ConfigError, match="not writable"):
        write_script(script, read_script(script), "b = 2\n")
    assert script.read_text() == "a = 1\n"


def test_a_failed_write_leaves_the_script_as_it_was(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("a = 1\n")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_script(script, read_script(script), "b = 2\n")
    assert script.read_text() == "a = 1\n"
    assert list(tmp_path.iterdir()) == [script]
