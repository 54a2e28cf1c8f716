"""Which server keeps what: examples. What holds for all is in tests/property/test_shards_of_servers.py."""

from __future__ import annotations

from echelon.server import shards
from echelon.server.shards import LARGE_BYTES, ParameterSlice


def test_one_server_keeps_all_from_the_last_parameter_to_the_first():
    (only,) = shards.shard([5, 3, 7], 1, item_bytes=4)
    assert only.parts == (
        ParameterSlice(2, 0, 7, 0),
        ParameterSlice(1, 0, 3, 7),
        ParameterSlice(0, 0, 5, 10),
    )
    assert only.length == 15


def test_small_parameters_stay_whole_and_go_to_who_has_least():
    one, other = shards.shard([4, 6, 10, 1], 2, item_bytes=4)
    assert [part.parameter for part in one.parts] == [3, 1, 0]
    assert [part.parameter for part in other.parts] == [2]
    assert (one.length, other.length) == (11, 10)


def test_a_large_parameter_is_cut_into_a_part_for_each():
    length = LARGE_BYTES * 3 // 4
    found = shards.shard([length], 3, item_bytes=4)
    assert [one.parts for one in found] == [
        (ParameterSlice(0, 0, length // 3, 0),),
        (ParameterSlice(0, length // 3, 2 * length // 3, 0),),
        (ParameterSlice(0, 2 * length // 3, length, 0),),
    ]
    assert [one.length for one in shards.shard([length - 1], 3, item_bytes=4)] == [length - 1, 0, 0]


def test_a_large_parameter_that_must_not_be_cut_is_one_servers():
    found = shards.shard([10 * LARGE_BYTES, 8], 3, item_bytes=4, whole=True)
    assert [[part.length for part in one.parts] for one in found] == [[8], [10 * LARGE_BYTES], []]


def test_pieces_are_as_large_as_asked_for_and_come_as_backward_does():
    found = shards.shard([100] * 6, 2, item_bytes=4)
    pieces = shards.pieces(found, item_bytes=4, piece_bytes=800)
    assert [(piece.shard, piece.start, piece.stop) for piece in pieces] == [
        (0, 0, 200),
        (1, 0, 200),
        (0, 200, 300),
        (1, 200, 300),
    ]
    assert [[part.parameter for part in piece.parts] for piece in pieces] == [[5, 3], [4, 2], [1], [0]]


def test_nothing_is_kept_by_servers_beyond_the_parameters():
    found = shards.shard([2], 3, item_bytes=4)
    assert [one.length for one in found] == [2, 0, 0]
    assert len(shards.pieces(found, item_bytes=4)) == 1
