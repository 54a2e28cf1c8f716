"""Every registered check against its contract. New ones are included automatically."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.config.registry import options_of
from echelon.errors import ConfigError
from echelon.verify.verification import VERIFICATIONS, check_verifications, verifications

every_check = pytest.mark.parametrize("name", VERIFICATIONS.names())
RUN = {"together": True, "overlap": "backward", "coded": False}


def test_the_checks_of_the_project_are_registered():
    assert {"gradients", "weights", "replay", "replicate"} <= set(VERIFICATIONS.names())


@every_check
def test_check_needs_workers_that_step_together(name):
    with pytest.raises(ConfigError, match="step together"):
        check_verifications(name, workers=4, **{**RUN, "together": False})
    assert [one.name for one in check_verifications(name, workers=4, **RUN)] == [name]


@every_check
def test_check_says_what_it_does_not_work_with_before_training(name):
    check = VERIFICATIONS.build(name)
    for refused, other in ((check.in_rounds, {"overlap": "step"}), (check.repairs, {"coded": True})):
        if refused:
            with pytest.raises(ConfigError, match=f"verify {name}"):
                check_verifications(name, workers=4, **{**RUN, **other})
        else:
            assert check_verifications(name, workers=4, **{**RUN, **other})


@every_check
def test_check_that_compares_workers_has_nothing_to_do_for_one(name):
    assert bool(check_verifications(name, workers=1, **RUN)) != VERIFICATIONS.build(name).comparing


def test_several_checks_are_separated_by_semicolons_and_given_once():
    assert [one.name for one in verifications("weights(every=3); gradients")] == ["gradients", "weights"]
    assert verifications("none") == verifications("") == ()
    with pytest.raises(ConfigError, match="given twice"):
        verifications("gradients; gradients(limit=3)")
    with pytest.raises(ConfigError, match="unknown verify 'gradiens'"):
        verifications("gradiens")


@pytest.mark.parametrize(
    "text",
    [
        "gradients(limit=0)", "gradients(window=3)", "weights(every=0)", "replay(n=0)", "replay(every=-1)",
        "replay(every=0)", "replicate(1)", "replicate(3)",
    ],
)  # fmt: skip
def test_options_that_cannot_work_are_refused_with_a_fix(text):
    with pytest.raises(ConfigError) as caught:
        check_verifications(text, workers=4, **RUN)
    assert caught.value.fix


class Heard(logging.Handler):
    """What Echelon warns of, as texts."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("echelon").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def trained(verify):
    """A clean run with dropout and batch normalisation, in float64, where rounding does not show."""
    heard = Heard()
    torch.manual_seed(0)
    data = torch.randn(48, 6, dtype=torch.float64)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    ).double()
    with echelon.join(record=False, round_timeout_s=90, verify=verify) as session:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=8, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in session.epochs(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}, heard.texts


@every_check
def test_clean_run_ends_as_without_the_check_and_without_a_finding(name, warm_pool):
    check = VERIFICATIONS.get(name)
    verify = f"{name}(every=2)" if any(one.name == "every" for one in options_of(check)) else name
    checked = warm_pool.run(2, trained, verify)
    alone = VERIFICATIONS.build(name).copies == 2
    plain, _ = warm_pool.run(1 if alone else 2, trained, "none")[0]
    for state, heard in checked:
        assert not heard
        for key, value in plain.items():
            torch.testing.assert_close(state[key], value, rtol=1e-6, atol=1e-7)
            assert torch.equal(state[key], checked[0][0][key])
