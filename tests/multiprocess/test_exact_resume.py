"""A run that stopped and resumed with as many workers has the bits of a run that never stopped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon

STOP = 9


def train(folder, options, saves=False, resume=False):
    """Two epochs of eight steps in float32, with dropout; may save in the background, and go on."""
    join = {name: options[name] for name in ("sync", "codec") if name in options}
    join["shares"] = options.get("shares", "equal")
    with echelon.join(record=False, round_timeout_s=90, **join) as session:
        torch.manual_seed(70 if resume else 7)
        layers = [nn.Linear(40, 50), nn.BatchNorm1d(50), nn.Tanh(), nn.Dropout(0.2), nn.Linear(50, 3)]
        model = nn.Sequential(*layers)
        optimizer = options.get("optimizer", torch.optim.AdamW)(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(96, 40, generator=draw)
        loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=12, shuffle=True)
        model, optimizer, scheduler, loader = session.prepare(
            model, optimizer, scheduler, loader, overlap=options.get("overlap")
        )
        if resume:
            session.load(folder)
            assert session.step == STOP
        for _ in session.epochs(2):
            for a, b in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(a), b).backward()
                optimizer.step()
                scheduler.step()
                if options.get("changes") and session.step == 3:
                    # What adapting shares does when it finds a slow worker.
                    session._shares.change((2, 1, 1), {loader.index: loader.batches_drawn})
                if saves and session.step == STOP:
                    session.save(folder, wait=False)
        settled = {name: value.clone() for name, value in model.state_dict().items()}
        return settled, torch.rand(3), optimizer.state_dict()["param_groups"][0]["lr"]


CASES = {
    "full": {},
    "deferred": {"overlap": "step"},
    "own shares": {"shares": (3, 2, 1)},
    "shares that changed": {"changes": True},
    "top-k": {"codec": "top-k(0.2)"},
    "momentum in the codec": {"codec": "dgc", "optimizer": torch.optim.SGD},
    "fixed": {"codec": "error-feedback(fixed(4))"},
    "local": {"sync": "local(4)"},
    "outer momentum": {"sync": "local(3, outer_lr=0.7, outer_momentum=0.5)"},
    "gossip": {"sync": "gossip"},
    "elastic averaging": {"sync": "elastic-averaging"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_ends_with_the_bits_of_one_that_never_stopped(warm_pool, tmp_path, name):
    options = CASES[name]
    whole = warm_pool.run(3, train, tmp_path / "none", options)
    went_on = warm_pool.run(3, train, tmp_path / "kept", options, True)
    resumed = warm_pool.run(3, train, tmp_path / "kept", options, False, True)
    for other in (went_on, resumed):
        for (state, random, lr), (expected, expected_random, expected_lr) in zip(other, whole, strict=True):
            assert lr == expected_lr
            assert torch.equal(random, expected_random)
            for key, value in expected.items():
                assert torch.equal(state[key], value), key
