"""Emulated clusters for tests, built with a prefix of their own, so that other labs are not touched."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import pytest

from echelon.cluster.lab import needs
from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.remove import lab_ids, remove_all
from echelon.cluster.lab.spec import parse_lab
from leaks import LAB_PREFIX

BuildLab = Callable[[str], Lab]


@pytest.fixture(scope="session")
def _machine_can_emulate() -> None:
    lacking = needs.missing()
    if lacking:
        pytest.skip(f"the lab needs {', '.join(lacking)}")


@pytest.fixture
def lab_prefix(_machine_can_emulate: None) -> Iterator[str]:
    """The prefix of this test's labs; afterwards everything with that prefix is gone."""
    prefix = f"{LAB_PREFIX}{secrets.token_hex(3)}"
    yield prefix
    remove_all(prefix)
    assert lab_ids(prefix) == []


@pytest.fixture
def build_lab(lab_prefix: str) -> BuildLab:
    """Builds the lab that a TOML text describes."""

    def build(text: str) -> Lab:
        spec = parse_lab(text, file="test.toml", name="test")
        return Lab.up(spec, f"test-{secrets.token_hex(8)}", prefix=lab_prefix)

    return build


@pytest.fixture
def can_emulate(_machine_can_emulate: None) -> None:
    """For tests that build their own labs, for example through the command line."""
