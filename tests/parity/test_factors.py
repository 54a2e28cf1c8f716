"""Linear layers that send gradient factors train like layers that send dense gradients."""

from __future__ import annotations

import copy
import tomllib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon.errors import ModelError
from echelon.observe.events import BucketReduced, Noted, read_events
from echelon.train import factoring
from plain import assert_same, examples, in_session, plainly, seed_weights


def work(name, options, *args):
    """Run in a session, and restore the library constants that a script changes."""
    kept = factoring._LARGE
    try:
        return in_session(globals()[name], options, *args)
    finally:
        factoring._LARGE = kept


class Reader(nn.Module):
    """Several inputs per step for one layer, three dimensions, a layer without bias, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv1d(1, 2, 3)
        self.shared = nn.Linear(6, 5)
        self.tokens = nn.Linear(5, 4, bias=False)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        seen = self.look(x[:, None])  # samples x 2 x 6
        once = torch.tanh(self.shared(seen))
        twice = torch.tanh(self.shared(seen.flip(2)))
        return self.out(self.tokens(once + twice).flatten(1))


class _Failing(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


class Wide(nn.Sequential):
    """Layers that are large relative to the batch, so that their gradients are computed in place."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))


def train(session, journal, habit="plain", overlap="backward", way="always"):
    if way == "auto" and session.world_size > 1:
        factoring._LARGE = 1000
    seed_weights(session)
    model = (Wide() if way == "auto" else Reader()).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    loader = DataLoader(examples(), batch_size=12)
    loss_of = {"sum": "sum"}.get(habit, "mean")
    model, optimizer, loader = session.prepare(
        model, optimizer, loader, factors=way, loss=loss_of, overlap=overlap
    )
    for epoch in session.epochs(7):
        for x, y in loader:
            if habit == "grow" and epoch % 2:
                x, y = torch.cat([x, x]), torch.cat([y, y])
            optimizer.zero_grad(set_to_none=habit != "zero in place")
            if habit == "discards":
                with session.accumulate():
                    F.cross_entropy(model(x * 2), y).backward()
                optimizer.zero_grad(set_to_none=epoch % 2 == 0)
            if habit == "pieces":
                half = max(1, len(x) // 2)
                with session.accumulate():
                    (F.cross_entropy(model(x[:half]), y[:half], reduction="sum") / len(x)).backward()
                (F.cross_entropy(model(x[half:]), y[half:], reduction="sum") / len(x)).backward()
            loss = F.cross_entropy(model(x), y, reduction=loss_of)
            if habit == "sum":
                loss = loss / 12
            if habit != "pieces":
                loss.backward(retain_graph=habit == "twice")
            if habit == "twice":
                loss.backward()
            if habit == "clip":
                journal.note_figure(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            if habit == "sum":
                journal.note_sum(loss)
            else:
                journal.note(loss, len(x))
    if way == "auto" and session.world_size > 1:
        assert type(model[2]) is not nn.Linear, "not computed in place"
    return model


@pytest.mark.parametrize("way", ["always", "auto"])
@pytest.mark.parametrize("overlap", ["backward", "step"])
@pytest.mark.parametrize(
    "habit", ["plain", "grow", "pieces", "sum", "twice", "clip", "zero in place", "discards"]
)
def test_factors_and_in_place_gradients_train_like_dense_gradients(warm_pool, habit, overlap, way):
    workers, options = (4, {"shares": (4, 3, 2, 1)}) if habit == "plain" else (2, {"shares": (3, 1)})
    found = warm_pool.run(workers, work, "train", options, habit, overlap, way)
    assert_same(plainly(train, habit, "backward", way), found, rtol=1e-7)


def forgets():
    """The gradients after a failed backward pass, zero_grad and another backward pass."""
    with echelon.join(record=False, round_timeout_s=90) as session:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = session.prepare(model, optimizer, factors="always")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with pytest.raises(ZeroDivisionError), session.accumulate():
            model[1](_Failing.apply(model[0](torch.full((2, 4), 100.0)))).sum().backward()
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]


def test_zero_grad_also_clears_the_rows_of_a_failed_backward_pass(warm_pool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model(torch.ones(2, 4)).sum().backward()
    for gradients in warm_pool.run(2, forgets):
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, p.grad)


def recorded(rule):
    with echelon.join(name="factored", transport="tcp", round_timeout_s=90) as session:
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer, factors=rule)
        before = copy.deepcopy(model.state_dict())
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])
    plan = tomllib.loads(session.folder.plan.read_text())
    return plan, list(read_events(session.folder.events_of(session.rank)))


def test_plan_and_record_contain_the_choice_of_factors_and_its_reason(warm_pool):
    (plan, events), (_, others) = warm_pool.run(2, recorded, "always")
    (said,) = [event.text for event in events if isinstance(event, Noted) and "factors" in event.text]
    assert "2 of 2 linear layers" in said
    assert "instead of" in said
    assert "64x64" in plan["reasons"]["factors"]
    assert not any(isinstance(event, Noted) for event in others)
    assert [event.how for event in events if isinstance(event, BucketReduced)].count("factors") == 4


def train_with_extra_gradients(session, journal, way, overlap):
    """From the third epoch on, weights get gradient terms that the factors do not contain."""
    if way == "auto" and session.world_size > 1:
        factoring._LARGE = 1000
    seed_weights(session)
    model = Wide().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(examples(), batch_size=12)
    model, optimizer, loader = session.prepare(model, optimizer, loader, factors=way, overlap=overlap)
    handle = None
    for epoch in session.epochs(7):
        for turn, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            if epoch == 4 and handle is None:  # a hook changes the gradient
                handle = model[2].weight.register_hook(lambda grad: 2 * grad)
            loss = F.cross_entropy(model(x), y)
            if epoch == 2:  # a penalty on a weight
                loss = loss + 1e-2 * model[2].weight.square().sum()
            if epoch == 3:  # in some steps only, and in micro-batches
                with session.accumulate():
                    (
                        F.cross_entropy(model(x), y) + 1e-2 * (turn % 2) * model[0].weight.abs().sum()
                    ).backward()
            if epoch == 5 and handle is not None:
                handle.remove()
                loss = loss + F.linear(torch.tanh(model[0](x)), model[2].weight).square().mean()
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


@pytest.mark.parametrize("overlap", ["backward", "step"])
@pytest.mark.parametrize("way", ["always", "auto"])
def test_gradient_terms_outside_the_factors_are_still_reduced(warm_pool, way, overlap):
    found = warm_pool.run(2, work, "train_with_extra_gradients", {"shares": (3, 1)}, way, overlap)
    assert_same(plainly(train_with_extra_gradients, way, overlap), found, rtol=1e-7)


def doubled():
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer, factors="always")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        x = torch.ones(2, 4, requires_grad=True)
        with pytest.raises(ModelError) as error:
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return str(error.value)


def test_double_backward_after_the_first_step_is_refused_by_name(warm_pool):
    for said in warm_pool.run(2, doubled):
        assert "layer 1" in said
        assert "--factors never" in said


def use_weight_outside_its_layer(session, journal):
    """A layer whose weight is also used outside it from the first step on stays dense."""
    seed_weights(session)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(examples(), batch_size=12)
    model, optimizer, loader = session.prepare(model, optimizer, loader, factors="always")
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + 1e-2 * model[0].weight.square().sum()
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def test_layer_that_cannot_use_factors_in_the_first_step_stays_dense(warm_pool):
    found = warm_pool.run(2, work, "use_weight_outside_its_layer", {})
    assert_same(plainly(use_weight_outside_its_layer), found, rtol=1e-8)
