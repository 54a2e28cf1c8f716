"""The name "echelon" in torch.distributed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[3]

CHECK = """
import sys, torch
before = set(sys.modules)
import echelon.backend
loaded = {name for name in set(sys.modules) - before if name.startswith("echelon.")}
assert loaded <= {"echelon.errors", "echelon.backend", "echelon.backend.register"}, loaded
assert "echelon" in torch.distributed.Backend.backend_list
"""


def test_torchs_entry_point_registers_the_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["torch.backends"]["echelon"]
    EntryPoint("echelon", named, "torch.backends").load()()
    assert dist.Backend("echelon") == "echelon"
    assert dist.Backend.backend_capability["echelon"] == ["cpu"]


FIRST = """
import echelon.backend, torch
assert "echelon" in torch.distributed.Backend.backend_list
"""


def test_a_program_may_import_the_backend_before_torch() -> None:
    subprocess.run([sys.executable, "-c", FIRST], check=True, timeout=100)


def test_registering_imports_nothing_of_the_engine() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True, timeout=100)
