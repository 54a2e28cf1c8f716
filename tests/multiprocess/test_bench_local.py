"""`echelon bench local` as it is called: real processes, a moment each."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_every_way_is_measured_and_one_that_cannot_be_is_left_out_with_its_reason(tmp_path):
    env = {**os.environ, "NO_COLOR": "1", "TMPDIR": str(tmp_path)}
    words = ["bench", "local", "--model", "cnn", "--batch", "16", "--turns", "1", "--json", "-o", "out"]
    ended = subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told == json.loads((tmp_path / "out" / "local.json").read_text())
    (found,) = told["models"]
    assert (found["model"], found["batch"]) == ("cnn", 16)
    usual = next(way for way in found["ways"] if way["options"]["threads"] == found["cores"])
    assert usual["ratio"] == 1
    assert usual["samples_per_s"] > 0
    for way in found["ways"]:
        # Batch normalisation over a chunk or a thread's part would train another model.
        parts = way["options"]["replicas"] > 1 or way["options"]["samples"] > 0
        assert bool(way["left_out"]) == parts, way
    assert "cnn: training in turns" in ended.stderr, "progress is shown"
    assert not list(tmp_path.glob("echelon*")), "nothing is left behind"
