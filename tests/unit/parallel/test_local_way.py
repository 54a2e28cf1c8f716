"""Which ways one machine offers, and which of them is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.layout import parse_layout
from echelon.parallel.local_way import (
    LocalWay,
    as_it_is,
    best_way,
    chunked,
    cores_of,
    table_ways,
    usual_ways,
)


@given(st.integers(1, 64), st.integers(2, 4096))
def test_every_usual_way_fits_the_machine_and_torch_as_it_is_is_among_them(cores, batch):
    ways = usual_ways(cores, batch)
    assert ways[0] == as_it_is(cores)
    assert all(way.processes * way.threads_a_process <= cores and way.processes <= batch for way in ways)
    assert len(ways) <= 7


@given(st.integers(1, 16), st.integers(2, 512), st.integers(1, 4))
def test_the_table_has_each_way_once_and_its_layouts_can_be_read(cores, batch, numa_nodes):
    ways = table_ways(cores, batch, numa_nodes=numa_nodes)
    assert len(ways) == len(set(ways)) == len({str(way) for way in ways})
    for way in ways:
        parse_layout(way.layout)
        assert way.processes * way.replicas <= batch


@given(st.integers(1, 8), st.integers(1, 64))
def test_pinned_processes_have_cores_and_leave_none_unused(processes, more):
    cores = range(100, 100 + processes + more)
    parts = [cores_of(LocalWay(processes=processes, pinned=True), rank, cores) for rank in range(processes)]
    assert [core for part in parts for core in part] == list(cores)


def test_chunks_are_smaller_than_a_share_and_not_tiny():
    assert [way.samples for way in chunked(LocalWay(processes=2), 512)] == [64, 16]
    assert chunked(LocalWay(processes=2), 6) == []


def test_a_way_with_more_parts_is_taken_only_if_it_is_clearly_faster():
    one, two, cut = LocalWay(threads=2), LocalWay(processes=2), LocalWay(threads=2, samples=8)
    assert best_way({one: 100.0, two: 101.0, cut: 101.5}) == one
    assert best_way({two: 130.0, one: 100.0, cut: 110.0}) == two
