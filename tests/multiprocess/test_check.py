"""`echelon check` on scripts of many shapes: what it says of right ones, and of wrong ones.

The sides run on warm workers, as the launcher would run them; tests/multiprocess/test_check_command.py has
the launcher itself.
"""

from __future__ import annotations

import contextlib
import os
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import echelon.check.check as checking
from echelon.check.check import CheckReport, CheckSettings, check
from echelon.check.notes import CheckRequest, read_request, write_request
from echelon.check.probe import Probe
from echelon.check.sides import RunSide, read_side
from echelon.start.failure import Failure
from warm import WorkerFailure

HEAD = """
import os, random, numpy as np, torch, echelon
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

session = echelon.join(record=False)
torch.manual_seed(3)
data = TensorDataset(torch.randn(44, 8), torch.randint(3, (44,)))
loader = DataLoader(data, batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

LOOP = """
for epoch in session.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""


def probed(folder: str) -> None:
    """Run one side's script in a worker, as echelon.check.worker does."""
    request = read_request(Path(folder))
    probe = Probe(
        Path(folder), request, rank=int(os.environ["RANK"]), workers=int(os.environ["WORLD_SIZE"])
    )
    with probe, contextlib.suppress(SystemExit):
        runpy.run_path(request.program[0], run_name="__main__")
    probe.leave()


def _as_the_launcher_tells(failed: WorkerFailure) -> Failure:
    kind, text = type(failed.error).__name__, str(failed.error)
    return Failure(rank=failed.rank, t=0.0, kind=kind, message=text, text=f"{kind}: {text}")


class _Quiet:
    def begin(self, side: str) -> None: ...
    def running(self, side: str) -> None: ...
    def stepped(self, side: str, step: int) -> None: ...


@pytest.fixture
def checked(warm_pool, tmp_path, monkeypatch):
    """`checked(text)`: the report about a script."""

    def run_side(
        folder: Path, side: str, request: CheckRequest, workers: int, shares: str, watcher: _Quiet
    ) -> RunSide:
        folder.mkdir()
        write_request(folder, request)
        ended = SimpleNamespace(failure=None, code=0, log_tail="")
        try:
            warm_pool.run(workers, probed, str(folder))
        except WorkerFailure as failed:
            ended.code, ended.failure = 1, _as_the_launcher_tells(failed)
        return RunSide(result=ended, notes=read_side(folder, workers))  # type: ignore[arg-type]

    monkeypatch.setattr(checking, "run_side", run_side)

    def call(text: str, **settings: int) -> CheckReport:
        script = tmp_path / "train.py"
        script.write_text(HEAD + text)
        return check(CheckSettings(program=[str(script)], name="train.py", **settings), _Quiet())

    return call


def test_dropout_batch_norm_adam_and_an_uneven_last_batch_are_the_same(checked):
    report = checked(
        """
model = nn.Sequential(
    nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4), nn.Unflatten(1, (4, 4)),
    nn.Dropout1d(0.3), nn.Flatten(), nn.Linear(16, 3),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
model, optimizer, loader = session.prepare(model, optimizer, loader)
"""
        + LOOP,
        workers=3,
        steps=5,
    )
    assert report.outcome == "same", report
    assert len(report.steps) == 5
    assert 0 < report.difference < 1e-5
    assert all(step.loss is not None and step.loss < 1e-5 for step in report.steps)
    assert report.text.startswith("the same to ")


TOKENS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.3)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens):
        hidden = self.lstm(F.dropout(self.embed(tokens).transpose(0, 1), 0.2))[0].transpose(0, 1)
        return self.out(self.block(hidden))

