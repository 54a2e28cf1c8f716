"""Parameters are split between servers: every element once, in balance, in the order of backward."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from echelon.server.layout import LARGE_BYTES, cut_pieces, split

lengths = st.lists(st.integers(0, 3 * LARGE_BYTES), max_size=12)
servers = st.integers(1, 6)
items = st.sampled_from([2, 4, 8])


@given(lengths, servers, items, st.booleans())
def test_every_element_is_in_exactly_one_shard(lengths, servers, item_bytes, whole):
    found = split(lengths, servers, item_bytes=item_bytes, whole=whole)
    assert len(found) == servers
    for parameter, length in enumerate(lengths):
        parts = sorted((p.start, p.stop) for one in found for p in one.parts if p.parameter == parameter)
        assert parts[0][0] == 0
        assert parts[-1][1] == length
        assert all(one[1] == other[0] for one, other in pairwise(parts))
        assert not whole or len(parts) == 1
    for one in found:
        at = 0
        for part in one.parts:
            assert part.at == at
            at += part.length
        assert one.length == at


@given(lengths, servers, items)
def test_servers_hold_equal_bytes_except_for_one_whole_parameter(lengths, servers, item_bytes):
    held = [one.length * item_bytes for one in split(lengths, servers, item_bytes=item_bytes)]
    cut = sum(length * item_bytes >= LARGE_BYTES * servers for length in lengths)
    assert max(held) - min(held) <= LARGE_BYTES * servers + cut * item_bytes


@given(lengths, servers, st.integers(1, 2 * LARGE_BYTES))
def test_pieces_cover_every_shard_in_order_and_none_is_too_small(lengths, servers, piece_bytes):
    found = split(lengths, servers, item_bytes=4)
    pieces = cut_pieces(found, item_bytes=4, piece_bytes=piece_bytes)
    for index, one in enumerate(found):
        mine = sorted((p for p in pieces if p.shard == index), key=lambda p: (p.start, p.stop))
        assert [part for piece in mine for part in piece.parts] == list(one.parts)
        assert sum(piece.stop - piece.start for piece in mine) == one.length
        for piece in mine[:-1]:
            assert (piece.stop - piece.start) * 4 >= piece_bytes
            without = piece.stop - piece.start - piece.parts[-1].length
            assert without * 4 < piece_bytes


@given(lengths, servers)
def test_pieces_are_complete_in_the_order_in_which_they_are_sent(lengths, servers):
    """Backward reaches the first parameter of a piece last."""
    pieces = cut_pieces(split(lengths, servers, item_bytes=4), item_bytes=4)
    ready = [min(part.parameter for part in piece.parts) for piece in pieces]
    assert ready == sorted(ready, reverse=True)
