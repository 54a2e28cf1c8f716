"""Which message goes to which receive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.backend.matching import LetterMatching

EVENTS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([None, 0, 1]), st.integers(0, 1)), min_size=1, max_size=40
)


@given(EVENTS)
def test_messages_of_one_sender_and_tag_are_received_in_the_order_of_sending(
    events: list[tuple[bool, int | None, int]],
) -> None:
    matching: LetterMatching[tuple[int | None, int], int] = LetterMatching()
    received: dict[tuple[int, int], list[int]] = {}
    for number, (sends, who, tag) in enumerate(events):
        if sends:
            source = who or 0
            found = matching.take(source, tag)
            if found is None:
                matching.keep(source, tag, number)
            else:
                assert found[0] in (None, source)
                assert found[1] == tag
                received.setdefault((source, tag), []).append(number)
        else:
            arrived = matching.post(who, tag, (who, tag))
            if arrived is not None:
                assert who in (None, arrived[0])
                received.setdefault((arrived[0], tag), []).append(arrived[1])
    for numbers in received.values():
        assert numbers == sorted(numbers)


def test_receive_from_anybody_takes_the_first_message_that_arrived() -> None:
    matching: LetterMatching[str, str] = LetterMatching()
    matching.keep(2, 0, "second's")
    matching.keep(1, 0, "first's")
    assert matching.post(None, 0, "mine") == (2, "second's")


def test_receive_that_was_given_up_gets_nothing() -> None:
    matching: LetterMatching[str, str] = LetterMatching()
    matching.post(1, 0, "given up")
    matching.withdraw(matching._waiting[0].receive)
    assert matching.take(1, 0) is None
