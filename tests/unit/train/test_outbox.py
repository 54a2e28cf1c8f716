"""A worker pushes each gradient once it is there, the last layer's first, and again if it was changed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon.errors import ConfigError
from echelon.train.served import coding
from echelon.train.served.layout import Layout
from echelon.train.served.outbox import Outbox
from echelon.train.served.protocol import CODED

LARGE = 300_000  # elements: above a piece, and cut if there are two servers
SHAPES = ((3, 4), (LARGE,), (), (5,), (LARGE, 2))
some_shapes = st.lists(
    st.sampled_from([(), (1,), (7,), (3, 5), (2, 0), (100_000,), (300, 200)]), min_size=1, max_size=6
)


def parameters(shapes=SHAPES):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


class Post:
    """What an outbox has sent: copies, in order."""

    def __init__(self, *, codec="none", servers=1, shapes=SHAPES, early=True):
        self.parameters = parameters(shapes)
        self.layout = Layout(self.parameters, servers, whole=False)
        self.letters = []
        how = coding.open_coding(codec, torch.float32, 0, [p.shape for p in self.parameters])
        coded = None if how is None else coding.Outgoing(how, self.layout.pieces, 0)
        self.outbox = Outbox(self.layout, coded, self._take, early=early)
        for p in self.parameters:
            p.grad = torch.randn_like(p)

    def _take(self, piece, memory, flags):
        self.letters.append((piece, bytes(memory), flags))

    def received(self):
        """What the servers have, shaped like the parameters; of what was sent twice, the last."""
        flats = self.layout.room()
        for piece, memory, flags in self.letters:
            assert not flags
            values = torch.frombuffer(bytearray(memory), dtype=torch.float32)
            flats[piece.shard][piece.start : piece.stop] = values
        return self.layout.spread(flats)

    def backward(self):
        """Say that gradients are there, in backward's order."""
        for place in reversed(range(len(self.parameters))):
            self.outbox.ready(place)

    def assert_all_there(self):
        for got, p in zip(self.received(), self.parameters, strict=True):
            assert torch.equal(got, torch.zeros_like(p) if p.grad is None else p.grad)


@settings(max_examples=60, deadline=None)
@given(some_shapes, st.integers(1, 5), st.booleans())
def test_what_is_gathered_into_shards_is_spread_from_them(shapes, servers, whole):
    layout = Layout(parameters(shapes), servers, whole=whole)
    tensors = [torch.randn(shape) for shape in shapes]
    flats = layout.room()
    layout.gather(flats, tensors)
    assert sum(flat.numel() for flat in flats) == sum(one.numel() for one in tensors)
    for got, put in zip(layout.spread(flats), tensors, strict=True):
        assert torch.equal(got, put)
    for place, put in enumerate(tensors):
        layout.fill(flats, place)
        assert torch.equal(layout.parameters[place].detach(), put)


def test_parameters_that_are_not_contiguous_are_filled_too():
    turned = nn.Parameter(torch.zeros(4, 3).t())
    layout = Layout([turned], 1, whole=False)
    flats = layout.room()
    layout.gather(flats, [torch.arange(12.0).view(3, 4)])
    with torch.no_grad():
        layout.fill(flats, 0)
    assert torch.equal(turned.detach(), torch.arange(12.0).view(3, 4))


@settings(max_examples=40, deadline=None)
@given(some_shapes, st.integers(1, 5))
def test_an_optimizers_state_is_cut_and_joined(shapes, servers):
    layout = Layout(parameters(shapes), servers, whole=False)
    state = {
        p: {"exp_avg": torch.randn_like(p), "step": torch.tensor(3.0), "name": "x"}
        for p in layout.parameters
        if p.numel()
    }
    cut = layout.cut_states(state)
    assert bool(cut) == bool(state)
    joined = layout.join_states(enumerate(cut))
    assert joined.keys() == state.keys()
    for p, of_p in state.items():
        assert torch.equal(joined[p]["exp_avg"], of_p["exp_avg"])
        assert (joined[p]["step"], joined[p]["name"]) == (3.0, "x")


