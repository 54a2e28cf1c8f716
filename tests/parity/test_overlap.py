"""overlap="step": updates deferred until their first use give the same results."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon.errors import ConfigError, ModelError
from echelon.reduce import packing as buckets
from echelon.reduce.deferred import DeferredGradient, DeferredParameter
from plain import assert_identical, assert_same, examples, in_session, network, plainly, seed_weights

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam-foreach": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def work(name, options, *args):
    return in_session(globals()[name], options, *args)


@contextmanager
def many_buckets():
    """A bucket for nearly every parameter, so that only some are deferred."""
    kept = buckets.FIRST_BYTES, buckets.BUCKET_BYTES
    buckets.FIRST_BYTES = buckets.BUCKET_BYTES = 64
    try:
        yield
    finally:
        buckets.FIRST_BYTES, buckets.BUCKET_BYTES = kept


def train(session, journal, overlap, kind="sgd", habit="plain"):
    """Train seven epochs with the given habit of a script."""
    with many_buckets():
        model = network(session)
        optimizer = OPTIMIZERS[kind](model.parameters())
        loader = DataLoader(examples(), batch_size=12)
        model, optimizer, loader = session.prepare(model, optimizer, loader, overlap=overlap)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        average = copy.deepcopy(model)
        for _ in session.epochs(7):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                if habit == "zero in place":
                    optimizer.zero_grad(set_to_none=False)
                elif habit != "zero late":
                    optimizer.zero_grad()
                if habit == "twice":
                    loss.backward(retain_graph=True)
                loss.backward()
                if habit == "clip":
                    journal.note_figure(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                if habit == "zero late":
                    optimizer.zero_grad()
                if habit == "average":
                    with torch.no_grad():
                        for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                            mean.lerp_(now, 0.1)
                if habit == "state":
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                if habit == "grow":
                    optimizer.param_groups[0]["lr"] *= 1.01
                journal.note(loss, len(x))
            scheduler.step()
        return [model, average]


def test_parameters_are_deferred_between_the_step_and_their_first_use(warm_pool):
    assert warm_pool.run(2, types_around_a_step) == [(True, True, True, [False] * 4)] * 2


def types_around_a_step():
    with many_buckets(), echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer, overlap="step")
        model(torch.ones(3, 4)).sum().backward()
        gradients = all(type(p.grad) is DeferredGradient for p in model.parameters())
        optimizer.step()
        late = all(type(p) is DeferredParameter for p in model.parameters())
        same = (
            model.state_dict().keys()
            == nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).state_dict().keys()
        )
        model(torch.ones(3, 4))
        return gradients, late, same, [type(p) is DeferredParameter for p in model.parameters()]


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_every_torch_optimizer_gives_the_same_bits_with_and_without_deferred_updates(warm_pool, kind):
    options = {"shares": (3, 1)}
    late = warm_pool.run(2, work, "train", options, "step", kind)
    prompt = warm_pool.run(2, work, "train", options, "backward", kind)
    assert_same(plainly(train, "step", kind), late, rtol=1e-7)
    assert_identical(late[0], prompt[0])


@pytest.mark.parametrize(
    "habit", ["zero in place", "zero late", "twice", "clip", "average", "state", "grow"]
)
def test_code_between_steps_sees_the_values_of_a_single_process(warm_pool, habit):
    late = warm_pool.run(2, work, "train", {"transport": "tcp"}, "step", "adamw", habit)
    assert_same(plainly(train, "step", "adamw", habit), late, rtol=1e-6)


def parted(session, journal, overlap):
    """Two optimizers for one model, one of which steps every other time; micro-batches."""
    with many_buckets():
        seed_weights(session)
        body, head = nn.Linear(8, 16).double(), nn.Linear(16, 3).double()
        model = nn.Sequential(body, nn.Tanh(), head)
        one = torch.optim.SGD(body.parameters(), lr=0.2)
        two = torch.optim.AdamW(head.parameters(), lr=0.02)
        loader = DataLoader(examples(), batch_size=12)
        model, one, two, loader = session.prepare(model, one, two, loader, overlap=overlap)
        for _ in session.epochs(7):
            for turn, (x, y) in enumerate(loader):
                model.zero_grad()
                half = max(1, len(x) // 2)
                with session.accumulate():
                    (F.cross_entropy(model(x[:half]), y[:half], reduction="sum") / len(x)).backward()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                two.step()
                if turn % 2:
                    one.step()
                journal.note(loss, len(x))
        return model


def test_two_optimizers_and_accumulation_give_the_same_bits_when_deferred(warm_pool):
    late = warm_pool.run(2, work, "parted", {}, "step")
    prompt = warm_pool.run(2, work, "parted", {}, "backward")
    assert_identical(late[0], prompt[0])
    assert_identical(late[0], late[1])


def step_after_the_session():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = optimizer.step
    with echelon.join(record=False, round_timeout_s=90) as session:
        model, optimizer = session.prepare(model, optimizer, overlap="step")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.step is not step
    assert [type(p) for p in model.parameters()] == [nn.Parameter] * 2
    before = model.bias.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.step == step, (before - model.bias).tolist()


def test_optimizer_has_its_original_step_method_after_the_session(warm_pool):
    for same, moved in warm_pool.run(2, step_after_the_session):
        assert same
        assert moved == pytest.approx([0.1, 0.1])  # 0.05 for each of two gradients of one


class Foreign(torch.optim.SGD):
    """An optimizer that a script defines."""


def refused():
    said = []
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Linear(2, 2)
        for make in (
            lambda: torch.optim.LBFGS(model.parameters()),
            lambda: Foreign(model.parameters(), lr=0.1),
        ):
            with pytest.raises(ConfigError) as error:
                session.prepare(make(), overlap="step")
            said.append(str(error.value))
        hooked = torch.optim.SGD(model.parameters(), lr=0.1)
        hooked.register_step_post_hook(lambda *_: None)
        with pytest.raises(ModelError) as wrong:
            session.prepare(hooked, overlap="step")
        said.append(str(wrong.value))
        plain = session.prepare(torch.optim.SGD(model.parameters(), lr=0.1), overlap="step")
        with pytest.raises(ConfigError) as error:
            plain.step(lambda: 0.0)
        said.append(str(error.value))
        with pytest.raises(ModelError) as wrong:
            session.prepare(torch.compile(nn.Linear(2, 2), backend="eager"), overlap="step")
        said.append(str(wrong.value))
    return said


def test_unsupported_optimizers_and_models_are_refused_with_a_fix(warm_pool):
    for said in warm_pool.run(2, refused):
        assert len(said) == 5
        assert all('overlap="backward"' in text for text in said), said
