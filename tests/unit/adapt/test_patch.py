"""The diff is one that programs can apply."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from echelon.adapt.patch import unified

CASES = {
    "usual": ("a\nb\nc\n", "a\nB\nc\nd\n"),
    "no end of line before": ("a\nb", "a\nb\n"),
    "no end of line after": ("a\nb\n", "a\nc"),
    "no end of line at all": ("a\nb", "x\na\nb"),
    "other line ends": ("a\r\nb\r\n", "a\r\nc\r\nb\r\n"),
    "characters that end lines elsewhere": ("a\x0c\u2028b\nc\n", "a\x0c\u2028b\nd\n"),
    "mark": ("\ufeffa\n", "\ufeffb\na\n"),
}


def test_no_change_is_no_diff():
    assert unified("a\n", "a\n", "x.py") == ""


@pytest.mark.parametrize("program", ["patch", "git"])
@pytest.mark.parametrize("case", CASES)
def test_diff_can_be_applied(tmp_path, case, program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    before, after = CASES[case]
    file = tmp_path / "x.py"
    file.write_bytes(before.encode())
    command = ["git", "apply", "-"] if program == "git" else ["patch", "-p1", "--binary"]
    subprocess.run(command, cwd=tmp_path, input=unified(before, after, "x.py").encode(), check=True)
    assert file.read_bytes() == after.encode()
