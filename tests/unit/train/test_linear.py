"""Linear layers whose rows are captured in backward instead of a weight gradient."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from echelon.errors import ModelError
from echelon.train.linear import attach, detach, eligible, grad_from


class Net(nn.Module):
    """Two linear layers; the second may be called several times."""

    def __init__(self, *, bias=True, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(6, 5, bias=bias, dtype=dtype)
        self.act = nn.ReLU(inplace=True)
        self.last = nn.Linear(5, 5, bias=bias, dtype=dtype)

    def forward(self, x, times=1):
        x = self.act(self.first(x))
        for _ in range(times):
            x = self.last(x)
        return x


class Rig:
    """A net, a plain copy of it, and the captures of the net."""

    def __init__(self, mode="factors", **options):
        torch.manual_seed(0)
        self.net = Net(**options)
        self.plain = copy.deepcopy(self.net)
        self.scale = 1.0
        self.ready = []
        self.taken = {}
        self.captures = attach(eligible(self.net), scale=lambda: self.scale, on_ready=self.on_ready)
        for capture in self.captures.values():
            capture.use(mode)

    def on_ready(self, capture):
        """Take the rows during the backward pass, as a reducer does."""
        self.ready.append(capture.name)
        self.taken.setdefault(capture.name, []).append(capture.take())

    def both(self, act):
        """Run the same on both nets; the other results must be equal to the bit."""
        results = [act(self.net), act(self.plain)]
        for (name, p), (_, q) in zip(
            self.net.named_parameters(), self.plain.named_parameters(), strict=True
        ):
            if name.endswith("bias"):
                assert torch.equal(p.grad, q.grad), name
        return results

    def rows(self, name):
        """The number of rows captured from a layer so far."""
        return self.captures[name].rows + sum(len(rows) for _, rows in self.taken.get(name, []))

    def check(self, factor=1.0):
        """Captured factors plus weight gradients equal the plain net's weight gradient."""
        for name, capture in self.captures.items():
            plain = self.plain.get_submodule(name).weight.grad
            if plain is None:
                assert capture.weight.grad is None
                continue
            expected = plain * factor
            found = sum(grad_from(*part) for part in self.taken.pop(name, []))
            if capture.weight.grad is not None:
                found = found + capture.weight.grad * factor
            torch.testing.assert_close(found, expected)
            assert capture.rows == 0


