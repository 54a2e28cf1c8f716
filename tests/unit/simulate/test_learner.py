from dataclasses import replace

import pytest
import torch
from torch import nn

from echelon.simulate.learner import Learner, Problem, TimingOnly
from echelon.simulate.order import Order


def test_every_sample_is_taken_once_per_pass_also_across_batches():
    order = Order(10, seed=1)
    taken = torch.cat([order.take(4) for _ in range(5)]).tolist()
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))
    assert taken[:10] != taken[10:]
    assert order.passes == 2


def test_a_batch_may_be_larger_than_the_data():
    assert sorted(Order(3, seed=0).take(6).tolist()) == [0, 0, 1, 1, 2, 2]


def test_the_order_depends_on_the_seed_and_not_on_batch_sizes():
    whole, cut = Order(50, seed=3), Order(50, seed=3)
    assert whole.take(30).tolist() == torch.cat([cut.take(10) for _ in range(3)]).tolist()
    assert Order(50, seed=4).take(50).tolist() != Order(50, seed=3).take(50).tolist()


def test_the_gradient_is_that_of_the_module_at_the_given_weights(problem):
    learner = Learner(problem, 0)
    elsewhere, indices = learner.initial() * 0.5, torch.arange(6)
    gradient, loss = learner.gradient_at(elsewhere, indices)
    module = problem.build(0)
    nn.utils.vector_to_parameters(elsewhere, module.parameters())
    x, y = problem.batch(indices)
    expected = problem.loss(module(x), y)
    expected.backward()
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in module.parameters()])
    assert torch.allclose(gradient, flat, atol=1e-7)
    assert float(loss) == pytest.approx(float(expected.detach()))


def test_the_mean_gradient_of_batches_is_the_mean_of_their_gradients(problem):
    learner = Learner(problem, 0)
    flat = learner.initial()
    batches = list(torch.arange(1200).view(4, 300))  # too many to be computed as one
    each = [learner.gradient_at(flat, batch)[0] for batch in batches]
    assert torch.allclose(learner.mean_gradient_at(flat, batches), sum(each) / 4, atol=1e-6)


def test_initial_weights_depend_only_on_the_seed(problem):
    torch.manual_seed(5)
    first = Learner(problem, 7).initial()
    torch.manual_seed(6)
    state = torch.random.get_rng_state()
    assert torch.equal(Learner(problem, 7).initial(), first)
    assert not torch.equal(Learner(problem, 8).initial(), first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_evaluation_uses_the_given_weights_and_leaves_them_unchanged(problem, setting):
    learner = Learner(problem, 0)
    flat = learner.initial()
    before = flat.clone()
    figures = learner.evaluate(flat)
    assert figures.samples == setting.test_samples
    assert figures == learner.evaluate(before)
    assert torch.equal(flat, before)
    # Of no weights at all comes the same logit for each of ten classes.
    assert learner.evaluate(torch.zeros_like(flat)).test_loss == pytest.approx(2.302585, abs=1e-4)


def test_without_a_limit_all_test_samples_count(setting):
    problem = Problem(replace(setting, test_samples=0))
    assert Learner(problem, 0).evaluate(Learner(problem, 0).initial()).samples == 360


def test_a_timing_only_learner_has_the_models_size_and_no_figures(problem):
    idle = TimingOnly(problem, 0)
    assert idle.size_bytes == Learner(problem, 0).size_bytes > 0
    assert idle.gradient_at(idle.initial(), torch.arange(2))[0].numel() == 0
    assert idle.evaluate(idle.initial()).test_loss is None
