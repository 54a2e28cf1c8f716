"""What happened to a run's workers, in one line."""

from __future__ import annotations

from echelon.observe.events import LAUNCHER, MembersChanged, decode_line, encode
from echelon.observe.membership import MembersTally, members_line


def change(worker, what, workers):
    return MembersChanged(t=1.0, rank=LAUNCHER, worker=worker, what=what, workers=workers)


def test_a_run_without_losses_says_nothing():
    assert members_line(MembersTally().figures()) == ""


def test_changes_are_counted_and_the_fewest_workers_named():
    tally = MembersTally()
    for event in (
        change(2, "left out", 3),
        change(1, "lost", 2),
        change(2, "back", 3),
        change(1, "back", 4),
    ):
        assert decode_line(encode(event)) == event
        tally.add(event)
    line = "workers: 1 left out, 1 lost, 2 back; never fewer than 2 went on"
    assert members_line(tally.figures()) == line