def inputs(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def loss_of(out):
    return out.square().mean()


@pytest.fixture
def rig():
    return Rig()


@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (2, 3, 2, 6), (6,), (0, 6)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_any_input_give_the_weight_gradient(shape, bias, dtype):
    rig = Rig(bias=bias, dtype=dtype)
    rig.both(lambda net: net(inputs(*shape, dtype=dtype)).square().sum().backward())
    assert {rig.rows(name) for name in rig.captures} == {inputs(*shape).numel() // 6}
    rig.check()


@pytest.mark.parametrize(
    "arrange", [lambda x: x.transpose(0, 1), lambda x: x[::2], lambda x: x.contiguous()]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_and_input_gradient_equal_a_plain_layer_to_the_bit(arrange, dtype):
    rig = Rig(dtype=dtype)

    def act(net):
        x = inputs(8, 9, 6, dtype=dtype).requires_grad_()
        out = net(arrange(x))
        loss_of(out).backward()
        return out, x.grad

    (out, grad), (plain_out, plain_grad) = rig.both(act)
    assert torch.equal(out, plain_out)
    assert torch.equal(grad, plain_grad)
    rig.check()


def test_column_major_input_gives_the_weight_gradient(rig):
    rig.both(lambda net: loss_of(net(inputs(6, 7).t())).backward())
    rig.check()


def test_layer_called_several_times_is_ready_once(rig):
    rig.both(lambda net: loss_of(net(inputs(7, 6), times=3)).backward())
    assert rig.ready == ["last", "first"]
    assert rig.rows("last") == 21
    rig.check()


def test_rows_accumulate_over_backward_passes(rig):
    for seed in (1, 2):
        rig.both(lambda net, seed=seed: loss_of(net(inputs(4, 6, seed=seed))).backward())
    assert rig.ready == ["last", "first"] * 2
    rig.check()


def test_rows_keep_the_scale_at_the_time_of_capture(rig):
    for seed, scale in ((1, 0.25), (2, 3.0)):
        rig.scale = scale
        loss_of(rig.net(inputs(4, 6, seed=seed))).backward()
        (loss_of(rig.plain(inputs(4, 6, seed=seed))) * scale).backward()
    rig.check()


def test_backward_can_run_twice_on_the_same_graph(rig):
    def act(net):
        loss = loss_of(net(inputs(4, 6)))
        loss.backward(retain_graph=True)
        loss.backward()

    rig.both(act)
    rig.check()


def test_rows_are_copies_that_later_changes_do_not_affect(rig):
    x, y = inputs(4, 6), inputs(4, 6)
    rig.net(x).sum().backward()
    rig.plain(y).sum().backward()
    x.zero_()
    rig.check()


def test_input_changed_in_place_before_backward_is_detected(rig):
    x = inputs(4, 6)
    out = rig.net(x)
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_layer_without_rows_gives_empty_factors(rig):
    grads, rows = rig.captures["first"].take()
    assert (grads.shape, rows.shape) == ((0, 5), (0, 6))
    assert torch.equal(grad_from(grads, rows), torch.zeros(5, 6, dtype=torch.float64))


@pytest.mark.parametrize("of", ["first.weight", "last.bias", "input"])
@pytest.mark.parametrize("mode", ["watch", "factors"])
def test_autograd_grad_returns_the_usual_gradients_and_leaves_no_rows(of, mode):
    rig = Rig(mode)
    x = inputs(4, 6).requires_grad_()

    def act(net):
        target = x if of == "input" else net.get_parameter(of)
        return torch.autograd.grad(loss_of(net(x, times=2)), [target])[0]

    assert torch.allclose(act(rig.net), act(rig.plain))
    assert {c.rows for c in rig.captures.values()} == {0}
    assert rig.ready == []
    rig.both(lambda net: loss_of(net(inputs(4, 6))).backward())
    if mode == "factors":
        rig.check()


def test_autograd_grad_inside_a_step_leaves_the_rows_of_that_step(rig):
    rig.both(lambda net: loss_of(net(inputs(4, 6))).backward())
    torch.autograd.grad(loss_of(rig.net(inputs(9, 6))), [rig.net.last.bias])
    rig.check()


def test_backward_for_other_inputs_leaves_no_rows(rig):
    loss_of(rig.net(inputs(4, 6))).backward(inputs=[rig.net.first.bias, rig.net.last.bias])
    assert {c.rows for c in rig.captures.values()} == {0}
    assert rig.ready == []


def test_backward_for_the_weight_alone_gives_it_a_gradient(rig):
    for net in (rig.net, rig.plain):
        loss_of(net(inputs(4, 6))).backward(inputs=[net.first.weight])
    torch.testing.assert_close(rig.net.first.weight.grad, rig.plain.first.weight.grad)
    assert rig.ready == []


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("mode", ["watch", "factors"])
def test_checkpointed_layers_are_captured_once(reentrant, mode):
    rig = Rig(mode)

    def act(net):
        x = inputs(4, 6).requires_grad_()
        inner = checkpoint(lambda x: net(x), x, use_reentrant=reentrant)
        loss_of(net.last(inner)).backward()

    rig.both(act)
    assert (rig.rows("first"), rig.rows("last")) == (4, 8)
    if mode == "factors":
        rig.check()


@pytest.mark.parametrize("mode", ["watch", "factors"])
def test_no_grad_and_frozen_layers_keep_nothing(mode):
    rig = Rig(mode)
    with torch.no_grad():
        rig.net(inputs(4, 6))
    rig.net.first.weight.requires_grad_(False)
    loss_of(rig.net(inputs(4, 6))).backward()
    assert (rig.rows("first"), rig.rows("last")) == (0, 4)
    assert rig.ready == (["last"] if mode == "factors" else [])


def test_layer_frozen_after_forward_keeps_nothing(rig):
    out = rig.net(inputs(4, 6))
    rig.net.first.weight.requires_grad_(False)
    loss_of(out).backward()
    assert rig.captures["first"].rows == 0
    assert rig.ready == ["last"]


def test_replacement_of_the_weight_is_used_unchanged(rig):
    weights = {name: p.detach().mul(2).requires_grad_() for name, p in rig.net.named_parameters()}
    out = torch.func.functional_call(rig.net, weights, (inputs(4, 6),))
    assert torch.equal(out, torch.func.functional_call(rig.plain, weights, (inputs(4, 6),)))
    out.sum().backward()
    assert weights["first.weight"].grad is not None
    assert rig.ready == []


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_double_backward_is_refused_in_factors_mode(rig):
    with pytest.raises(ModelError, match=r"layer last .*create_graph") as caught:
        loss_of(rig.net(inputs(4, 6))).backward(create_graph=True)
    assert caught.value.fix == "use factors='never' (--factors never)"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda net: (loss_of(net(inputs(4, 6))) + net.first.weight.square().sum()).backward(), "outside"),
        (lambda net: F.linear(inputs(4, 6), net.first.weight).sum().backward(), "outside"),
        (lambda net: under_autocast(net), "autocast"),
        (lambda net: net.float()(inputs(4, 6, dtype=torch.float32)).sum().backward(), "float32"),
    ],
)
def test_obstacle_to_factors_is_noted_when_watched_and_gives_a_dense_gradient_later(spoil, why):
    rig = Rig("watch")
    spoil(rig.net)
    assert why in rig.captures["first"].obstacle
    rig = Rig("factors")
    spoil(rig.net)
    spoil(rig.plain)
    rig.check()


