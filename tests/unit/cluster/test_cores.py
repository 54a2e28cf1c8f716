"""Which cores pinned workers have: neighbours of one NUMA node, none twice, none unused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.cores import cores_of_worker, numa_cores, pinned, take_cores
from echelon.config.schema import RunSettings
from echelon.errors import ConfigError

NODES = [(0, 2, 4, 6), (1, 3, 5, 7)]


@given(st.integers(1, 8), st.sets(st.integers(0, 7), min_size=1))
def test_pinned_workers_have_all_usable_cores_and_none_twice_while_there_are_enough(count, allowed):
    parts = [cores_of_worker("cores", place, count, sorted(allowed), NODES) for place in range(count)]
    assert all(parts)
    assert set().union(*parts) == allowed
    if count <= len(allowed):
        assert sum(map(len, parts)) == len(allowed)


def test_a_workers_cores_are_on_one_node():
    parts = [cores_of_worker("cores", place, 2, range(8), NODES) for place in range(2)]
    assert parts == NODES
    parts = [cores_of_worker("numa", place, 4, range(8), NODES) for place in range(4)]
    assert parts == [NODES[0], NODES[0], NODES[1], NODES[1]]


def test_one_node_is_the_same_as_not_pinned():
    assert cores_of_worker("numa", 1, 2, range(4), [(0, 1, 2, 3)]) == (0, 1, 2, 3)
    assert cores_of_worker("none", 1, 2, range(4), NODES) == ()


def test_the_systems_lists_are_read(tmp_path: Path):
    for node, text in (("node0", "0-2,6"), ("node1", "3-5"), ("node2", "")):
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    assert numa_cores(tmp_path) == [(0, 1, 2, 6), (3, 4, 5)]
    assert numa_cores(tmp_path / "elsewhere") == []


def test_a_worker_computes_with_the_cores_that_it_was_told(monkeypatch):
    before = os.sched_getaffinity(0)
    told = pinned("cores", 0, len(before))
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    try:
        take_cores()
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_workers_of_several_machines_are_not_pinned():
    with pytest.raises(ConfigError, match="one machine only"):
        RunSettings(pin="cores", hosts="a,b")