tokens = torch.randint(1, 11, (40, 7))
tokens[torch.arange(40)[:, None] % 5 + 2 < torch.arange(7)] = 0  # padding
loader = DataLoader(TensorDataset(tokens), batch_size=8)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(1):
    for (x,) in loader:
        optimizer.zero_grad()
        target = x[:, 1:]
        session.weigh(int((target != 0).sum()))
        guess = model(x[:, :-1])
        F.cross_entropy(guess.reshape(-1, 11), target.reshape(-1), ignore_index=0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if session.is_leader:  # draws on one rank only, as samples are printed
            torch.multinomial(guess[0].softmax(-1), 1), torch.randn(3), random.random()
"""


def test_recurrent_and_attention_layers_over_tokens_are_the_same(checked):
    report = checked(TOKENS, steps=4)
    assert report.outcome == "same", report
    assert report.difference < 1e-5


def test_a_mean_over_tokens_that_is_not_weighed_is_explained_by_the_loss(checked):
    report = checked(TOKENS.replace("session.weigh", "int"), steps=1)
    assert report.outcome == "part"
    assert "is not the mean of its samples' losses" in report.cause
    assert "session.weigh" in report.fix


def test_a_gan_with_noise_and_two_optimizers_is_the_same(checked):
    report = checked(
        """
made = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
judge = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(8, 1))
of_made = torch.optim.Adam(made.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_judge = torch.optim.Adam(judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
made, judge, of_made, of_judge, loader = session.prepare(made, judge, of_made, of_judge, loader)
bce = F.binary_cross_entropy_with_logits
for epoch in session.epochs(1):
    for x, _ in loader:
        of_judge.zero_grad()
        smooth = torch.empty(len(x), 1).uniform_(0.8, 1.0)
        bce(judge(x + 0.1 * torch.randn_like(x)), smooth).backward()
        fake = made(torch.randn(len(x), 4))
        bce(judge(fake.detach()), torch.zeros(len(x), 1)).backward()
        of_judge.step()
        of_made.zero_grad()
        bce(judge(fake), torch.ones(len(x), 1)).backward()
        of_made.step()
""",
        steps=3,
    )
    assert report.outcome == "same", report
    assert [step.step for step in report.steps] == [1, 1, 2, 2, 3, 3]
    assert report.difference < 1e-5


def test_draws_that_depend_on_values_and_recomputed_dropout_are_the_same(checked):
    report = checked(
        """
from torch.utils.checkpoint import checkpoint
layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Tanh())
model = nn.ModuleList([layers, nn.Linear(16, 3)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        x = x + torch.normal(torch.zeros_like(x), 0.1) * torch.bernoulli(torch.full_like(x, 0.5))
        logits = model[1](checkpoint(layers, x, use_reentrant=False))
        action = torch.multinomial(logits.softmax(1), 1)
        two = torch.multinomial(torch.ones(len(x), 3), 2, replacement=True)
        loss = F.cross_entropy(logits, y) - logits.gather(1, action).mean() + logits.gather(1, two).mean()
        loss.backward()
        optimizer.step()
""",
        steps=3,
    )
    assert report.outcome == "same", report
    assert report.difference < 1e-5


def test_random_changes_of_samples_and_numpy_draws_in_loader_processes_are_the_same(checked):
    report = checked(
        """
class Noisy(Dataset):
    def __len__(self):
        return len(data)
    def __getitem__(self, index):
        x, y = data[index]
        return x + torch.randn(8) + float(np.random.rand()) + random.random(), y

loader = DataLoader(Subset(Noisy(), range(40)), batch_size=8, shuffle=True, num_workers=2)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(1):
    for x, y in loader:
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) * (1 + np.random.rand() + random.random())).backward()
        optimizer.step()
        if session.is_leader:
            np.random.rand(), random.random()
""",
        steps=3,
    )
    assert report.outcome == "same", report
    assert report.difference < 1e-5


def test_gradients_over_parts_of_a_share_and_saves_are_the_same_and_said(checked, tmp_path):
    kept = tmp_path / "model.pt"
    kept.write_text("the user's own")
    report = checked(
        f"""
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        for index, part in enumerate(torch.arange(len(x)).chunk(2)):
            with session.accumulate(index == 0):
                (F.cross_entropy(model(x[part]), y[part], reduction="sum") / len(x)).backward()
        optimizer.step()
        torch.save(model.state_dict(), {str(kept)!r})
        assert torch.equal(torch.load({str(kept)!r})["0.weight"], model[0].weight)
        session.save("checkpoints")
        session.load("checkpoints")
""",
        steps=2,
    )
    assert report.outcome == "same", report
    assert kept.read_text() == "the user's own"
    assert "its own files are as they were" in " ".join(report.notes)


def test_a_sum_is_recognised_by_its_factor_although_adam_hides_it_in_the_weights(checked):
    text = """
optimizer = torch.optim.Adam(model.parameters())
model, optimizer, loader = session.prepare(model, optimizer, loader)
""" + LOOP.replace("model(x), y", 'model(x), y, reduction="sum"')
    report = checked(text, steps=2)
    assert report.outcome == "part"
    assert report.text.startswith("they part at step 1: the gradient of 0.weight differs by 0.5")
    assert "all gradients on 2 workers are 1/2 of those alone" in report.cause
    assert 'loss="sum"' in report.fix
    assert checked(text.replace("loader)", 'loader, loss="sum")', 1), steps=2).outcome == "same"


def test_a_loader_that_was_not_prepared_is_named_by_its_line(checked):
    report = checked("model, optimizer = session.prepare(model, optimizer)\n" + LOOP, steps=2)
    assert report.outcome == "part"
    assert "the number of samples differs" in report.text
    assert "each of the 2 workers trained 12 samples" in report.cause
    assert "train.py:16" in report.cause


def test_an_evaluation_on_a_loader_of_its_own_does_not_count_as_training(checked):
    report = checked(
        """
model, optimizer, loader = session.prepare(model, optimizer, loader)
test_loader = DataLoader(data, batch_size=20)
for epoch in session.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        sum(len(y) for x, y in test_loader)
""",
        steps=3,
    )
    assert report.outcome == "same", report


def test_a_learning_rate_that_grows_with_the_workers_is_named(checked):
    report = checked(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4 * session.world_size)
model, optimizer, loader = session.prepare(model, optimizer, loader)
"""
        + LOOP,
        steps=2,
    )
    assert report.outcome == "part"
    assert "the weight of 0.weight" in report.text
    assert "lr of SGD is 0.0001 alone and 0.0002 on workers" in report.cause


