"""A worker pushes each gradient once it is there, the last layer's first, and again if it was changed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon.errors import ConfigError
from echelon.server import encoding as coding
from echelon.server.layout import TableLayout
from echelon.server.outbox import Outbox

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
        self.layout = TableLayout(self.parameters, servers, whole=False)
        self.messages = []
        how = coding.open_codec(codec, torch.float32, 0, [p.shape for p in self.parameters])
        coded = None if how is None else coding.PushEncoder(how, self.layout.pieces, 0)
        self.outbox = Outbox(self.layout, coded, self._take, early=early)
        for p in self.parameters:
            p.grad = torch.randn_like(p)

    def _take(self, piece, memory, coded):
        self.messages.append((piece, bytes(memory), coded))

    def received(self):
        """What the servers have, shaped like the parameters; of what was sent twice, the last."""
        flats = self.layout.room()
        for piece, memory, coded in self.messages:
            assert not coded
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
    layout = TableLayout(parameters(shapes), servers, whole=whole)
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
    layout = TableLayout([turned], 1, whole=False)
    flats = layout.room()
    layout.gather(flats, [torch.arange(12.0).view(3, 4)])
    with torch.no_grad():
        layout.fill(flats, 0)
    assert torch.equal(turned.detach(), torch.arange(12.0).view(3, 4))


@settings(max_examples=40, deadline=None)
@given(some_shapes, st.integers(1, 5))
def test_an_optimizers_state_is_cut_and_joined(shapes, servers):
    layout = TableLayout(parameters(shapes), servers, whole=False)
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
        TableLayout(mixed, 1, whole=False)


@pytest.mark.parametrize("servers", [1, 2])
def test_pieces_leave_during_backward_the_last_layers_first(servers):
    mailbox = Post(servers=servers)
    last = len(SHAPES) - 1
    mailbox.outbox.ready(last)
    assert mailbox.messages
    assert {part.parameter for piece, *_ in mailbox.messages for part in piece.parts} == {last}
    mailbox.backward()
    assert len(mailbox.messages) == len(mailbox.layout.pieces), "each once"
    assert mailbox.outbox.push_gradients() is None
    assert len(mailbox.messages) == len(mailbox.layout.pieces)
    mailbox.assert_all_there()


def test_a_piece_waits_for_all_its_gradients():
    mailbox = Post()
    mailbox.outbox.ready(0)
    assert not mailbox.messages, "the last layer's come first"


@pytest.mark.parametrize("frozen", [0, 3])
def test_frozen_parameters_are_not_awaited(frozen):
    mailbox = Post()
    for p in mailbox.parameters[frozen : frozen + 2]:
        p.requires_grad_(False)
        p.grad = None
    mailbox.outbox.finish()
    for place in (4, 3, 2, 1, 0):
        if mailbox.parameters[place].requires_grad:
            mailbox.outbox.ready(place)
    assert len(mailbox.messages) == len(mailbox.layout.pieces)
    mailbox.assert_all_there()


@pytest.mark.parametrize("change", ["scaled", "dropped", "in one element"])
def test_what_was_changed_after_backward_is_sent_again_and_alone(change):
    mailbox = Post(servers=2)
    mailbox.backward()
    before = len(mailbox.messages)
    large = mailbox.parameters[4]
    if change == "scaled":
        large.grad.mul_(0.5)
    elif change == "dropped":
        large.grad = None
    else:
        large.grad[0, 0] += 1.0
    mailbox.outbox.push_gradients()
    again = mailbox.messages[before:]
    assert 0 < len(again) < before
    assert all(4 in {part.parameter for part in piece.parts} for piece, *_ in again)
    mailbox.assert_all_there()


def test_who_keeps_changing_gradients_sends_them_once_in_the_end():
    mailbox = Post()
    rounds = 0
    while mailbox.outbox.early:
        mailbox.backward()
        mailbox.parameters[4].grad.mul_(0.5)
        mailbox.outbox.push_gradients()
        mailbox.outbox.finish()
        rounds += 1
        assert rounds < 10
    assert rounds > 1, "once may be chance"


def test_the_bytes_of_a_push_are_those_that_were_sent():
    mailbox = Post()
    mailbox.backward()
    mailbox.outbox.push_gradients()
    assert mailbox.outbox.sent_bytes == 0, "not until all is sent"
    mailbox.outbox.finish()
    assert mailbox.outbox.sent_bytes == sum(len(memory) for _, memory, _ in mailbox.messages)
    assert mailbox.outbox.sent_bytes == sum(4 * p.numel() for p in mailbox.parameters)


@pytest.mark.parametrize("codec", ["none", "top-k(ratio=0.05)"])
def test_only_with_a_codec_it_matters_that_gradients_are_finite(codec):
    mailbox = Post(codec=codec)
    mailbox.parameters[1].grad[7] = torch.nan
    mailbox.backward()
    odd = mailbox.outbox.push_gradients()
    if codec == "none":
        assert odd is mailbox.outbox.odd_gradient() is None
        assert len(mailbox.messages) == len(mailbox.layout.pieces), "NaN has not changed since"
    else:
        assert odd == mailbox.outbox.odd_gradient() == 1
        assert not [
            piece for piece, *_ in mailbox.messages if any(part.parameter == 1 for part in piece.parts)
        ]


def test_with_a_codec_a_changed_gradient_takes_the_round_back():
    plain, changed = (Post(codec="top-k(ratio=0.05)") for _ in range(2))
    changed.backward()
    for mailbox in (plain, changed):
        for p in mailbox.parameters:
            p.grad.mul_(0.5)
        mailbox.outbox.push_gradients()
        mailbox.outbox.finish()
    pieces = len(plain.layout.pieces)
    assert len(changed.messages) == 2 * pieces
    assert changed.messages[pieces:] == plain.messages, "as if nothing had left before"
    assert all(coded for *_, coded in plain.messages)
    for kept, other in zip(
        plain.outbox.codec_state().values(), changed.outbox.codec_state().values(), strict=True
    ):
        assert all(torch.equal(kept[name], other[name]) for name in kept)


def test_what_is_no_gradient_is_sent_as_it_is_and_sums_are_coded():
    mailbox = Post(codec="one-bit")
    tensors = [p.detach() for p in mailbox.parameters]
    mailbox.outbox.push(tensors)
    assert {coded for *_, coded in mailbox.messages} == {False}
    for got, put in zip(mailbox.received(), tensors, strict=True):
        assert torch.equal(got, put)
    mailbox.messages.clear()
    mailbox.outbox.push_sum(tensors)
    assert {coded for *_, coded in mailbox.messages} == {True}
