"""How a worker's warnings reach the user, whatever the script does with logging."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.observe.events import Noted, read_events
from echelon.start.warn import WarningHandler

SCRIPT = """
import logging, sys
{setup}
logging.getLogger("echelon.train").warning("share %d is odd", 3)
logging.getLogger("echelon.train").info("all is well")
logging.getLogger("mine").info("of the script")
"""


@pytest.fixture
def worker(tmp_path):
    """Runs a script as a worker does; gives what it prints and the notes it leaves."""

    def run(setup: str = "") -> tuple[str, list[Noted]]:
        (tmp_path / "events").mkdir()
        (tmp_path / "errors").mkdir()
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.format(setup=setup))
        done = subprocess.run(
            [sys.executable, "-m", "echelon.start.worker", str(script)],
            env={**_environment(), "ECHELON_RUN": str(tmp_path), "RANK": "2"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stderr, list(read_events(tmp_path / "events" / "rank-2.jsonl"))

    return run


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("RANK", "ECHELON_LAUNCHER")}


def test_warning_is_printed_and_noted(worker):
    printed, (noted,) = worker()
    assert printed == "WARNING echelon.train: share 3 is odd\n"
    assert (noted.rank, noted.text, noted.warning) == (2, "share 3 is odd", True)


def test_script_sets_up_logging_as_if_it_had_been_started_by_itself(worker):
    printed, (noted,) = worker("logging.basicConfig(level=logging.INFO, format='%(message)s')")
    assert printed == "share 3 is odd\nall is well\nof the script\n", "each once"
    assert noted.text == "share 3 is odd"


def test_warning_is_printed_if_the_script_logs_to_a_file_only(worker, tmp_path):
    printed, _ = worker("logging.basicConfig(filename='mine.log')")
    assert printed == "WARNING echelon.train: share 3 is odd\n"
    assert "share 3 is odd" in (tmp_path / "mine.log").read_text()


def test_warning_that_cannot_be_written_does_not_end_the_script(tmp_path, capsys):
    handler = WarningHandler(0, tmp_path / "missing" / "rank-0.jsonl")
    logger = logging.Logger("echelon.odd")
    logger.addHandler(handler)
    logger.warning("%d workers", "no number")
    assert "'%d workers'" in capsys.readouterr().err, "what Python's own handlers say"
    logger.warning("fine")
    assert capsys.readouterr().err == ""


def test_notes_of_several_lines_stay_one_event(tmp_path):
    handler = WarningHandler(0, tmp_path / "rank-0.jsonl")
    logger = logging.Logger("echelon.odd")
    logger.addHandler(handler)
    logger.warning("one\ntwo")
    logger.warning("three")
    assert [event.text for event in read_events(Path(tmp_path / "rank-0.jsonl"))] == ["one\ntwo", "three"]
