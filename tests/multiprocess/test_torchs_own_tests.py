"""A chosen part of torch's own tests of backends, from torch's wheel, on Echelon's backend.

All of them, and the same on Gloo: benchmarks/backend_tests.py.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "backend_tests.py"
MISSING = importlib.util.find_spec("expecttest") is None


@pytest.mark.skipif(MISSING, reason="engine backend with torch's own tests: pip install expecttest")
def test_torchs_own_tests_pass() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--only", "echelon", "--quick"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("echelon: 10 passed, 0 failed, 0 do not apply"), done.stdout[-6000:]
