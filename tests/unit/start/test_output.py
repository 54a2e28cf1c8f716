"""What the launcher shows of the leader's log."""

import msgspec
import pytest

from echelon.observe.run_folder import RunFolder
from echelon.start.failure import Failure
from echelon.start.output import LeaderOutput, LogTail

ERROR = "Traceback (most recent call last):\n  File 'a.py'\n\nValueError: no\n"


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path).with_subfolders()


def _failure(rank: int, **fields) -> Failure:
    given = {"kind": "ValueError", "message": "no", "text": ERROR, **fields}
    return Failure(rank=rank, t=0.0, **given)


def _leave(folder: RunFolder, failure: Failure) -> None:
    folder.error_of(failure.rank).write_bytes(msgspec.json.encode(failure))


def test_lines_added_to_a_log_are_read_once(tmp_path):
    log = tmp_path / "rank-0.log"
    tail = LogTail(log)
    assert tail.read() == b""
    log.write_bytes(b"one\n")
    assert tail.read() == b"one\n"
    assert tail.read() == b""
    with log.open("ab") as more:
        more.write(b"tw\xff")
    assert tail.read() == b"tw\xff"


def test_output_is_shown_as_it_arrives_while_the_leader_is_well(folder):
    output = LeaderOutput(folder)
    folder.log_of(0).write_bytes(b"one\n")
    assert output.read() == b"one\n"
    assert output.rest(None) == b""


@pytest.mark.parametrize("prefix", ["", "[rank0]: "], ids=["plain", "as torch prints it"])
def test_the_leaders_own_error_is_left_out_and_all_else_is_shown(folder, prefix):
    output = LeaderOutput(folder)
    printed = "\n".join(f"{prefix}{line}" if line else "" for line in ERROR.split("\n"))
    _leave(folder, _failure(0))
    folder.log_of(0).write_text("before\n" + printed[:30])
    assert output.read() == b""
    folder.log_of(0).write_text("before\n" + printed + "goodbye\n")
    assert output.read() == b""
    assert output.rest(_failure(0)) == b"before\ngoodbye\n"
    assert output.rest(_failure(0)) == b""


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        (_failure(0), False),
        (_failure(0, kind="PeerLost", message="rank 1 failed", consequence=True), False),
        (_failure(0, message="another reason"), True),
    ],
    ids=["the same error", "a consequence", "another error"],
)
def test_when_another_worker_failed_first_the_leaders_error_is_shown_if_it_says_more(folder, own, shown):
    output = LeaderOutput(folder)
    _leave(folder, own)
    folder.log_of(0).write_text("before\n" + ERROR)
    assert output.read() == b""
    assert output.rest(_failure(1)).decode() == "before\n" + (ERROR if shown else "")


def test_error_that_was_not_written_down_is_shown(folder):
    output = LeaderOutput(folder)
    folder.error_of(0).write_bytes(b"{}")
    folder.log_of(0).write_text(ERROR)
    assert output.rest(_failure(1)).decode() == ERROR
