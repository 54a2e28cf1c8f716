"""Damaged and cut records are said to be so."""

from __future__ import annotations

import pytest

from echelon.observe.damage import damage_of
from echelon.observe.events import LAUNCHER, MembersChanged, RunEnded, StepEnded, encode
from echelon.observe.run_folder import RunFolder


def line(rank, step):
    t = 10.0 + step
    return encode(
        StepEnded(
            t=t, rank=rank, step=step, epoch=0, start=t, data_s=0.1, compute_s=0.5, arrival=t, wait_s=0.1,
            apply_s=0.1, share=4, batch=8, sent_bytes=1,
        )
    ) + b"\n"  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run").with_subfolders()
    for rank in (0, 1):
        made.events_of(rank).write_bytes(b"".join(line(rank, step) for step in range(10)))
    ended = RunEnded(t=30.0, rank=LAUNCHER, outcome="completed", detail="")
    made.events_of(LAUNCHER).write_bytes(encode(ended) + b"\n")
    made.summary.write_text("{}")
    return made


def test_a_whole_record_has_no_damage(folder):
    assert damage_of(folder) == []


def test_a_file_that_was_cut_inside_of_a_line_is_named(folder):
    file = folder.events_of(1)
    file.write_bytes(file.read_bytes()[:-20])
    assert damage_of(folder) == [
        "1 line of rank-1.jsonl cannot be read", "rank-1.jsonl ends at step 8, others at step 9",
    ]  # fmt: skip


def test_a_file_that_was_cut_between_lines_is_named(folder):
    folder.events_of(1).write_bytes(b"".join(line(1, step) for step in range(4)))
    assert damage_of(folder) == ["rank-1.jsonl ends at step 3, others at step 9"]


def test_missing_steps_are_counted(folder):
    folder.events_of(0).write_bytes(b"".join(line(0, step) for step in (0, 1, 5, 9)))
    assert damage_of(folder) == ["6 steps are missing in rank-0.jsonl"]


def test_a_worker_that_was_lost_or_left_has_a_part_of_the_steps_and_that_is_no_damage(folder):
    folder.events_of(1).write_bytes(b"".join(line(1, step) for step in (0, 1, 5)))
    lost = MembersChanged(t=12.0, rank=LAUNCHER, worker=1, what="lost", workers=1)
    with folder.events_of(LAUNCHER).open("ab") as file:
        file.write(encode(lost) + b"\n")
    assert damage_of(folder) == []


def test_a_line_that_is_being_written_or_is_newer_is_no_damage(folder):
    folder.summary.unlink()
    folder.events_of(LAUNCHER).unlink()
    with folder.events_of(1).open("ab") as file:
        file.write(b'{"type":"of-the-future","t":1}\n' + line(1, 10)[:-20])
    assert damage_of(folder) == []
