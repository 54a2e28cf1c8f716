"""A probe of an emulated cluster finds its sites, its shared uplink and its quotas; nothing is told."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from echelon.start.probe import ProbeAsked, probe

LAB = """
name = "{name}"
[[node]]
name = "a"
site = "east"
cpu = 0.5
link = "200mbit"
[[node]]
name = "b"
site = "west"
cpu = 0.05
link = "200mbit"
[[node]]
name = "c"
site = "east"
cpu = 0.5
link = "200mbit"
[[node]]
name = "d"
site = "west"
cpu = 0.05
link = "200mbit"
[[uplink]]
between = ["east", "west"]
rate = "20mbit"
"""


def test_sites_uplink_and_speeds_are_found_in_mixed_order(
    can_emulate: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "lab.toml"
    file.write_text(LAB.format(name=f"t{secrets.token_hex(4)}"))
    said: list[str] = []
    found = probe(ProbeAsked(lab=str(file), links_limit_s=10.0), said.append)
    sites = {node.name: node.site for node in found.topology.nodes}
    assert sites["a"] == sites["c"] != sites["b"] == sites["d"], found.measured()
    (uplink,) = found.topology.uplinks
    assert uplink.bytes_per_s == pytest.approx(2.5e6, rel=0.5)
    assert [node.cores for node in found.topology.nodes] == [0.5, 0.05, 0.5, 0.05]
    assert not found.notes  # all pairs were measured, all quotas were in force
    speed = {node.name: node.speed for node in found.topology.nodes}
    assert max(speed["b"], speed["d"]) < min(speed["a"], speed["c"])
    assert any("flows at the same time" in each for each in said)