def test_local_batch_norm_is_named(checked):
    report = checked(
        """
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader, batchnorm="local")
"""
        + LOOP,
        steps=1,
    )
    assert report.outcome == "part"
    assert report.cause == "1 normalise over each worker's own samples"


def test_a_draw_that_cannot_be_shared_out_is_blamed_and_not_the_script(checked):
    report = checked(
        """
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x + x[torch.randperm(len(x))]), y).backward()
        optimizer.step()
""",
        steps=1,
    )
    assert report.outcome == "part"
    assert "the random draw randperm at " in report.cause
    assert "train.py:18 could not be made the same" in report.cause


def test_a_script_that_does_not_repeat_itself_is_run_alone_again_and_told_so(checked):
    report = checked(
        """
model, optimizer, loader = session.prepare(model, optimizer, loader)
"""
        + LOOP.replace("model(x)", "model(x) * (1 + os.urandom(1)[0] * torch.ones(3).cumsum(0))"),
        steps=1,
    )
    assert report.outcome == "part"
    assert "does not repeat itself" in report.cause


def test_a_loss_over_pairs_of_samples_is_explained_by_the_loss(checked):
    report = checked(
        """
model, optimizer, loader = session.prepare(model, optimizer, loader)
"""
        + LOOP.replace("F.cross_entropy(model(x), y)", "(model(x) @ model(x).T).logsumexp(1).mean()"),
        steps=1,
    )
    assert report.outcome == "part"
    assert "is not the mean of its samples' losses" in report.cause


def test_own_data_in_parts_by_rank_is_the_same_and_the_limits_of_that_are_said(checked):
    report = checked(
        """
model, optimizer = session.prepare(model, optimizer)
for step in range(9):
    optimizer.zero_grad()
    drawn = torch.randint(len(data), (12 // session.world_size,))
    x, y = data[drawn]
    F.cross_entropy(F.dropout(model(x), 0.2), y).backward()
    optimizer.step()
""",
        steps=3,
    )
    assert report.outcome == "same", report
    assert "no prepared loader handed out a batch" in " ".join(report.notes)


OWN_DATA = """
model, optimizer = session.prepare(model, optimizer)
for step in range(9):
    optimizer.zero_grad()
    x, y = data[CHOSEN]
    F.cross_entropy(F.dropout(model(x), 0.2), y).backward()
    optimizer.step()
"""


def test_own_data_that_alternates_between_the_ranks_is_the_same(checked):
    report = checked(
        OWN_DATA.replace("CHOSEN", "torch.arange(12)[session.rank::session.world_size]"), steps=2
    )
    assert report.outcome == "same", report


