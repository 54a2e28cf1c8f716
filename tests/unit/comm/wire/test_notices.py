"""What workers tell each other beside the payload arrives as it was meant, or is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.wire import notices
from echelon.comm.wire.doing import Doing
from echelon.comm.wire.mismatch import Stage
from echelon.comm.wire.notices import (
    Answer,
    Blocked,
    DifferentCalls,
    DoingAnswer,
    DoingQuestion,
    GaveUp,
    LeaveNotice,
    Question,
)
from echelon.errors import Corrupt


@pytest.mark.parametrize(
    "notice",
    [
        LeaveNotice(),
        LeaveNotice("ValueError: sample 17", (3,)),
        GaveUp(2**63, (1, 2), "rank 1 on b is gone", late=True),
        Question(5),
        Answer(5, begun=False),
        Answer(5, begun=True, doing=Doing("in save()", "train.py:52")),
        DoingQuestion(7, 1 << 61 | 9, trained=False),
        DoingAnswer(7, Doing(), Stage.OVER, may_begin=True),
        DoingAnswer(7, Doing(), Stage.NOT_BEGUN, may_begin=False, blocked=Blocked(3, 4, requires_you=True)),
        DifferentCalls((0, 1), "workers make different calls", "rank 0 on a", "call save()"),
    ],
)
def test_notice_arrives_unchanged(notice):
    assert notices.decode(notices.encode(notice), peer="rank 1") == notice


@given(data=st.binary(max_size=40))
def test_junk_is_refused_in_the_name_of_its_sender(data):
    with pytest.raises(Corrupt, match="rank 1 on b"):
        notices.decode(data, peer="rank 1 on b")


@pytest.mark.parametrize("data", [b"", b"\x80", notices.encode(Question(5))[:-1], b"\x81\xa4type\xa4Asks"])
def test_a_notice_that_is_cut_or_unknown_is_refused(data):
    with pytest.raises(Corrupt, match="cannot be decoded"):
        notices.decode(data, peer="rank 1")


def test_a_long_text_is_shortened():
    assert notices.shortened("short") == "short"
    assert len(notices.shortened("x" * 100_000)) < 3000
