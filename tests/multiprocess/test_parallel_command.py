"""`echelon run --parallel`: a script with an unchanged loop on stages, and what the command refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
import torch
from torch import nn
import echelon

session = echelon.join()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 6).double(), torch.arange(8) % 3
model, optimizer = session.prepare(model, optimizer)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(float(loss.detach()))
held = [name for name, p in model.named_parameters() if not p.isnan().any()]
with open(f"{sys.argv[1]}/rank-{session.rank}.json", "w") as file:
    json.dump([losses, held], file)
session.close()
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "echelon", "run", *options, "train.py", str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_script_runs_in_stages_with_the_losses_of_one_worker(tmp_path: Path) -> None:
    alone = run(tmp_path, "--workers", "1")
    assert alone.returncode == 0, alone.stderr
    losses, names = json.loads((tmp_path / "rank-0.json").read_text())
    staged = run(tmp_path, "--workers", "2", "--parallel", "pipeline(stages=2, schedule=1f1b)")
    assert staged.returncode == 0, staged.stderr
    held: list[str] = []
    for rank in range(2):
        found, own = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < 1e-12
        held += own
    assert sorted(held) == sorted(names)
    summaries = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/summary.json")]
    (summary,) = (one for one in summaries if one["world_size"] == 2)
    first, second = summary["stages"]
    assert (first["begin"], first["end"], second["end"]) == (0, second["begin"], 3)
    assert min(first["busy_s"], first["predicted_s"], second["busy_s"], second["predicted_s"]) > 0
    assert set(first["waits_s"]) == {"1"}
    assert "stages waited" in staged.stdout + staged.stderr


def test_verify_with_a_layout_is_refused_before_workers_start(tmp_path: Path) -> None:
    refused = run(tmp_path, "--workers", "2", "--parallel", "pipeline(stages=2)", "--verify", "gradients")
    said = " ".join((refused.stdout + refused.stderr).split())
    assert refused.returncode != 0
    assert "verify gradients does not work with a model in parts" in said
    assert "use --verify none, or --parallel data" in said
    assert "Traceback" not in said
    assert not (tmp_path / "rank-0.json").exists()
