"""Each rule: what it finds, where, and what it does about it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import pytest

from echelon.adapt.adapt import Adapted, adapt
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.rule import RULES
from echelon.adapt.text import ScriptText

# A script in which every rule is content; cases below change some of its lines.
PLAIN = """\
import os
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
{imports}
torch.manual_seed(0)
{before}
loader = DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=16)
test_loader = DataLoader(TensorDataset(torch.randn(64, 3)), batch_size=16)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{made}
for epoch in range(2):
    {start}
    for (x,) in loader:
        {batch}
        loss = {loss}
        loss.backward()
        optimizer.step()
        {step}
    {end}
{after}
"""


def _plain(loss: str = "model(x).square().mean()", **parts: str) -> str:
    lines = PLAIN.format(
        loss=loss,
        **dict.fromkeys(("imports", "before", "made", "start", "batch", "step", "end", "after"), "")
        | parts,
    ).splitlines()
    return "\n".join(line for line in lines if line.strip()) + "\n"


@dataclass(frozen=True)
class Case:
    """A script, and what one rule says about it: the level, pieces of the line, the fix and the edit."""

    source: str
    rule: str
    level: str
    at: str
    says: str = ""
    edit: str = ""


CASES = {
    "a loader whose result is thrown away": Case(
        _plain(
            imports="import echelon",
            before="session = echelon.join()",
            made="session.prepare(model, optimizer, loader)",
        ),
        "unassigned",
        "change",
        "session.prepare(",
        edit="model, optimizer, loader = session.prepare(model, optimizer, loader)",
    ),
    "a sum as the loss": Case(
        _plain(loss="nn.functional.mse_loss(model(x), x[:, :1], reduction='sum')"),
        "sum-loss",
        "change",
        "reduction='sum'",
        says='loss="sum"',
        edit='session.prepare(model, optimizer, loader, loss="sum")',
    ),
    "a sum by the old name": Case(
        _plain(made="criterion = nn.MSELoss(size_average=False)", loss="criterion(model(x), x[:, :1])"),
        "sum-loss",
        "change",
        "size_average=False",
        edit='loss="sum")',
    ),
    "a sum divided by a constant stays a sum": Case(
        _plain(loss="nn.functional.mse_loss(model(x), x[:, :1], reduction='sum') / 16"),
        "sum-loss",
        "change",
        "reduction='sum'",
        edit='loss="sum")',
    ),
    "a mean and a sum": Case(
        _plain(loss="nn.functional.mse_loss(model(x), x[:, :1]) + 0.1 * model(x).abs().sum()"),
        "sum-loss",
        "check",
        "abs().sum()",
        says="both parts means",
    ),
    "a sum in a script that is prepared": Case(
        _plain(
            imports="import echelon",
            before="session = echelon.join()",
            made="model, optimizer, loader = session.prepare(model, optimizer, loader)",
            loss="torch.sum(model(x) ** 2)",
        ),
        "sum-loss",
        "change",
        "session.prepare(",
        edit='session.prepare(model, optimizer, loader, loss="sum")',
    ),
    "the batch size in a shape": Case(
        _plain(batch="y = x.view(16, 3)"), "batch-size", "check", "x.view(16, 3)", says="x.size(0)"
    ),
    "the name of the batch size in a shape": Case(
        _plain(before="size = 16", batch="noise = torch.randn(size, 3)").replace(
            "batch_size=16", "batch_size=size"
        ),
        "batch-size",
        "check",
        "torch.randn(size, 3)",
        says="x.size(0)",
    ),
    "a hidden state of the batch size": Case(
        _plain(start="hidden = model.init_hidden(16)"), "batch-size", "check", "init_hidden", says="size(0)"
    ),
    "evaluation over everything": Case(
        _plain(
            end="print(sum(model(x).sum() for (x,) in test_loader))\n    for (x,) in test_loader: print(x)"
        ),
        "evaluation",
        "note",
        "for (x,) in test_loader:",
        says="gather_for_metrics",
    ),
    "evaluation over a share": Case(
        _plain(end="right = 0\n    for (x,) in loader:\n        right += (model(x) > 0).sum().item()"),
        "evaluation",
        "check",
        "for (x,) in loader:\n        right",
        says="session.gather_for_metrics",
    ),
    "a mean of losses": Case(
        _plain(start="total = 0.0", step="total += loss.item()", end="print(total / len(loader))"),
        "figures",
        "change",
        "total += loss.item()",
        edit="    total = session.mean(total)\n    print",
    ),
    "a count": Case(
        _plain(start="right = 0", step="right += (model(x) > 0).sum().item()", end="print(right)"),
        "figures",
        "change",
        "right += ",
        edit="    right = session.all_reduce(torch.tensor(right)).item()\n",
    ),
    "the number of samples": Case(
        _plain(start="seen = 0", step="seen += x.size(0)", end="print(seen)"),
        "figures",
        "change",
        "seen += ",
        edit="    seen = session.all_reduce(torch.tensor(seen)).item()\n",
    ),
    "a loss times the number of samples": Case(
        _plain(start="total = 0.0", step="total += loss.item() * len(x)", end="print(total / 64)"),
        "figures",
        "change",
        "total += ",
        edit="    total = session.all_reduce(torch.tensor(total, dtype=torch.float64)).item()\n",
    ),
    "a figure that is never reset": Case(
        _plain(made="total = 0.0", step="total += loss.item()", end="print(total)"),
        "figures",
        "check",
        "total += ",
        says="after the loop",
    ),
    "a figure in the loop": Case(
        _plain(step="print(loss.item())"), "figures", "note", "print(loss.item())"
    ),
    "a learning rate by the loss of a share": Case(
        _plain(
            made="scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)",
            end="scheduler.step(loss.item())",
        ),
        "figures",
        "check",
        "scheduler.step(",
        says="session.mean(loss",
    ),
    "an end by the loss of a share": Case(
        _plain(end="if loss.item() < 0.1: break"), "figures", "check", "if loss.item()", says="session.mean"
    ),
    "saving on the leader only": Case(
        _plain(
            imports="import echelon",
            before="session = echelon.join()",
            made="model, optimizer, loader = session.prepare(model, optimizer, loader)",
            end="if session.is_leader:\n        session.save('checkpoints')",
        ),
        "rank",
        "check",
        "session.save(",
        says="move it out",
    ),
    "a prepared loader on the leader only": Case(
        _plain(
            imports="import echelon",
            before="session = echelon.join()",
            made="model, optimizer, loader = session.prepare(model, optimizer, loader)",
            end="if session.rank == 0:\n        print(sum(x.sum() for (x,) in loader))",
        ),
        "rank",
        "check",
        "if session.rank == 0",
        says="on all workers",
    ),
    "the rank from torch.distributed": Case(
        _plain(imports="import torch.distributed as dist", before="rank = dist.get_rank()"),
        "rank",
        "change",
        "dist.get_rank()",
        edit="rank = session.rank\n",
    ),
    "the rank from the environment": Case(
        _plain(before="rank = int(os.environ['RANK'])"),
        "rank",
        "change",
        "os.environ['RANK']",
        edit='rank = int(os.environ.get("RANK", "0"))\n',
    ),
    "saving by all": Case(
        _plain(end="torch.save(model.state_dict(), 'm.pt')"),
        "saving",
        "change",
        "torch.save",
        edit="    if session.is_leader:\n        torch.save(model.state_dict(), 'm.pt')\n",
    ),
    "saving in an expression": Case(
        _plain(end="saved = torch.save(model.state_dict(), 'm.pt')"), "saving", "check", "torch.save"
    ),
    "reading what was written": Case(
        _plain(end="torch.save(model, 'm.pt')", after="model = torch.load('m.pt')"),
        "saving",
        "change",
        "torch.load",
        edit="session.barrier()\nmodel = torch.load('m.pt')\n",
    ),
    "a folder": Case(
        _plain(before="os.mkdir('out')"),
        "files",
        "change",
        "os.mkdir",
        edit="os.makedirs('out', exist_ok=True)\n",
    ),
    "folders": Case(
        _plain(before="os.makedirs('a/b')"),
        "files",
        "change",
        "os.makedirs",
        edit="os.makedirs('a/b', exist_ok=True)",
    ),
    "a log": Case(
        _plain(imports="import wandb", before="wandb.init(project='x')"),
        "files",
        "note",
        "wandb.init",
        says="is_leader",
    ),
    "a text file": Case(
        _plain(end="open('log.txt', 'a').write('x')"), "files", "note", "open(", says="is_leader"
    ),
    "a seed by rank": Case(
        _plain(before="rank = int(os.environ.get('RANK', 0))\ntorch.manual_seed(7 + rank)"),
        "seeds",
        "change",
        "torch.manual_seed(7 + rank)",
        edit="torch.manual_seed(7)\n",
    ),
    "a seed in every epoch": Case(
        _plain(start="torch.manual_seed(epoch)"),
        "seeds",
        "note",
        "torch.manual_seed(epoch)",
        says="one seed",
    ),
    "a seed in the loop over batches": Case(
        _plain(batch="torch.manual_seed(1)"), "seeds", "check", "torch.manual_seed(1)", says="session.rank"
    ),
    "data without a seed": Case(
        _plain().replace("torch.manual_seed(0)\n", ""), "seeds", "check", "torch.randn", says="manual_seed"
    ),
    "a process group": Case(
        _plain(
            imports="import torch.distributed as dist",
            before="os.environ['MASTER_PORT'] = '1'\ndist.init_process_group('gloo')",
            after="dist.destroy_process_group()",
        ),
        "process-group",
        "change",
        "dist.init_process_group",
        says="left out",
        edit="import echelon\nsession = echelon.join()\ntorch.manual_seed(0)\nloader",
    ),
    "a question to torch.distributed": Case(
        _plain(imports="import torch.distributed as dist", end="if dist.is_initialized(): print(1)"),
        "process-group",
        "check",
        "dist.is_initialized()",
        says="session.world_size > 1",
    ),
    "a wrapper": Case(
        _plain(
            imports="from torch.nn.parallel import DistributedDataParallel as DDP",
            made="model = DDP(model, device_ids=[0])",
            after="print(model.module.weight)",
        ),
        "wrappers",
        "change",
        "DDP(model",
        says="left out",
        edit="print(model.weight)\n",
    ),
    "another wrapper": Case(
        _plain().replace("model = nn.Linear(3, 1)", "model = nn.DataParallel(nn.Linear(3, 1))"),
        "wrappers",
        "change",
        "nn.DataParallel(",
        edit="model = nn.Linear(3, 1)\n",
    ),
    "a converter of norms": Case(
        _plain(made="model = nn.SyncBatchNorm.convert_sync_batchnorm(model)"),
        "wrappers",
        "change",
        "convert_sync_batchnorm",
        says="left out",
    ),
    "norms under a wrapper": Case(
        _plain(
            imports="from torch.nn.parallel import DistributedDataParallel as DDP",
            made="norm = nn.BatchNorm1d(3)\nmodel = DDP(model)",
        ),
        "wrappers",
        "note",
        "DDP(model)",
        says='batchnorm="local"',
    ),
    "gradients that stay": Case(
        _plain(
            imports="from torch.nn.parallel import DistributedDataParallel as DDP",
            made="net = DDP(model)",
            batch="with net.no_sync(): net(x).mean().backward()",
        ),
        "wrappers",
        "change",
        "net.no_sync()",
        edit="with session.accumulate(): net(x)",
    ),
    "a sampler": Case(
        _plain(imports="from torch.utils.data.distributed import DistributedSampler").replace(
            "batch_size=16)\ntest",
            "batch_size=16, shuffle=False, sampler=DistributedSampler(range(9)))\ntest",
        ),
        "sampler",
        "change",
        "DistributedSampler(",
        edit="batch_size=16, shuffle=True)\ntest",
    ),
    "a sampler in a variable": Case(
        _plain(
            imports="from torch.utils.data import DistributedSampler",
            before="sampler = DistributedSampler(range(9), shuffle=False)",
            start="sampler.set_epoch(epoch)",
        ).replace("batch_size=16)\ntest", "batch_size=16, sampler=sampler)\ntest"),
        "sampler",
        "change",
        "sampler = ",
        edit="batch_size=16, shuffle=False)\ntest",
    ),
    "a sampler or none": Case(
        _plain(
            imports="from torch.utils.data import DistributedSampler",
            before="if os.name:\n    sampler = DistributedSampler(range(9))\nelse:\n    sampler = None",
        ).replace(
            "batch_size=16)\ntest", "batch_size=16, shuffle=(sampler is None), sampler=sampler)\ntest"
        ),
        "sampler",
        "change",
        "DistributedSampler(range(9))",
        edit="    sampler = None\nelse:\n    sampler = None\n",
    ),
    "a sum over workers": Case(
        _plain(
            imports="import torch.distributed as dist", end="dist.all_reduce(loss, op=dist.ReduceOp.AVG)"
        ),
        "collectives",
        "change",
        "dist.all_reduce",
        edit='session.all_reduce(loss, "mean")\n',
    ),
    "a broadcast and a barrier": Case(
        _plain(imports="import torch.distributed as dist", end="dist.broadcast(loss, 0); dist.barrier()"),
        "collectives",
        "change",
        "dist.broadcast",
        edit="session.broadcast(loss, source=0); session.barrier()\n",
    ),
    "a gather": Case(
        _plain(imports="import torch.distributed as dist", end="dist.all_gather([loss], loss)"),
        "collectives",
        "check",
        "dist.all_gather",
        says="session.all_gather(tensor)",
    ),
    "processes of its own": Case(
        _plain(
            imports="import torch.multiprocessing as mp", after="mp.spawn(print, args=(2, 'a'), nprocs=2)"
        ),
        "spawn",
        "change",
        "mp.spawn",
        edit='print(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), \'a\')\n',
    ),
    "an option for a GPU": Case(
        _plain(imports="import argparse", before="argparse.ArgumentParser().add_argument('--local_rank')"),
        "devices",
        "note",
        "--local_rank",
        says="can stay",
    ),
    "a GPU": Case(_plain(batch="x = x.cuda()"), "devices", "note", "x.cuda()", says="session.device"),
    "a GPU by rank": Case(
        _plain(before="rank = 0", batch="x = x.to(rank)"),
        "devices",
        "change",
        "x.to(rank)",
        edit="x = x.to(session.device)\n",
    ),
    "a GPU by rank in a text": Case(
        _plain(before="rank = 0\ndevice = torch.device(f'cuda:{rank}')"),
        "devices",
        "change",
        "torch.device",
        edit="device = session.device\n",
    ),
    "a GPU if there is one": Case(
        _plain(
            before='device = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
            batch="x = x.to(device)",
        ),
        "devices",
        "change",
        "device = torch.device",
        edit="session = echelon.join()\ntorch.manual_seed(0)\ndevice = session.device\n",
    ),
    "a GPU if there is one, as a text": Case(
        _plain(
            before="device = 'cuda' if torch.cuda.is_available() else 'cpu'", end="print(device == 'cuda')"
        ),
        "devices",
        "note",
        "device = 'cuda'",
        says="session.device",
    ),
    "a question": Case(
        _plain(before="name = input('name? ')"), "terminal", "check", "input(", says="option"
    ),
    "a download": Case(
        _plain(imports="import torchvision", before="torchvision.datasets.MNIST('.', download=True)"),
        "download",
        "note",
        "download=True",
        says="once alone",
    ),
    "a stream": Case(
        _plain(
            imports="from torch.utils.data import IterableDataset",
            before="class Lines(IterableDataset):\n    def __iter__(self):\n        yield 1",
        ),
        "streams",
        "note",
        "class Lines",
        says="the same samples",
    ),
    "a stream by rank": Case(
        _plain(
            imports="from torch.utils.data import IterableDataset",
            before="class Lines(IterableDataset):\n    def __iter__(self):\n        yield self.rank",
        ),
        "streams",
        "check",
        "class Lines",
        says="all samples on every worker",
    ),
    "batches of its own": Case(
        "import torch\nmodel = torch.nn.Linear(2, 1)\ntorch.manual_seed(0)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nwhile True:\n    x = torch.randn(8, 2)\n"
        "    model(x).mean().backward()\n    optimizer.step()\n",
        "own-data",
        "note",
        "model(x).mean().backward()",
        says="session.world_size",
    ),
    "a trainer of another library": Case(
        "import lightning as L\nL.Trainer().fit(None)\n",
        "own-loop",
        "check",
        "L.Trainer",
        says="write the loop",
    ),
    "a divided model": Case(
        _plain(imports="from torch.distributed.fsdp import fully_shard", made="fully_shard(model)"),
        "divided",
        "check",
        "from torch.distributed.fsdp",
        says="one process",
    ),
    "epochs from somewhere": Case(
        _plain(before="start = 1").replace("range(2)", "range(start, 3)"),
        "epochs",
        "note",
        "range(start, 3)",
        says="works as it is",
    ),
    "epochs from one": Case(
        _plain(end="print(epoch)").replace("range(2)", "range(1, 3)"),
        "epochs",
        "change",
        "range(1, 3)",
        edit="for epoch in session.epochs(2):\n    epoch += 1  # the session counts from 0\n",
    ),
    "epochs from one that nothing reads": Case(
        _plain().replace("range(2)", "range(1, 3)"),
        "epochs",
        "change",
        "range(1, 3)",
        edit="for epoch in session.epochs(2):\n    for (x,) in loader:\n",
    ),
    "epochs with a progress bar": Case(
        _plain(imports="from tqdm import tqdm").replace("range(2)", "tqdm(range(2))"),
        "epochs",
        "change",
        "range(2)",
        edit="for epoch in tqdm(session.epochs(2)):\n",
    ),
    "a loader that is made again and again": Case(
        "import torch\nfrom torch.utils.data import DataLoader\ntorch.manual_seed(0)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def train():\n    loader = DataLoader(torch.ones(9, 2), batch_size=3)\n    for x in loader:\n"
        "        model(x).mean().backward()\n        optimizer.step()\n"
        "for epoch in range(2):\n    train()\n",
        "prepare",
        "check",
        "loader = DataLoader",
        says="make it once",
    ),
    "accumulation with accelerate": Case(
        "from accelerate import Accelerator\naccelerator = Accelerator(gradient_accumulation_steps=4)\n"
        "with accelerator.accumulate(model):\n    accelerator.backward(loss + 1)\n",
        "accelerate",
        "check",
        "gradient_accumulation_steps=4",
        says="accumulate(not last)",
        edit="    (loss + 1).backward()\n",
    ),
    "a part of accelerate that has no equal": Case(
        "from accelerate import Accelerator\naccelerator = Accelerator()\n"
        "print(accelerator.distributed_type)\nloss.backward()\n",
        "accelerate",
        "check",
        "accelerator.distributed_type",
        says="leave it out",
    ),
    "a mean with Fabric": Case(
        "from lightning.fabric import Fabric, seed_everything\nfabric = Fabric()\n"
        "loss = fabric.all_reduce(loss)\n"
        "total = fabric.all_reduce(a + b, reduce_op='sum')\nfabric.backward(total)\n",
        "fabric",
        "change",
        "fabric.all_reduce(loss)",
        says="fabric.mean(loss)",
        edit="loss = fabric.mean(loss)\ntotal = fabric.all_reduce((a + b).clone())\n",
    ),
}


def _adapt(source: str) -> Adapted:
    return adapt(ScriptText(source), where="train.py")


def _found(result: Adapted, rule: str) -> list[ScriptFinding]:
    return [one for one in result.findings if one.rule == rule]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rule_finds_the_line_and_says_what_to_do(case):
    result = _adapt(case.source)
    found = _found(result, case.rule)
    line = case.source[: case.source.index(case.at)].count("\n") + 1
    assert (case.level, line) in [(one.level, one.line) for one in found], result.findings
    (finding,) = [one for one in found if (one.level, one.line) == (case.level, line)][:1]
    assert case.says in finding.fix
    assert case.edit in result.text
    assert finding.what
    assert finding.why


def test_every_rule_has_a_case():
    assert {case.rule for case in CASES.values()} == set(RULES.names())


def test_every_rule_says_in_one_line_what_it_is_for():
    for rule in RULES.describe():
        assert rule.help.endswith(".")
        assert "\n" not in rule.help


def test_rules_are_content_with_a_plain_script():
    result = _adapt(_plain())
    assert {one.rule for one in result.findings} == {"join", "prepare", "epochs"}


CONTENT = {
    "a mean of a sum over the samples at hand": _plain(
        loss="nn.functional.mse_loss(model(x), x[:, :1], reduction='sum') / x.size(0)"
    ),
    "a penalty on weights": _plain(
        loss="model(x).square().mean() + 0.1 * sum(p.abs().sum() for p in model.parameters())"
    ),
    "a size that is taken from the batch": _plain(
        before="size = 16", batch="size = x.size(0)\n        y = x.view(size, 3)"
    ).replace("batch_size=16", "batch_size=size"),
    "a seed before the model": _plain(before="import random\nrandom.seed(1)"),
    "saving on one worker": _plain(
        before="rank = 0", end="if rank == 0:\n        torch.save(model, 'm.pt')"
    ),
    "a folder that may exist": _plain(before="os.makedirs('out', exist_ok=True)"),
    "a rank with a default": _plain(before="rank = int(os.environ.get('RANK', 0))"),
    "a compiled model": _plain(made="model = torch.compile(model)"),
    "accumulated gradients": _plain(batch="(model(x).mean() / 2).backward()"),
    "a scheduler": _plain(
        made="scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)", end="scheduler.step()"
    ),
    "a closure": _plain(step="optimizer.step(lambda: loss)"),
    "a count of steps": _plain(made="steps = 0", step="steps += 1", end="print(steps)"),
}


@pytest.mark.parametrize("source", CONTENT.values(), ids=CONTENT)
def test_what_is_right_as_it_is_is_not_mentioned(source):
    result = _adapt(source)
    assert {one.rule for one in result.findings} == {"join", "prepare", "epochs"}, result.findings
    assert 'loss="sum"' not in result.text


HIDDEN = """
import torch
from torch.utils.data import DataLoader

