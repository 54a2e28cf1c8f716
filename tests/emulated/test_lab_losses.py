"""A worker of a lab is killed by a fault of its file: the others go on, and it comes back into its node."""

from __future__ import annotations

from pathlib import Path

from tests.losses import run

# Four workers on three nodes: ranks 0 and 3 share memory, the others have TCP.
LAB = """
[[node]]
name = "a"
link = "1gbit"
[[node]]
name = "b"
link = "1gbit"
[[node]]
name = "c"
link = "1gbit"
[[fault]]
at_step = 6
action = "kill"
node = "b"
"""


def test_workers_of_a_lab_go_on_without_one_that_is_killed_and_take_it_back(
    can_emulate: None, tmp_path: Path
) -> None:
    (tmp_path / "lab.toml").write_text(LAB)
    words = ("--lab", "lab.toml", "--join-timeout-s", "150")  # workers of a lab are not forked
    outcome = run(tmp_path, "auto", [], respawn=3, dies="1:by its fault", words=words)
    assert (outcome.code, outcome.wrong) == (0, []), outcome.output
    assert "rank 1 was lost (SIGKILL); 3 workers go on" in outcome.output
    assert "rank 1 is back after" in outcome.output
    assert "done with 4 workers" in outcome.output
