"""Which agents start workers, under which names, with how many threads."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.gather import grouped, named, threads_each
from echelon.start.agents.protocol import Introduction


def agent(machine="m", order=0, cpus=(0, 1), host=""):
    return Introduction(
        host=host or machine,
        pid=1,
        cores=len(cpus),
        machine=machine,
        order=order,
        cpus=list(cpus),
        echelon="0",
        python="3",
        torch="2",
        addresses=[],
    )


AGENTS = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([(0, 1), (2, 3)])), max_size=9).flatmap(
    lambda places: st.permutations(
        [agent(machine, order, cpus) for order, (machine, cpus) in enumerate(places)]
    )
)


@given(AGENTS, st.booleans())
def test_every_slot_is_in_one_group_and_the_slots_of_a_machine_are_neighbours(said, share):
    groups = grouped(said, share)
    assert sorted(at for group in groups for at in group) == list(range(len(said)))
    machines = [said[group[0]].machine for group in groups]
    changes = sum(one != other for one, other in itertools.pairwise(machines))
    assert changes == max(0, len(set(machines)) - 1)
    for group in groups:
        assert len({(said[at].machine, tuple(said[at].cpus)) for at in group}) == 1
        assert share or len(group) == 1


@given(AGENTS)
def test_the_first_slot_of_the_engine_is_rank_0(said):
    if said:
        assert said[grouped(said)[0][0]].order == 0


def test_interleaved_slots_of_two_machines_are_sorted_by_machine():
    said = [agent("b", 1), agent("a", 2), agent("a", 0), agent("b", 3)]
    assert grouped(said) == [[2, 1], [0, 3]]


def test_agents_that_are_confined_to_other_cores_stay_by_themselves():
    assert grouped([agent("a", 0, (0,)), agent("a", 1, (1,)), agent("a", 2, (0,))]) == [[0, 2], [1]]


def test_machines_of_one_name_get_numbers():
    said = [agent("1", host="pod"), agent("2", host="pod"), agent("1", host="pod"), agent("3", host="c")]
    assert named(said) == ["pod", "pod-2", "pod", "c"]


def connected(introduction, slots):
    return ConnectedAgent(
        node="", channel=None, handle=None, slots=slots, introduction=introduction
    )  # fmt: skip


def test_threads_are_the_cores_over_all_workers_that_share_them():
    eight = tuple(range(8))
    agents = [
        connected(agent("a", 0, eight), 2),
        connected(agent("a", 1, eight), 2),
        connected(agent("b", 2, (0, 1)), 1),
        connected(agent("b", 3, (2, 3)), 4),
    ]
    assert threads_each(agents) == [2, 2, 2, 1]