def test_data_that_is_not_shared_out_is_told_although_the_results_are_the_same(checked):
    report = checked(OWN_DATA.replace("CHOSEN", "torch.arange(12) + step"), steps=2)
    assert report.outcome == "part"
    assert report.text == "nothing is shared out: each of the 2 workers trains what one alone trains"


@pytest.mark.parametrize(
    "chosen", ["torch.randint(44, (12,))", "np.random.randint(44, size=12)", "random.sample(range(44), 12)"]
)
def test_samples_that_every_rank_draws_for_itself_are_said_to_be_more_in_a_run(checked, chosen):
    report = checked(OWN_DATA.replace("CHOSEN", chosen), steps=2)
    assert report.outcome == "same", report
    assert "in a run each draws its own, and a step is over 2 times as many" in " ".join(report.notes)


def test_training_that_makes_much_of_rounding_is_compared_in_64_bits(checked):
    report = checked(
        """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(3):
    for x, y in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x), y, reduction="none")
        for _ in range(3):
            losses = torch.sin(20 * losses)  # of a difference it makes one twenty times as large
        losses.mean().backward()
        optimizer.step()
""",
        steps=3,
    )
    assert report.outcome == "same", report
    assert " in 64 bits: 3 steps" in report.text
    assert report.difference < 1e-6
    assert "makes much of rounding" in " ".join(report.notes)


def test_a_model_that_was_left_out_is_named(checked):
    report = checked(
        """
other = nn.Linear(3, 3)
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
model, loader = session.prepare(model, loader)
"""
        + LOOP.replace("model(x)", "other(model(x))"),
        steps=2,
    )
    assert report.outcome == "part"
    assert "parameter 4 [3, 3], parameter 5 [3], which belong to no prepared model" in report.cause


def test_what_echelon_itself_refuses_on_workers_is_shown_with_its_own_fix(checked):
    report = checked("model, optimizer, _ = session.prepare(model, optimizer, loader)\n" + LOOP, steps=2)
    assert report.outcome == "failed"
    assert report.text.startswith(
        "train.py runs alone, and fails on 2 workers: DataError: the script iterates"
    )
    assert "fix:   use what prepare returned" in report.error


def test_deferred_steps_and_batches_per_worker_are_compared_as_those_of_one_alone(checked):
    report = checked(
        """
model, optimizer, loader = session.prepare(model, optimizer, loader, overlap="step", batch="per-worker")
"""
        + LOOP,
        steps=3,
    )
    assert report.outcome == "same", report
    assert len(report.steps) == 3
    assert 'batch="per-worker" was compared as batch="global"' in report.notes


def test_a_script_that_prepares_nothing_is_told_so(checked):
    report = checked(LOOP, steps=2)
    assert report.outcome == "part"
    assert report.text.startswith(("nothing is shared out", "they part at step 1: the number of samples"))
    assert "the script prepares no model" in report.cause


def test_a_script_without_a_step_is_not_compared(checked):
    report = checked("model, optimizer, loader = session.prepare(model, optimizer, loader)\n")
    assert report.outcome == "not compared"
    assert "ended without a step" in report.text


def test_a_loss_that_is_not_a_number_on_both_sides_is_said(checked):
    report = checked(
        "model, optimizer, loader = session.prepare(model, optimizer, loader)\n"
        + LOOP.replace("model(x), y)", "model(x), y) * (float('nan') if session.step == 1 else 1)"),
        steps=2,
    )
    assert report.outcome == "same", report
    assert "alone too, the loss of step 2 is nan" in report.notes


def test_a_script_that_updates_its_weights_by_hand_is_compared_too(checked):
    text = """
model, loader = session.prepare(model, loader)
for epoch in session.epochs(3):
    for x, y in loader:
        model.zero_grad()
        F.cross_entropy(F.dropout(model(x), 0.2), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
"""
    report = checked(text, steps=3)
    assert report.outcome == "same", report
    assert [(step.optimizer, step.step) for step in report.steps] == [("by hand", n) for n in (1, 2, 3)]
    assert 0 < report.difference < 1e-5
    wrong = checked(text.replace("-0.5", "-0.5 * session.world_size"), steps=2)
    assert wrong.text.startswith("they part at step 1: the weight of 0.weight")
