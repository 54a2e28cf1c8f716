"""Parameters are shared out by servers: every element once, in balance, in the order of backward."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from echelon.server.layout import LARGE_BYTES, cut_pieces, split

lengths = st.lists(st.integers(0, 3 * LARGE_BYTES), max_size=12)
servers = st.integers(1, 6)
items = st.sampled_from([2, 4, 8])


@given(lengths, servers, items, st.booleans())
def test_every_element_is_kept_exactly_once(lengths, servers, item_bytes, whole):
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
def test_servers_hold_as_many_bytes_as_each_other_but_for_one_parameter_that_is_not_cut(
    lengths, servers, item_bytes
):
    held = [one.length * item_bytes for one in split(lengths, servers, item_bytes=item_bytes)]
    cut = sum(length * item_bytes >= LARGE_BYTES * servers for length in lengths)
    assert max(held) - min(held) <= LARGE_BYTES * servers + cut * item_bytes


@given(lengths, servers, st.integers(1, 2 * LARGE_BYTES))
def test_pieces_cover_every_shard_in_its_order_and_none_is_cut_too_early(lengths, servers, piece_bytes):
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
def test_a_piece_never_waits_for_a_gradient_that_a_later_piece_has_first(lengths, servers):
    """The first parameter of a piece is the last of it that backward reaches."""
    pieces = cut_pieces(split(lengths, servers, item_bytes=4), item_bytes=4)
    ready = [min(part.parameter for part in piece.parts) for piece in pieces]
    assert ready == sorted(ready, reverse=True)
