"""The public names, what `help` and `dir` show of them, what type checkers know, and a quick import."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import echelon

PUBLIC = [
    "CheckpointError",
    "ConfigError",
    "Corrupt",
    "DataError",
    "EchelonError",
    "FunctionFailed",
    "GradientError",
    "JoinTimeout",
    "LabError",
    "LaunchError",
    "MismatchedCalls",
    "ModelError",
    "PeerLost",
    "PlanError",
    "RoundTimeout",
    "Session",
    "StaleView",
    "UnknownName",
    "WorkerError",
    "join",
    "launch",
    "loader_of",
    "register_optimizer",
]


def test_tab_completion_shows_the_public_names_and_nothing_else():
    assert dir(echelon) == PUBLIC


def test_a_star_import_brings_the_front_door():
    assert sorted(echelon.__all__) == ["Session", "join", "launch", "loader_of", "register_optimizer"]


def test_help_leads_with_join_and_session_and_is_not_a_list_of_errors():
    text = pydoc.plain(pydoc.render_doc(echelon))
    description, _, reference = text.partition("CLASSES")
    assert description.index("join ") < description.index("Session ") < description.index("EchelonError")
    assert all(name in description for name in PUBLIC)
    assert "class Session(" in reference
    assert "join(*," in reference
    assert "Error(" not in reference
    assert len(description.splitlines()) < 65


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_has_a_docstring(name):
    thing = getattr(echelon, name)
    assert thing.__name__ == name
    assert thing.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'joyn'"):
        _ = echelon.joyn


def test_importing_echelon_does_not_import_torch():
    code = "import sys, echelon; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SNIPPET = """
import echelon
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from typing import assert_type

session = echelon.join(overlap="step")
assert_type(session, echelon.Session)
net = nn.Linear(2, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
scheduler = StepLR(sgd, 1)
assert_type(session.prepare(net), nn.Linear)
assert_type(session.prepare(net, sgd, overlap="step"), tuple[nn.Linear, torch.optim.SGD])
net, sgd, data = session.prepare(net, sgd, data)
assert_type(len(data), int)
for batch in data:
    pass
four = session.prepare(net, sgd, data, scheduler, batch="per-worker", codec="none")
assert_type(four[0], nn.Linear)
assert_type(four[3], StepLR)
net, sgd, data, scheduler, other = session.prepare(net, sgd, data, scheduler, data)
assert_type(session.all_reduce(torch.ones(1)), torch.Tensor)
session.prepare(42)  # WRONG: not a thing to prepare
session.prepare(net, overlap="setp")  # WRONG: not an overlap
echelon.join(transport="tpc")  # WRONG: not a transport
"""


@pytest.mark.timeout(900)
def test_type_checkers_know_the_return_types_of_prepare(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(SNIPPET)
    root = Path(__file__).parents[2]
    # With the project's settings and cache, since torch takes minutes to analyse.
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = [int(line.split(":")[1]) for line in ran.stdout.splitlines() if ": error:" in line]
    wrong = [number for number, line in enumerate(SNIPPET.splitlines(), start=1) if "# WRONG" in line]
    assert found == wrong, ran.stdout + ran.stderr
