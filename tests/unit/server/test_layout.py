"""Which server keeps which elements, by examples. See also tests/property/test_shards_of_servers.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon.errors import ConfigError
from echelon.server.layout import LARGE_BYTES, ParameterSlice, TableLayout, cut_pieces, split

some_shapes = st.lists(
    st.sampled_from([(), (1,), (7,), (3, 5), (2, 0), (100_000,), (300, 200)]), min_size=1, max_size=6
)


def parameters(shapes):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def test_one_server_keeps_all_parameters_from_the_last_to_the_first():
    (only,) = split([5, 3, 7], 1, item_bytes=4)
    assert only.parts == (
        ParameterSlice(2, 0, 7, 0),
        ParameterSlice(1, 0, 3, 7),
        ParameterSlice(0, 0, 5, 10),
    )
    assert only.length == 15


def test_small_parameters_go_whole_to_the_server_with_the_fewest_bytes():
    one, other = split([4, 6, 10, 1], 2, item_bytes=4)
    assert [part.parameter for part in one.parts] == [3, 1, 0]
    assert [part.parameter for part in other.parts] == [2]
    assert (one.length, other.length) == (11, 10)


def test_a_large_parameter_is_split_between_all_servers():
    length = LARGE_BYTES * 3 // 4
    found = split([length], 3, item_bytes=4)
    assert [one.parts for one in found] == [
        (ParameterSlice(0, 0, length // 3, 0),),
        (ParameterSlice(0, length // 3, 2 * length // 3, 0),),
        (ParameterSlice(0, 2 * length // 3, length, 0),),
    ]
    assert [one.length for one in split([length - 1], 3, item_bytes=4)] == [length - 1, 0, 0]


def test_a_large_parameter_that_must_stay_whole_goes_to_one_server():
    found = split([10 * LARGE_BYTES, 8], 3, item_bytes=4, whole=True)
    assert [[part.length for part in one.parts] for one in found] == [[8], [10 * LARGE_BYTES], []]


def test_pieces_have_the_size_asked_for_and_backwards_order():
    found = split([100] * 6, 2, item_bytes=4)
    pieces = cut_pieces(found, item_bytes=4, piece_bytes=800)
    assert [(piece.shard, piece.start, piece.stop) for piece in pieces] == [
        (0, 0, 200),
        (1, 0, 200),
        (0, 200, 300),
        (1, 200, 300),
    ]
    assert [[part.parameter for part in piece.parts] for piece in pieces] == [[5, 3], [4, 2], [1], [0]]


def test_servers_without_parameters_keep_nothing():
    found = split([2], 3, item_bytes=4)
    assert [one.length for one in found] == [2, 0, 0]
    assert len(cut_pieces(found, item_bytes=4)) == 1


@settings(max_examples=60, deadline=None)
@given(some_shapes, st.integers(1, 5), st.booleans())
def test_tensors_are_restored_from_their_shards(shapes, servers, whole):
    layout = TableLayout(parameters(shapes), servers, whole=whole)
    tensors = [torch.randn(shape) for shape in shapes]
    flats = layout.new_flats()
    layout.to_shards(flats, tensors)
    assert sum(flat.numel() for flat in flats) == sum(one.numel() for one in tensors)
    for got, put in zip(layout.from_shards(flats), tensors, strict=True):
        assert torch.equal(got, put)
    for place, put in enumerate(tensors):
        layout.install(flats, place)
        assert torch.equal(layout.parameters[place].detach(), put)


def test_weights_are_installed_in_parameters_that_are_not_contiguous():
    turned = nn.Parameter(torch.zeros(4, 3).t())
    layout = TableLayout([turned], 1, whole=False)
    flats = layout.new_flats()
    layout.to_shards(flats, [torch.arange(12.0).view(3, 4)])
    with torch.no_grad():
        layout.install(flats, 0)
    assert torch.equal(turned.detach(), torch.arange(12.0).view(3, 4))


@settings(max_examples=40, deadline=None)
@given(some_shapes, st.integers(1, 5))
def test_an_optimizers_state_is_split_and_joined(shapes, servers):
    layout = TableLayout(parameters(shapes), servers, whole=False)
    state = {
        p: {"exp_avg": torch.randn_like(p), "step": torch.tensor(3.0), "name": "x"}
        for p in layout.parameters
        if p.numel()
    }
    cut = layout.split_states(state)
    assert bool(cut) == bool(state)
    joined = layout.join_states(enumerate(cut))
    assert joined.keys() == state.keys()
    for p, of_p in state.items():
        assert torch.equal(joined[p]["exp_avg"], of_p["exp_avg"])
        assert (joined[p]["step"], joined[p]["name"]) == (3.0, "x")


def test_parameters_of_two_dtypes_are_refused():
    mixed = [*parameters([(3, 4)]), nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    with pytest.raises(ConfigError, match="parameters of one dtype"):
        TableLayout(mixed, 1, whole=False)
