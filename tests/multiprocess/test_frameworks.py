"""accelerate, Lightning Fabric and Hugging Face's Trainer on the backend: the losses that Gloo gives.

They run where the extra is installed: pip install "echelon[frameworks]".
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ("accelerate", "lightning", "transformers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING),
    reason=f'engine backend with {", ".join(MISSING)}: not installed: pip install "echelon[frameworks]"',
)

BEGIN = """
import json, os, sys, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import echelon.backend
warnings.simplefilter("ignore")
backend, target = sys.argv[1:3]
torch.manual_seed(0)
torch.set_num_threads(1)
x = torch.randn(32, 6)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
"""

END = """
import torch.distributed as dist
assert dist.get_backend() == backend, dist.get_backend()
everybody = [None] * dist.get_world_size()
dist.all_gather_object(everybody, losses)
if dist.get_rank() == 0:
    json.dump(everybody, open(target, "w"))
dist.destroy_process_group()
"""

ACCELERATE = """
from accelerate import Accelerator
torch.distributed.init_process_group(backend)
accelerator = Accelerator(cpu=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for _ in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach()).mean().item())
"""

FABRIC = """
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
fabric = Fabric(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend))
fabric.launch()
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4))
for _ in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(a), b)
        fabric.backward(loss)
        optimizer.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
"""

TRAINER = """
from transformers import Trainer, TrainingArguments
torch.distributed.init_process_group(backend)

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, a, labels):
        out = self.inner(a)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

rows = [{"a": a, "labels": b} for a, b in data]
arguments = TrainingArguments(
    output_dir=os.path.dirname(target), use_cpu=True, num_train_epochs=2, logging_steps=1,
    per_device_train_batch_size=4, learning_rate=0.05, report_to=[], save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(model=Small(), args=arguments, train_dataset=rows)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
"""


def losses(script: str, backend: str, folder: Path) -> list[list[float]]:
    """What both workers saw."""
    file, target = folder / "train.py", folder / f"{backend}.json"
    file.write_text(BEGIN + script + END)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(file), backend, str(target)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[float]] = json.loads(target.read_text())
    return found


@pytest.mark.parametrize(
    "script", [ACCELERATE, FABRIC, TRAINER], ids=["accelerate", "lightning fabric", "trainer"]
)
def test_framework_trains_as_on_gloo(script: str, tmp_path: Path) -> None:
    ours, peers = (losses(script, backend, tmp_path) for backend in ("echelon", "gloo"))
    assert len(ours[0]) >= 8
    assert ours == peers