def under_autocast(net):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net.float()(inputs(4, 6, dtype=torch.float32)).float().sum().backward()


def test_hook_on_the_weight_sees_its_gradient_in_factors_mode(rig):
    for net in (rig.net, rig.plain):
        net.first.weight.register_hook(lambda grad: grad * 2)
        loss_of(net(inputs(4, 6))).backward()
    rig.check()


@pytest.mark.parametrize("shape", [(4, 6), (2, 2, 6), (6,)])
def test_double_backward_works_when_watched_and_is_noted(shape):
    rig = Rig("watch")

    def act(net):
        x = inputs(*shape).requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(net(x)), [x], create_graph=True)
        grad.square().sum().backward()
        return net.first.weight.grad

    own, plain = act(rig.net), act(rig.plain)
    assert torch.equal(own, plain)
    assert "create_graph" in rig.captures["first"].obstacle


def test_watched_layers_count_rows_and_equal_plain_layers_to_the_bit():
    rig = Rig("watch")
    for seed in (1, 2):
        rig.both(lambda net, seed=seed: loss_of(net(inputs(2, 3, 6, seed=seed), times=3)).backward())
    for name, capture in rig.captures.items():
        assert torch.equal(capture.weight.grad, rig.plain.get_submodule(name).weight.grad)
        assert capture.obstacle == ""
    assert (rig.rows("first"), rig.rows("last")) == (12, 36)
    assert rig.ready == []


def test_forward_from_before_the_choice_of_factors_gives_a_gradient():
    rig = Rig("watch")
    out = rig.net(inputs(4, 6))
    for capture in rig.captures.values():
        capture.use("factors")
    out.sum().backward()
    rig.plain(inputs(4, 6)).sum().backward()
    rig.check()


def test_detached_layers_are_plain_and_older_graphs_give_dense_gradients(rig):
    out = rig.net(inputs(4, 6))
    detach(rig.net)
    assert type(rig.net.first) is nn.Linear
    assert not rig.net.first.weight._backward_hooks
    assert list(vars(rig.net.first)) == list(vars(rig.plain.first))
    loss_of(out).backward()
    loss_of(rig.plain(inputs(4, 6))).backward()
    assert torch.allclose(rig.net.first.weight.grad, rig.plain.first.weight.grad)
    assert rig.ready == []


def test_attached_model_keeps_its_public_interface(rig):
    assert list(rig.net.state_dict()) == list(rig.plain.state_dict())
    assert [name for name, _ in rig.net.named_parameters()] == [n for n, _ in rig.plain.named_parameters()]
    assert repr(rig.net) == repr(rig.plain)
    assert isinstance(rig.net.first, nn.Linear)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, copy.copy, lambda net: pickle.loads(pickle.dumps(net))]
)
def test_copies_and_pickles_are_plain_layers(rig, duplicate):
    twin = duplicate(rig.net.first)
    assert type(twin) is nn.Linear
    assert torch.equal(twin.weight, rig.net.first.weight)
    assert "echelon_capture" not in vars(twin)
    if twin.weight is not rig.net.first.weight:
        twin(inputs(4, 6)).sum().backward()
        assert twin.weight.grad is not None
        assert rig.ready == []


def tied():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def tied_to_an_embedding():
    net = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def hooked():
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda grad: grad)
    return layer


def hooked_after_accumulation():
    layer = nn.Linear(4, 4)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: None)
    return layer


def empty():
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.empty(0, 4))
    return layer


def replaced():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


def compiled_in_place():
    layer = nn.Linear(4, 4)
    layer.compile(backend="eager")
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    "build",
    [
        tied,
        tied_to_an_embedding,
        hooked,
        hooked_after_accumulation,
        empty,
        replaced,
        compiled_in_place,
        lambda: nn.Sequential(torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")),
        lambda: nn.Linear(4, 4, dtype=torch.bfloat16),
        lambda: nn.Linear(4, 4).requires_grad_(False),
        lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
        lambda: prune.random_unstructured(nn.Linear(4, 4), "weight", 0.5),
        lambda: nn.LazyLinear(4),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.Bilinear(4, 4, 4),
        lambda: nn.Linear(4, 4, device="meta"),
    ],
)
def test_layers_that_are_not_plain_linear_are_unchanged(build):
    assert eligible(build()) == {}


def test_module_with_two_names_is_one_layer():
    layer = nn.Linear(4, 4)
    assert eligible(nn.Sequential(layer, nn.ReLU(), layer)) == {"0": layer}


def test_attached_model_compiled_later_gets_dense_gradients_or_is_refused():
    rig = Rig("watch")
    net = torch.compile(rig.net, backend="aot_eager")
    loss_of(net(inputs(4, 6))).backward()
    loss_of(rig.plain(inputs(4, 6))).backward()
    assert torch.allclose(rig.net.first.weight.grad, rig.plain.first.weight.grad)
    assert rig.captures["first"].obstacle
