"""Real runs: the second one of a script on machines that were probed is planned from the first."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

from echelon.cluster import probe_cache
from echelon.config.schema import RunSettings
from echelon.plan.cluster_file import write_cluster
from echelon.plan.topology import Node, Topology
from echelon.start.known_links import cluster_key

_TRAIN = ("train", "--model", "mlp(width=16)", "--epochs", "1", "--batch", "32", "--workers", "2")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        capture_output=True, text=True, timeout=200, check=False, cwd=folder, env=dict(os.environ),
    )  # fmt: skip


def test_the_second_run_is_planned_says_so_and_its_summary_scores_the_prediction(tmp_path):
    host = socket.gethostname()
    nodes = tuple(Node(name=f"{host}-{at}") for at in range(2))
    key = cluster_key(RunSettings(), [host, host])
    probe_cache.keep(key, write_cluster(Topology(nodes=nodes, known="measured")))

    first = run(tmp_path, *_TRAIN)
    assert first.returncode == 0, first.stderr
    assert "planned from" not in first.stdout
    again = run(tmp_path, *_TRAIN)
    assert again.returncode == 0, again.stderr
    text = re.sub(r"\s+", " ", again.stdout)
    assert "planned from an earlier probe and an earlier run of this job" in text
    folder = max((tmp_path / "runs").iterdir())
    plan = tomllib.loads((folder / "plan.toml").read_text())
    assert sum(worker["weight"] for worker in plan["workers"]) == 32
    score = json.loads((folder / "summary.json").read_text())["prediction"]
    assert score["ratio"] == score["measured_step_s"] / score["predicted_step_s"]
    off = run(tmp_path, *_TRAIN, "--plan", "none")
    assert off.returncode == 0, off.stderr
    assert "planned from" not in off.stdout
