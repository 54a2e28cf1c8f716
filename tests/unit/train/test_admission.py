"""After which round is a worker admitted?"""

from __future__ import annotations

from echelon.train.admission import AdmissionFlag


def test_all_members_admit_after_the_round_that_follows_the_leaders_decision(tmp_path):
    launcher = AdmissionFlag.create(tmp_path / "admission")
    leader, other = AdmissionFlag(launcher.file), AdmissionFlag(launcher.file)
    assert not leader.due(4, leads=True)
    launcher.waiting = 1
    assert not other.due(4, leads=False), "the leader has not decided yet"
    assert not leader.due(4, leads=True)
    assert not other.due(4, leads=False)
    assert other.due(5, leads=False)
    assert leader.due(5, leads=True)
    launcher.waiting = launcher.round = 0
    assert not leader.due(5, leads=True)
    launcher.remove()
    assert not launcher.file.exists()


def test_with_a_round_in_flight_members_admit_one_round_later(tmp_path):
    flag = AdmissionFlag.create(tmp_path / "admission")
    flag.waiting = 1
    assert not flag.due(3, leads=True, in_flight=1)
    assert not flag.due(4, leads=False), "others may have completed it before the leader decided"
    assert flag.due(5, leads=False)
