"""After which round is a worker admitted?"""

from __future__ import annotations

from echelon.train.admission import AdmissionFlag


def test_all_members_admit_after_the_round_that_the_launcher_has_written(tmp_path):
    launcher = AdmissionFlag.create(tmp_path / "admission")
    leader, other = AdmissionFlag(launcher.file), AdmissionFlag(launcher.file)
    assert not leader.undecided
    launcher.waiting = 1
    assert leader.undecided
    assert not other.due(4), "the leader has not decided yet"
    launcher.round = 5
    assert not leader.undecided
    assert not leader.due(4)
    assert not other.due(4)
    assert other.due(5)
    assert leader.due(5)
    launcher.waiting = launcher.round = 0
    assert not leader.due(5)
    launcher.remove()
    assert not launcher.file.exists()