def train(model, optimizer, loader):
    total = 0.0
    for x in loader:
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        total += loss.item()
    torch.save(model, "m.pt")
    return total

def main():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.ones(9, 2), batch_size=3)
    for epoch in range(2):
        print(train(model, optimizer, loader))

main()
"""


def test_where_the_session_is_not_seen_the_fix_says_to_pass_it_on():
    result = _adapt(HIDDEN)
    for rule in ("figures", "saving"):
        (finding,) = _found(result, rule)
        assert finding.level == "check"
        assert "train() does not see session yet: give it as an argument" in finding.fix
    assert "session.prepare(model, optimizer, loader)" in result.text
    assert "is_leader" not in result.text


def test_a_function_that_runs_before_the_session_is_there_does_not_use_it():
    source = textwrap.dedent(
        """
        import torch
        from torch.utils.data import DataLoader

        def save(model):
            torch.save(model, "m.pt")

        save(torch.nn.Linear(2, 1))
        if __name__ == "__main__":
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = DataLoader(torch.ones(9, 2), batch_size=3)
            for epoch in range(2):
                for x in loader:
                    model(x).mean().backward()
                    optimizer.step()
                save(model)
        """
    )
    result = _adapt(source)
    (finding,) = _found(result, "saving")
    assert finding.level == "check"
    assert "before the session" in finding.fix


def test_two_loops_over_epochs_are_left_as_they_are():
    source = _plain(
        after="for epoch in range(3):\n    for (x,) in loader:\n        model(x).mean().backward()"
    )
    result = _adapt(source)
    (finding,) = _found(result, "epochs")
    assert finding.level == "note"
    assert "session.epochs(" not in result.text


def test_a_rank_inside_a_text_is_edited_only_where_its_place_is_known():
    source = _plain(imports="import torch.distributed as dist", end="print(f'é {dist.get_rank()}')")
    result = _adapt(source)
    (finding,) = _found(result, "rank")
    edited = "print(f'é {session.rank}')" in result.text
    assert finding.level == ("change" if edited else "check")
    assert edited or "print(f'é {dist.get_rank()}')" in result.text
