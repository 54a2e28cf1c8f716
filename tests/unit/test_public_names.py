"""The public names are these, each of them is there, and `import echelon` is quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

import echelon

PUBLIC = [
    "CheckpointError",
    "ConfigError",
    "Corrupt",
    "DataError",
    "EchelonError",
    "GradientError",
    "JoinTimeout",
    "LabError",
    "LaunchError",
    "ModelError",
    "PeerLost",
    "RoundTimeout",
    "Session",
    "StaleView",
    "UnknownName",
    "WorkerError",
    "join",
]


def test_the_public_names_are_these():
    assert echelon.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_says_what_it_is(name):
    thing = getattr(echelon, name)
    assert thing.__name__ == name
    assert thing.__doc__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'joyn'"):
        _ = echelon.joyn


def test_importing_echelon_does_not_import_torch():
    code = "import sys, echelon; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
