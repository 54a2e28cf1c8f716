"""Real `echelon probe`: what it finds, writes and prints; its cache; machines that do not answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from echelon.plan.cluster_file import read_cluster
from sshd import MISSING, SshServer

SOURCE = Path(__file__).parents[2] / "src"


def probe(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ECHELON_CACHE": str(folder / "cache"), "TMPDIR": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "echelon", "probe", *words],
        capture_output=True, text=True, timeout=300, check=False, cwd=folder, env=env,
    )  # fmt: skip


def test_workers_here_are_measured_written_shown_and_cached(tmp_path: Path) -> None:
    words = ("--workers", "2", "--model", "lenet", "--batch", "16")
    first = probe(tmp_path, *words, "-o", "cluster.toml")
    assert first.returncode == 0, first.stderr
    assert "forward and backward of lenet" in first.stderr  # progress
    assert "cluster.toml" in first.stderr
    read = read_cluster((tmp_path / "cluster.toml").read_text(), "cluster.toml")
    names = [node.name for node in read.topology.nodes]
    assert len(set(names)) == 2
    assert read.job is not None
    assert list(read.job.costs) == names
    assert read.job.cost.at(16) > 0
    for word in (*names, "samples/s", "Gradients have", "measured in"):
        assert word in first.stdout
    assert "from the cache" not in first.stdout
    assert not list(tmp_path.glob("echelon-probe-*"))  # its record is gone

    again = probe(tmp_path, *words, "--json")
    assert again.returncode == 0, again.stderr
    cached = json.loads(again.stdout)
    assert set(cached["ages_s"]) == {"links", "compute"}
    assert {(pair["sender"], pair["receiver"]) for pair in cached["pairs"]} == {
        (names[0], names[1]),
        (names[1], names[0]),
    }
    sizes = sum(layer["size_bytes"] for layer in cached["job"]["layers"])
    assert sizes == read.job.gradient_bytes
    # Both workers are on one machine, so one entry serves both: that of the worker that wrote last.
    kept_s = cached["job"]["cost"]["per_sample_s"]
    assert any(kept_s == pytest.approx(cost.per_sample_s, rel=1e-3) for cost in read.job.costs.values())


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_machine_that_does_not_answer_is_named_and_left_out(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = SshServer(Path(folder), SOURCE)
        try:
            ended = probe(
                tmp_path, "--hosts", "a,nobody.invalid", "--on", server.launcher, "--json",
            )  # fmt: skip
            assert ended.returncode == 0, ended.stderr
            found = json.loads(ended.stdout)
            assert list(found["left_out"]) == ["nobody.invalid"]
            assert [node["name"] for node in found["topology"]["nodes"]] == ["a"]
        finally:
            server.close()
