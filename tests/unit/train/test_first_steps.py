"""A script's own model is profiled in its first steps, and nothing stays in it."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from echelon.plan.job import JobProfile, Layer
from echelon.train.first_steps import ModelFacts, StepProfiler, StepSeen, fitted_cost, fold_steps


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def _step(model: nn.Module, samples: int, profiler: StepProfiler) -> None:
    given = torch.randn(samples, 6)
    profiler.called(model, (given,))
    model(given).square().sum().backward()


@given(
    st.floats(1e-5, 1.0),
    st.floats(1e-6, 1e-1),
    st.lists(st.integers(1, 512), min_size=2, unique=True),
)
def test_shares_that_vary_tell_the_fixed_part(fixed_s, per_sample_s, shares) -> None:
    steps = [StepSeen(samples=share, took_s=fixed_s + share * per_sample_s) for share in shares]
    cost = fitted_cost(steps, apply_s=0.5)
    for share in (1, 100, 512):
        assert cost.at(share) == pytest.approx(fixed_s + share * per_sample_s, rel=1e-3)
    assert cost.apply_s == 0.5


@given(st.lists(st.tuples(st.integers(0, 99), st.floats(0, 10)), min_size=1))
def test_no_part_of_the_cost_is_negative(seen) -> None:
    cost = fitted_cost([StepSeen(samples=samples, took_s=took_s) for samples, took_s in seen])
    assert cost.fixed_s >= 0
    assert cost.per_sample_s >= 0


def test_equal_shares_count_wholly_as_per_sample() -> None:
    cost = fitted_cost([StepSeen(samples=8, took_s=took_s) for took_s in (0.9, 0.8, 5.0)])
    assert (cost.fixed_s, cost.per_sample_s) == (0.0, pytest.approx(0.9 / 8))


def test_gradients_are_ready_where_most_steps_saw_them() -> None:
    facts = ModelFacts(
        name="net",
        batch=8,
        layers=(
            Layer(name="a", size_bytes=4),
            Layer(name="b", size_bytes=8),
            Layer(name="c", size_bytes=1),
        ),
    )
    first = StepSeen(samples=4, took_s=9.0, ready_s={"a": 9.0, "b": 1.0})
    later = [StepSeen(samples=4, took_s=2.0, ready_s={"a": 2.0, "b": at}) for at in (1.0, 1.0, 1.8)]
    found = fold_steps(facts, [first, first, *later])
    assert [layer.ready_at for layer in found.layers] == [1.0, 0.5, 1.0]
    assert found.cost.at(4) == pytest.approx(2.0)
    assert found.gradient_bytes == 13


def test_profile_is_given_once_and_nothing_is_left_in_the_model() -> None:
    model = _model()
    found: list[JobProfile] = []
    profiler = StepProfiler(model, name="net", batch=12, done=found.append, steps=4)
    profiler.attach()
    for step in range(6):
        with torch.no_grad():
            profiler.called(model, (torch.randn(2, 6),))  # no step
        _step(model, 4 + step % 2, profiler)
    assert not profiler.attached
    (profile,) = found
    assert not model._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert (profile.name, profile.batch, profile.exchanges) == ("net", 12, 2)
    assert [layer.name for layer in profile.layers] == [name for name, _ in model.named_parameters()]
    assert profile.gradient_bytes == sum(4 * p.numel() for p in model.parameters())
    assert profile.layers[0].factors == (5, 6)
    assert profile.base_bytes > 1e6
    # Backward goes from the last layer to the first.
    assert profile.layers[-2].ready_at <= profile.layers[2].ready_at <= profile.layers[0].ready_at <= 1


def test_gradients_are_those_without_a_profiler() -> None:
    plain, watched = _model(), _model()
    profiler = StepProfiler(watched, name="net", batch=4, done=lambda _: None)
    profiler.attach()
    for model in (plain, watched):
        torch.manual_seed(1)
        _step(model, 4, profiler)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_waiting_for_others_is_not_computing() -> None:
    model = _model()
    waited = [0.0]
    profiler = StepProfiler(model, name="net", batch=4, done=lambda _: None, waited_s=lambda: waited[0])
    profiler.attach()

    def wait(_: object) -> None:
        time.sleep(0.05)
        waited[0] += 0.05

    model[3].weight.register_post_accumulate_grad_hook(wait)
    for _ in range(4):
        _step(model, 4, profiler)
    profiler._close_step()
    assert min(step.took_s for step in profiler._seen) < 0.05
    profiler.detach()
