"""DC-ASGD against its formula."""

from __future__ import annotations

import pytest
import torch

from echelon.errors import ConfigError
from echelon.sync.families.serve import Apply, Arrival, Release, WeightedPush
from echelon.sync.families.shard import Push, ShardState
from echelon.sync.policies.delay_compensated import DelayCompensated
from echelon.sync.policy import POLICIES, ClusterInfo

LR = 0.1


def _shard(policy, start):
    flat = start.clone()
    parameter = torch.nn.Parameter(flat)
    optimizer = torch.optim.SGD([parameter], lr=LR)
    return ShardState(policy, parameter.data, [parameter], optimizer.step)


def _apply(shard, worker, step, gradient):
    shard.push(worker, step, Push("gradient", gradient, [True]))
    shard.apply([WeightedPush(worker, step, 1.0)])


def test_the_server_applies_the_gradient_corrected_for_changed_weights():
    torch.manual_seed(1)
    w, first, second = torch.randn(7), torch.randn(7), torch.randn(7)
    shard = _shard(DelayCompensated(strength=0.5), w)
    shard.read(0), shard.read(1)
    _apply(shard, 0, 0, first.clone())
    now = w - LR * first
    torch.testing.assert_close(shard.flat, now)
    _apply(shard, 1, 0, second.clone())
    torch.testing.assert_close(shard.flat, now - LR * (second + 0.5 * second * second * (now - w)))


def test_adaptive_strength_is_divided_by_the_root_of_the_average_square():
    torch.manual_seed(2)
    policy = DelayCompensated(strength=2.0, adaptive=True, decay=0.9)
    w, read = torch.randn(5), torch.randn(5)
    memory, square = {}, torch.zeros(5)
    for _ in range(4):
        g = torch.randn(5)
        square = 0.9 * square + 0.1 * g * g
        expected = g + 2.0 / torch.sqrt(square + 1e-7) * g * g * (w - read)
        torch.testing.assert_close(policy.amend(g.clone(), w, read, memory), expected)
    torch.testing.assert_close(memory["square"], square)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_correction_leaves_its_arguments_unchanged(adaptive):
    g, w, read = torch.ones(3), torch.full((3,), 2.0), torch.zeros(3)
    DelayCompensated(adaptive=adaptive).amend(g, w, read, {})
    assert (g.tolist(), w.tolist(), read.tolist()) == ([1] * 3, [2] * 3, [0] * 3)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_gradient_without_delay_is_not_corrected(adaptive):
    g, w = torch.randn(4), torch.randn(4)
    assert torch.equal(DelayCompensated(adaptive=adaptive).amend(g, w, w.clone(), {}), g)


def test_every_gradient_is_applied_on_arrival():
    policy = DelayCompensated()
    rule = policy.rule(ClusterInfo(workers=2, servers=1))
    arrival = Arrival(worker=1, step=3, t=0.0)
    assert rule.arrive(arrival) == [Apply((WeightedPush(1, 3, 1.0),)), Release(1)]
    assert policy.amends


@pytest.mark.parametrize(
    "options", ["strength=-1", "strength=nan", "strength=inf", "decay=1", "decay=-0.1"]
)
def test_options_out_of_range_are_refused_with_a_fix(options):
    with pytest.raises(ConfigError, match=r"but must be") as caught:
        POLICIES.build(f"delay-compensated({options})")
    assert caught.value.fix
