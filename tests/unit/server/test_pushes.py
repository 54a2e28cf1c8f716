"""A worker pushes each gradient when backward has computed it, and again if the script changes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.server import encoding
from echelon.server.layout import TableLayout
from echelon.server.pushes import PushSender

LARGE = 300_000  # elements: more than a piece, and split between two servers
SHAPES = ((3, 4), (LARGE,), (), (5,), (LARGE, 2))


def parameters(shapes=SHAPES):
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


class Sent:
    """A sender and copies of all pieces that it has sent, in order."""

    def __init__(self, *, codec="none", servers=1, shapes=SHAPES, early=True):
        self.parameters = parameters(shapes)
        self.layout = TableLayout(self.parameters, servers, whole=False)
        self.messages = []
        table_codec = encoding.open_codec(codec, torch.float32, 0, [p.shape for p in self.parameters])
        encoder = None
        if table_codec is not None:
            encoder = encoding.PushEncoder(table_codec, self.layout.pieces, 0)
        self.sender = PushSender(self.layout, encoder, self._take, early=early)
        for p in self.parameters:
            p.grad = torch.randn_like(p)

    def _take(self, piece, memory, coded):
        self.messages.append((piece, bytes(memory), coded))

    def received(self):
        """The values on the servers, shaped like the parameters; of a piece sent twice, the last."""
        flats = self.layout.new_flats()
        for piece, memory, coded in self.messages:
            assert not coded
            values = torch.frombuffer(bytearray(memory), dtype=torch.float32)
            flats[piece.shard][piece.start : piece.stop] = values
        return self.layout.from_shards(flats)

    def backward(self):
        """Report all gradients, in backward's order."""
        for place in reversed(range(len(self.parameters))):
            self.sender.ready(place)

    def assert_all_there(self):
        for got, p in zip(self.received(), self.parameters, strict=True):
            assert torch.equal(got, torch.zeros_like(p) if p.grad is None else p.grad)


@pytest.mark.parametrize("servers", [1, 2])
def test_pieces_are_sent_during_backward_the_last_layers_first(servers):
    sent = Sent(servers=servers)
    last = len(SHAPES) - 1
    sent.sender.ready(last)
    assert sent.messages
    assert {part.parameter for piece, *_ in sent.messages for part in piece.parts} == {last}
    sent.backward()
    assert len(sent.messages) == len(sent.layout.pieces), "each once"
    assert sent.sender.push_gradients() is None
    assert len(sent.messages) == len(sent.layout.pieces)
    sent.assert_all_there()


def test_a_piece_waits_for_all_its_gradients():
    sent = Sent()
    sent.sender.ready(0)
    assert not sent.messages, "the last layer's pieces come first"


@pytest.mark.parametrize("frozen", [0, 3])
def test_frozen_parameters_are_not_awaited(frozen):
    sent = Sent()
    for p in sent.parameters[frozen : frozen + 2]:
        p.requires_grad_(False)
        p.grad = None
    sent.sender.finish()
    for place in (4, 3, 2, 1, 0):
        if sent.parameters[place].requires_grad:
            sent.sender.ready(place)
    assert len(sent.messages) == len(sent.layout.pieces)
    sent.assert_all_there()


@pytest.mark.parametrize("change", ["scaled", "dropped", "in one element"])
def test_only_pieces_that_changed_after_backward_are_sent_again(change):
    sent = Sent(servers=2)
    sent.backward()
    before = len(sent.messages)
    large = sent.parameters[4]
    if change == "scaled":
        large.grad.mul_(0.5)
    elif change == "dropped":
        large.grad = None
    else:
        large.grad[0, 0] += 1.0
    sent.sender.push_gradients()
    again = sent.messages[before:]
    assert 0 < len(again) < before
    assert all(4 in {part.parameter for part in piece.parts} for piece, *_ in again)
    sent.assert_all_there()


def test_gradients_that_keep_changing_are_sent_once_at_the_step():
    sent = Sent()
    rounds = 0
    while sent.sender.early:
        sent.backward()
        sent.parameters[4].grad.mul_(0.5)
        sent.sender.push_gradients()
        sent.sender.finish()
        rounds += 1
        assert rounds < 10
    assert rounds > 1, "once may be chance"


def test_sent_bytes_counts_all_bytes_of_the_last_push():
    sent = Sent()
    sent.backward()
    sent.sender.push_gradients()
    assert sent.sender.sent_bytes == 0, "before all is sent"
    sent.sender.finish()
    assert sent.sender.sent_bytes == sum(len(memory) for _, memory, _ in sent.messages)
    assert sent.sender.sent_bytes == sum(4 * p.numel() for p in sent.parameters)


@pytest.mark.parametrize("codec", ["none", "top-k(ratio=0.05)"])
def test_only_a_codec_refuses_gradients_that_are_not_finite(codec):
    sent = Sent(codec=codec)
    sent.parameters[1].grad[7] = torch.nan
    sent.backward()
    refused = sent.sender.push_gradients()
    if codec == "none":
        assert refused is sent.sender.not_finite_gradient() is None
        assert len(sent.messages) == len(sent.layout.pieces), "NaN has not changed since"
    else:
        assert refused == sent.sender.not_finite_gradient() == 1
        assert not [
            piece for piece, *_ in sent.messages if any(part.parameter == 1 for part in piece.parts)
        ]


def test_with_a_codec_a_changed_gradient_sends_the_whole_push_again():
    plain, changed = (Sent(codec="top-k(ratio=0.05)") for _ in range(2))
    changed.backward()
    for sent in (plain, changed):
        for p in sent.parameters:
            p.grad.mul_(0.5)
        sent.sender.push_gradients()
        sent.sender.finish()
    pieces = len(plain.layout.pieces)
    assert len(changed.messages) == 2 * pieces
    assert changed.messages[pieces:] == plain.messages, "as if nothing had been sent before"
    assert all(coded for *_, coded in plain.messages)
    for kept, other in zip(
        plain.sender.codec_state().values(), changed.sender.codec_state().values(), strict=True
    ):
        assert all(torch.equal(kept[name], other[name]) for name in kept)


def test_weights_are_sent_as_they_are_and_summed_gradients_are_coded():
    sent = Sent(codec="one-bit")
    tensors = [p.detach() for p in sent.parameters]
    sent.sender.push(tensors)
    assert {coded for *_, coded in sent.messages} == {False}
    for got, put in zip(sent.received(), tensors, strict=True):
        assert torch.equal(got, put)
    sent.messages.clear()
    for p in sent.parameters:
        p.grad = p.detach().clone()
    for _ in range(2):
        sent.sender.add_to_sum()
    assert sent.sender.push_sum() is None
    assert {coded for *_, coded in sent.messages} == {True}


def test_a_sum_holds_all_gradients_since_the_last_push_and_may_be_sent_without_the_codec():
    sent = Sent(codec="one-bit", early=False)
    for p in sent.parameters:
        p.grad = torch.full_like(p, 0.5)
    for _ in range(3):
        sent.sender.add_to_sum()
    assert sent.sender.push_sum(exact=True) is None
    assert all(bool((got == 1.5).all()) for got in sent.received())


def test_a_sum_that_is_not_finite_is_refused_and_forgotten():
    sent = Sent(codec="one-bit", early=False)
    sent.parameters[3].grad[0] = torch.inf
    sent.sender.add_to_sum()
    assert sent.sender.push_sum() == 3
    assert not sent.messages
    sent.parameters[3].grad[0] = 1.0
    sent.sender.add_to_sum()
    assert sent.sender.push_sum() is None