def test_two_types_of_numbers_are_refused():
    mixed = [*parameters(), nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    with pytest.raises(ConfigError, match="one type of numbers"):
        Layout(mixed, 1, whole=False)


@pytest.mark.parametrize("servers", [1, 2])
def test_pieces_leave_during_backward_the_last_layers_first(servers):
    post = Post(servers=servers)
    last = len(SHAPES) - 1
    post.outbox.ready(last)
    assert post.letters
    assert {part.parameter for piece, *_ in post.letters for part in piece.parts} == {last}
    post.backward()
    assert len(post.letters) == len(post.layout.pieces), "each once"
    assert post.outbox.push_gradients() is None
    assert len(post.letters) == len(post.layout.pieces)
    post.assert_all_there()


def test_a_piece_waits_for_all_its_gradients():
    post = Post()
    post.outbox.ready(0)
    assert not post.letters, "the last layer's come first"


@pytest.mark.parametrize("frozen", [0, 3])
def test_frozen_parameters_are_not_awaited(frozen):
    post = Post()
    for p in post.parameters[frozen : frozen + 2]:
        p.requires_grad_(False)
        p.grad = None
    post.outbox.finish()
    for place in (4, 3, 2, 1, 0):
        if post.parameters[place].requires_grad:
            post.outbox.ready(place)
    assert len(post.letters) == len(post.layout.pieces)
    post.assert_all_there()


@pytest.mark.parametrize("change", ["scaled", "dropped", "in one element"])
def test_what_was_changed_after_backward_is_sent_again_and_alone(change):
    post = Post(servers=2)
    post.backward()
    before = len(post.letters)
    large = post.parameters[4]
    if change == "scaled":
        large.grad.mul_(0.5)
    elif change == "dropped":
        large.grad = None
    else:
        large.grad[0, 0] += 1.0
    post.outbox.push_gradients()
    again = post.letters[before:]
    assert 0 < len(again) < before
    assert all(4 in {part.parameter for part in piece.parts} for piece, *_ in again)
    post.assert_all_there()


def test_who_keeps_changing_gradients_sends_them_once_in_the_end():
    post = Post()
    rounds = 0
    while post.outbox.early:
        post.backward()
        post.parameters[4].grad.mul_(0.5)
        post.outbox.push_gradients()
        post.outbox.finish()
        rounds += 1
        assert rounds < 10
    assert rounds > 1, "once may be chance"


def test_the_bytes_of_a_push_are_those_that_were_sent():
    post = Post()
    post.backward()
    post.outbox.push_gradients()
    assert post.outbox.sent_bytes == 0, "not until all is sent"
    post.outbox.finish()
    assert post.outbox.sent_bytes == sum(len(memory) for _, memory, _ in post.letters)
    assert post.outbox.sent_bytes == sum(4 * p.numel() for p in post.parameters)


@pytest.mark.parametrize("codec", ["none", "top-k(ratio=0.05)"])
def test_only_with_a_codec_it_matters_that_gradients_are_finite(codec):
    post = Post(codec=codec)
    post.parameters[1].grad[7] = torch.nan
    post.backward()
    odd = post.outbox.push_gradients()
    if codec == "none":
        assert odd is post.outbox.odd_gradient() is None
        assert len(post.letters) == len(post.layout.pieces), "NaN has not changed since"
    else:
        assert odd == post.outbox.odd_gradient() == 1
        assert not [piece for piece, *_ in post.letters if any(part.parameter == 1 for part in piece.parts)]


def test_with_a_codec_a_changed_gradient_takes_the_round_back():
    plain, changed = (Post(codec="top-k(ratio=0.05)") for _ in range(2))
    changed.backward()
    for post in (plain, changed):
        for p in post.parameters:
            p.grad.mul_(0.5)
        post.outbox.push_gradients()
        post.outbox.finish()
    pieces = len(plain.layout.pieces)
    assert len(changed.letters) == 2 * pieces
    assert changed.letters[pieces:] == plain.letters, "as if nothing had left before"
    assert all(flags == CODED for *_, flags in plain.letters)
    for kept, other in zip(
        plain.outbox.codec_state().values(), changed.outbox.codec_state().values(), strict=True
    ):
        assert all(torch.equal(kept[name], other[name]) for name in kept)


def test_what_is_no_gradient_is_sent_as_it_is_and_sums_are_coded():
    post = Post(codec="one-bit")
    tensors = [p.detach() for p in post.parameters]
    post.outbox.push(tensors)
    assert {flags for *_, flags in post.letters} == {0}
    for got, put in zip(post.received(), tensors, strict=True):
        assert torch.equal(got, put)
    post.letters.clear()
    post.outbox.push_sum(tensors)
    assert {flags for *_, flags in post.letters} == {CODED}
