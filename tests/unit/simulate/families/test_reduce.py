"""Synchronous policies equal one process with the global batch."""

from dataclasses import replace

import pytest
import torch

LOCKSTEP = [
    "full",
    "backup(0)",
    "bounded-delay(0)",
    "smooth-switch(start=4, waiting=true)",
    "percentage(1.0)",
    "local(1)",
]


@pytest.mark.parametrize("policy", LOCKSTEP)
def test_lockstep_equals_one_process_with_momentum_and_unequal_workers(policy, setting, play, plainly):
    setting = replace(setting, momentum=0.9, delay="uniform(0, 0.02)", speeds=(1.0, 0.5, 0.25, 1.0))
    played = play(setting, policy)
    updates = played.totals.updates
    assert updates >= 5
    assert played.totals.applied == 4 * updates
    assert played.totals.staleness_max == 0
    expected = plainly(setting, 16, updates)
    assert torch.allclose(played.weights[0], expected, atol=1e-5)
    assert not torch.allclose(played.weights[0], plainly(setting, 16, updates - 1), atol=1e-4)


@pytest.mark.parametrize("policy", ["async", "hogwild", "downpour(1, 1)", "downpour(2, 2)", "none"])
def test_one_worker_is_one_process_under_any_policy(policy, setting, play, plainly):
    setting = replace(setting, workers=1)
    played = play(setting, policy)
    assert played.totals.applied >= 20
    assert torch.allclose(played.weights[0], plainly(setting, 4, played.totals.applied), atol=1e-5)
