"""The cost of collectives: formulas against schedules, and the choice between collectives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.collective import COLLECTIVES, Collective, Move, Schedule, ScheduleStep
from echelon.comm.schedule.cost import (
    LinkCost,
    Work,
    butterfly_work,
    choose,
    critical_work,
    direct_work,
    halving_doubling_work,
    ring_work,
)
from echelon.errors import ConfigError
from schedules import predict

FORMULAS = {
    "ring": ring_work,
    "direct": direct_work,
    "halving-doubling": halving_doubling_work,
    "butterfly": butterfly_work,
}
GIGABIT = LinkCost(latency_s=50e-6, seconds_per_byte=8e-9)
ADD_S = 2e-10

seconds = st.floats(0, 1e-3)
links = st.builds(
    LinkCost, latency_s=seconds, seconds_per_byte=st.floats(0, 1e-6), message_s=st.none() | seconds
)


@pytest.mark.parametrize("name", FORMULAS)
@given(st.integers(1, 17), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), links, st.floats(0, 1e-8))
@settings(max_examples=60, deadline=None)
def test_formula_and_schedule_agree(name, size, part, itemsize, link, add_s):
    power = 1 << (size.bit_length() - 1)
    length_bytes = size * power * part * itemsize
    by_formula = FORMULAS[name](size, length_bytes).seconds(link, add_s)
    by_schedule = predict(COLLECTIVES.build(name), size, length_bytes, link, add_s, itemsize)
    assert by_schedule == pytest.approx(by_formula, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("ring", 4, Work(steps=6, wire_bytes=1.5, added_bytes=0.75)),
        ("halving-doubling", 4, Work(steps=4, wire_bytes=1.5, added_bytes=0.75)),
        ("halving-doubling", 5, Work(steps=6, wire_bytes=3.5, added_bytes=1.75)),
        ("butterfly", 8, Work(steps=3, wire_bytes=3, added_bytes=3)),
        ("butterfly", 9, Work(steps=5, wire_bytes=5, added_bytes=4)),
        ("direct", 4, Work(steps=2, further_messages=4, wire_bytes=1.5, added_bytes=0.75)),
        ("ring", 1, Work()),
        ("direct", 1, Work()),
    ],
)
def test_formulas_are_those_of_the_papers(name, size, expected):
    assert FORMULAS[name](size, 1) == expected


def test_the_time_is_the_sum_of_all_kinds_of_work():
    work = Work(steps=2, further_messages=3, wire_bytes=100, added_bytes=10)
    assert work.seconds(LinkCost(latency_s=1, seconds_per_byte=0.5, message_s=0.1), 2) == pytest.approx(
        72.3
    )


def test_a_further_message_of_a_step_costs_a_latency_by_default():
    direct = COLLECTIVES.build("direct")
    known = LinkCost(latency_s=1.0, seconds_per_byte=0.0, message_s=0.0)
    unknown = LinkCost(latency_s=1.0, seconds_per_byte=0.0)
    assert predict(direct, 8, 800, known, 0.0) == 2
    assert predict(direct, 8, 800, unknown, 0.0) == 14


def test_workers_with_different_numbers_of_steps_wait_for_their_senders_only():
    """With five folded workers, the guest has two steps, and its second step ends last."""
    link = LinkCost(latency_s=1.0, seconds_per_byte=0.0)
    assert len(COLLECTIVES.build("halving-doubling").schedule(1, 5, 40)) == 2
    assert predict(COLLECTIVES.build("halving-doubling"), 5, 160, link, 0.0) == 6


def test_a_chain_of_workers_costs_the_sum_of_its_links():
    chain = [
        [ScheduleStep(sends=(Move(1, 0, 10),))],
        [ScheduleStep(takes=(Move(0, 0, 10),)), ScheduleStep(sends=(Move(2, 0, 5),))],
        [ScheduleStep(adds=(Move(1, 0, 5),))],
    ]
    work = critical_work(dict(enumerate(chain)), GIGABIT, ADD_S, itemsize=2)
    assert work == Work(steps=2, wire_bytes=30, added_bytes=10)


def test_blocks_cost_less_than_folding():
    link = LinkCost(latency_s=0.0, seconds_per_byte=1.0)
    blocks = predict(COLLECTIVES.build("binary-blocks"), 12, 4800, link, 0.0)
    folded = predict(COLLECTIVES.build("halving-doubling"), 12, 4800, link, 0.0)
    assert blocks < 0.6 * folded


class _Endless(Collective):
    """Every worker waits before it sends."""

    name = "endless"

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        before, after = (rank - 1) % size, (rank + 1) % size
        return [
            ScheduleStep(adds=(Move(before, 0, length),)),
            ScheduleStep(sends=(Move(after, 0, length),)),
        ]


class _Mute(Collective):
    """Every worker waits, none sends."""

    name = "mute"

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        return [ScheduleStep(adds=((Move((rank - 1) % size, 0, length)),))]


@pytest.mark.parametrize(("kind", "reason"), [(_Endless, "deadlock"), (_Mute, "does not send")])
def test_a_collective_that_would_hang_is_refused(kind, reason):
    with pytest.raises(ConfigError, match=reason):
        predict(kind(), 3, 40, GIGABIT, ADD_S)


@pytest.mark.parametrize(
    ("size", "length_bytes", "reason"),
    [
        (8, 4_000, "butterfly: 8 workers, 4.0 kB: 3 steps of latency beat 14"),
        (2, 4_000, "direct: 2 workers, 4.0 kB: adding 2.0 kB beats 4.0 kB"),
        (8, 64_000_000, "ring: 8 workers, 64.0 MB: 112.0 MB on the wire beat 192.0 MB"),
        (
            8,
            400_000,
            "halving-doubling: 8 workers, 400.0 kB: "
            "6 steps of latency beat 14, 700.0 kB on the wire beat 1.2 MB",
        ),
        (2, 64_000_000, "direct: 2 workers, 64.0 MB: adding 32.0 MB beats 64.0 MB"),
        (1, 64_000_000, "ring: nothing to send"),
        (8, 0, "ring: nothing to send"),
    ],
)
def test_the_choice_has_a_reason(size, length_bytes, reason):
    name, costs, why = choose(size, length_bytes, GIGABIT, ADD_S)
    assert why == reason
    assert why.startswith(name)
    assert name in costs


def test_direct_is_chosen_where_messages_are_cheap_and_latency_is_long():
    far = LinkCost(latency_s=20e-3, seconds_per_byte=8e-9, message_s=20e-6)
    name, _, why = choose(8, 4_000_000, far, ADD_S)
    assert name == "direct"
    assert "2 steps of latency beat 14" in why


def test_binary_blocks_are_chosen_if_the_number_of_workers_is_not_a_power_of_two():
    name, costs, _ = choose(48, 400_000, GIGABIT, ADD_S)
    assert name == "binary-blocks"
    assert "binary-blocks" not in choose(64, 400_000, GIGABIT, ADD_S)[1]
    assert costs["binary-blocks"] < costs["halving-doubling"]


@given(st.integers(0, 10_000_000), links, st.floats(0, 1e-8))
@settings(max_examples=60, deadline=None)
def test_two_workers_always_exchange_directly(length_bytes, link, add_s):
    assert choose(2, length_bytes, link, add_s)[0] == "direct"


@given(st.integers(3, 12), st.integers(0, 200), links, st.floats(0, 1e-8))
@settings(max_examples=60, deadline=None)
def test_no_collective_is_much_cheaper_than_the_chosen_one(size, part, link, add_s):
    power = 1 << (size.bit_length() - 1)
    length_bytes = 4 * part * size * power
    name, costs, _ = choose(size, length_bytes, link, add_s)
    chosen = predict(COLLECTIVES.build(name), size, length_bytes, link, add_s)
    for other in costs:
        assert chosen <= 1.01 * predict(COLLECTIVES.build(other), size, length_bytes, link, add_s) + 1e-12


@given(
    st.integers(3, 40).filter(lambda size: size & (size - 1)),
    st.integers(1, 3_000_000),
    st.sampled_from([1e-5, 1e-4, 2e-3]),
    st.sampled_from([1e-10, 8.5e-9, 1e-7]),
)
@settings(max_examples=30, deadline=None)
def test_one_worker_of_each_block_stands_for_all_of_them(size, length_bytes, latency_s, seconds_per_byte):
    link = LinkCost(latency_s=latency_s, seconds_per_byte=seconds_per_byte, message_s=latency_s / 2)
    all_of_them = predict(COLLECTIVES.build("binary-blocks"), size, length_bytes, link, ADD_S)
    _, costs, _ = choose(size, length_bytes, link, ADD_S)
    assert costs["binary-blocks"] == pytest.approx(all_of_them)
