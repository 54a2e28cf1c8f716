"""Which ways one machine offers, which of them is taken; and replicas in threads."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.errors import ModelError
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
from echelon.parallel.thread_replicas import ThreadReplicas


@given(st.integers(1, 64), st.integers(2, 4096))
def test_every_usual_way_fits_the_machine_and_torch_as_it_is_is_among_them(cores, batch):
    ways = usual_ways(cores, batch)
    assert ways[0] == as_it_is(cores)
    assert all(way.processes * way.threads <= cores and way.processes <= batch for way in ways)
    assert len(ways) <= 5


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


def test_replicas_in_threads_have_the_gradients_of_the_whole_batch_and_see_updates(request):
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3)).double()  # a layer is used twice
    alone = copy.deepcopy(model)
    x, y = torch.randn(7, 5).double(), torch.randint(3, (7,))
    replicas = ThreadReplicas(model, 3)
    request.addfinalizer(replicas.close)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, alone)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(alone(x), y)
        loss.backward()
        found = replicas.backward(x, y, nn.functional.cross_entropy)
        assert found == pytest.approx(loss.item(), abs=1e-12)
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-12)


def test_replicas_in_threads_refuse_batch_normalisation():
    with pytest.raises(ModelError, match="one part of the batch in each thread"):
        ThreadReplicas(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2)
