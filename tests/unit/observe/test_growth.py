"""Parts of a folder's files are written at their places, and nowhere else."""

from __future__ import annotations

import pytest

from echelon.errors import Corrupt
from echelon.observe.growth import FolderTail, Grown, write_grown
from echelon.observe.run_folder import RunFolder


def test_what_a_folder_gains_makes_the_same_folder_elsewhere(tmp_path):
    far = RunFolder(tmp_path / "far").with_subfolders()
    near = RunFolder(tmp_path / "near").with_subfolders()
    tail = FolderTail(far.path)
    for text in ("one\n", "two\n"):
        with far.events_of(3).open("a") as file:
            file.write(text)
        for part in tail.grown():
            write_grown(near.path, part, [3])
    assert near.events_of(3).read_text() == "one\ntwo\n"
    assert list(tail.grown()) == []


@pytest.mark.parametrize(
    "path",
    ["events/rank-2.jsonl", "plan.toml", "events/../plan.toml", "events/rank-3.x/../../a", "/etc/rank-3.a"],
)
def test_a_file_that_is_not_the_senders_is_refused(tmp_path, path):
    folder = RunFolder(tmp_path / "run").with_subfolders()
    with pytest.raises(Corrupt, match="not a file of its sender"):
        write_grown(folder.path, Grown(path, 0, b"x"), [3])
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
