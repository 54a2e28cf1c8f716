"""A parameter server with checkpoints, killed and stopped processes, and wrong settings."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon.checkpoint import store as checkpoint
from echelon.cli import main
from echelon.errors import ConfigError
from plain import examples, network
from served import ServedRun, take_part
from warm import WorkerFailure


def work(name, *args):
    return take_part(globals()[name], *args)


# Saving and loading ------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),
}


def train(kind, upto, save_at, folder):
    """Four epochs of five steps; returns the step and the weights after step `upto`."""
    with echelon.join(record=False) as session:
        model = network(session)
        optimizer = OPTIMIZERS[kind](model)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = DataLoader(examples(60), batch_size=12, shuffle=True)
        model, optimizer, schedule, loader = session.prepare(model, optimizer, schedule, loader)
        session.load(folder, required=False)
        for _ in session.epochs(4):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if session.step == save_at:
                    session.save(folder)
                if session.step == upto:
                    break
            if session.step == upto:
                break
            schedule.step()
        return session.step, model.state_dict()


def stopped_and_resumed(pool, folder, kind, save_at, servers):
    """The weights of a whole run, and of one that was stopped and resumed."""
    for part in ("whole", "first", "second"):
        (folder / part).mkdir()
    ended = []
    for part, upto, saves, where in (
        ("whole", 20, 0, "none"),
        ("first", save_at, save_at, "saved"),
        ("second", 20, 0, "saved"),
    ):
        run = ServedRun(folder / part, workers=3, servers=servers, sync="backup(0)", seed=4)
        ended.append(run.run(pool, work, "train", kind, upto, saves, str(folder / where))[0])
    assert [steps for steps, _ in ended[1]] == [save_at] * 3
    return ended[0], ended[2]


@pytest.mark.parametrize(
    ("kind", "save_at", "servers"), [("sgd", 10, 1), ("sgd", 8, 3), ("adamw", 13, 2), ("adafactor", 7, 2)]
)
def test_run_resumed_from_a_checkpoint_equals_an_uninterrupted_run(
    warm_pool, tmp_path, kind, save_at, servers
):
    """Includes a checkpoint in the middle of an epoch."""
    whole, second = stopped_and_resumed(warm_pool, tmp_path, kind, save_at, servers)
    for (_, one), (_, other) in zip(whole, second, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-12)
    state = checkpoint.read_newest(tmp_path / "saved", lambda state: None).state["optimizers"][0]["state"]
    kept = {"sgd": "momentum_buffer", "adamw": "exp_avg_sq", "adafactor": "step"}[kind]
    assert len(state) == 4
    assert all(float(torch.as_tensor(one[kept]).abs().max()) > 0 for one in state.values())


# Killed and stopped processes, as a user sees them -----------------------------------------------

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import echelon

session = echelon.join()
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = session.prepare(model, optimizer)
print("ready", flush=True)
for step in range(200):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()  # its pushes are in flight
    if step == 5 and sys.argv[1] == "worker" and session.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 5 and sys.argv[1] == "server" and session.rank == 1:
        os.kill(session._group._engine.rendezvous.members[-1].pid, signal.SIGKILL)
    if step == 5 and sys.argv[1] == "stop" and session.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    optimizer.step()
"""


