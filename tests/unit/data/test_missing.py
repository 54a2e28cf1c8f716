"""Which chunks travel between workers, from whom to whom."""

from __future__ import annotations

from echelon.data.missing import Copying, Reach, copies


def reach(host, *has):
    return Reach(host=host, has=set(has))


def test_nothing_travels_if_all_can_read_what_they_need():
    assert copies([reach("a", 0), reach("b", 0, 1)], [{0}, {0, 1}]) == []


def test_a_chunk_travels_from_the_first_that_has_it_to_one_worker_of_each_machine_that_lacks_it():
    reaches = [reach("a", 0), reach("b", 1), reach("b", 1), reach("c")]
    assert copies(reaches, [{0, 1}] * 4) == [
        Copying(number=0, source=0, keepers=(1, 3)),
        Copying(number=1, source=1, keepers=(0, 3)),
    ]


def test_a_chunk_that_nobody_needs_elsewhere_stays():
    assert copies([reach("a", 0), reach("b", 1)], [{0}, {1}]) == []


def test_a_chunk_that_nobody_can_read_is_told_with_who_needs_it():
    assert copies([reach("a", 0), reach("b", 0)], [{0}, {0, 1}]) == (1, 1)