def ended(folder: Path, *words: str) -> tuple[int, str, str]:
    """The exit code, the output, and the leader's log."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "echelon", "run", "--workers", "2", "--servers", "1", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    log = next((folder / "runs").glob("*/logs/rank-0*")).read_text()
    assert "ready" in log, log
    return done.returncode, done.stdout + done.stderr, log


@pytest.mark.parametrize(("who", "rank"), [("worker", 1), ("server", 2)])
def test_a_process_killed_during_a_push_is_named_and_ends_the_run(tmp_path, who, rank):
    code, said, log = ended(tmp_path, "--sync", "async", "script.py", who)
    assert code == 128 + signal.SIGKILL
    assert f"rank {rank}" in said
    assert re.search(rf"PeerLost: .*rank {rank}\b", log), log


def test_a_stopped_worker_is_named_by_the_waiting_workers(tmp_path):
    code, said, log = ended(tmp_path, "--sync", "backup(0)", "--round-timeout-s", "10", "script.py", "stop")
    assert code != 0
    assert "rank 1" in said
    assert re.search(
        r"RoundTimeout: no answer from the server, which waits for rank 1 on \S+, within 10 s", log
    ), log


# Wrong settings ----------------------------------------------------------------------------------

WRONG = {
    "async": "there is none",
    "bounded-delay(-1) --servers 1": "-1 steps ahead",
    "percentage(0) --servers 1": "0 is not a share",
    "percentage(1.5) --servers 1": "1.5 is not a share",
    "percentage(shares=[0.5,0.5]) --servers 1": "2 shares are given, but there are 4 workers",
    "smooth-switch(start=5) --servers 1": "an update from 5 gradients cannot come from 4 workers",
    'smooth-switch(threshold="function(target=\\"operator:neg\\")") --servers 1': "decreases from",
    "backup(4) --servers 1": "4 of 4 workers are spares",
    "backup(-1) --servers 1": "-1 spares",
    'gossip(edges("0-1,2-3"))': "worker 2 cannot be reached from worker 0",
    "async --servers 2 --replicas 2": "need more servers than 2",
    "hogwild --lab four-unequal": "hogwild shares the memory of one machine",
    "hogwild --servers 1": "has no use for servers",
    "async --servers 1 --transport c10d": "not torch.distributed",
    "local(periods=[2,4])": "the workers are not in groups",
    "elastic-averaging(asynchronous=true)": "there is none",
    "downpour(0) --servers 1": "cannot push every 0 steps",
    "asink --servers 1": "asink",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_settings_are_refused_in_three_lines_before_anything_starts(
    monkeypatch, capfd, tmp_path, words
):
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    sync, *options = re.split(r" (?=--)| (?=\S+$)", words) if " --" in words else [words]
    argv = ["echelon", "run", "--workers", "4", "--sync", sync, *" ".join(options).split(), "script.py"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as caught:
        main()
    _, said = capfd.readouterr()
    assert caught.value.code == 2
    assert WRONG[words] in said
    assert len(said.splitlines()) == 3, said
    assert not (tmp_path / "runs").exists()


class Mine(torch.optim.SGD):
    """An optimizer that a script defines."""


def prepare(what):
    with echelon.join(record=False) as session:
        model = nn.Linear(3, 2)
        options = {}
        if what == "lbfgs":
            optimizer = torch.optim.LBFGS(model.parameters())
        elif what == "mine":
            Mine.__module__ = "__main__"
            optimizer = Mine(model.parameters(), lr=0.1)
        elif what == "types":
            model.bias.data = model.bias.data.double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options["loss"] = "sum"
        model, optimizer = session.prepare(model, optimizer, **options)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("lbfgs", "LBFGS evaluates the loss while it steps"),
        ("mine", "optimizer __main__:Mine is neither of torch.optim nor registered"),
        ("types", "keeps parameters of one dtype"),
        ("sum", "the loss must be a mean"),
    ],
)
def test_prepare_refuses_objects_that_a_server_cannot_handle(warm_pool, tmp_path, what, says):
    run = ServedRun(tmp_path, workers=2, servers=1, sync="async")
    with pytest.raises(WorkerFailure) as caught:
        run.run(warm_pool, work, "prepare", what)
    workers = caught.value.outcomes[:2]
    assert all(isinstance(one.error, ConfigError) and says in one.error.message for one in workers)


def prepared(sync):
    with echelon.join(record=False, timeout_s=90, sync=sync) as session:
        model = nn.Linear(3, 2)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("sync", ["async", "elastic-averaging(asynchronous=true)"])
def test_a_policy_that_needs_a_server_is_refused_by_prepare_if_there_is_none(warm_pool, sync):
    for outcome in warm_pool.outcomes(2, prepared, sync):
        assert isinstance(outcome, WorkerFailure)
        assert isinstance(outcome.error, ConfigError), outcome.detail
        assert "there is none" in outcome.error.message
