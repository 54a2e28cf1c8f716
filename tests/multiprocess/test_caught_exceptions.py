"""An exception on one worker that something else catches: the others learn of it within seconds.

The deadline of a round is far longer than a test may take.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.errors import EchelonError, PeerLost
from warm import wait_for

HERE = Path(__file__).name
ROUND_S = 3000.0  # longer than pytest lets a test run


class BrokenSampleError(Exception):
    """What the script raises."""


def train(session, model, optimizer, loader, fails_on, step=3):
    for _ in session.epochs(3):
        for x, y in loader:
            if session.step == step and session.rank in fails_on:
                raise BrokenSampleError("sample 17 is broken")
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


def joined(transport="auto", **options):
    torch.manual_seed(0)
    session = echelon.join(
        record=False, round_timeout_s=ROUND_S, timeout_s=90, transport=transport, **options
    )
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(80, 3), torch.randn(80, 1))
    return session, *session.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))


def caught(transport, fails_on):
    """As an engine does: it keeps the exception, and waits for its next task."""
    session, *things = joined(transport)
    error = None
    try:
        train(session, *things, fails_on)
    except (EchelonError, BrokenSampleError) as raised:
        error = raised
    wait_for(session.world_size)
    return error


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_others_raise_the_exception_that_an_engine_has_caught(warm_pool, transport):
    first, second, third = warm_pool.run(3, caught, transport, [1])
    assert isinstance(second, BrokenSampleError)
    for error in (first, third):
        assert type(error) is PeerLost, error
        assert error.ranks == (1,)
        assert "rank 1 on" in error.message
        assert f"failed: BrokenSampleError: sample 17 is broken ({HERE}:" in error.message


def in_a_with_block(fails_on):
    session, *things = joined()
    error = None
    try:
        with session:
            train(session, *things, fails_on)
    except (EchelonError, BrokenSampleError) as raised:
        error = raised
    wait_for(2)
    return error


def test_a_with_block_tells_the_others_at_once(warm_pool):
    first, second = warm_pool.run(2, in_a_with_block, [1])
    assert isinstance(second, BrokenSampleError)
    assert type(first) is PeerLost
    assert "failed: BrokenSampleError: sample 17 is broken" in first.message


def goes_on(everyone):
    """All leave the loop by an exception, or rank 1 alone after the last step; then it is idle for long."""
    session, *things = joined()
    with contextlib.suppress(BrokenSampleError):
        train(session, *things, range(2) if everyone else [], step=3)
    if not everyone and session.rank == 1:
        with contextlib.suppress(BrokenSampleError):
            for _ in session.epochs(4):
                raise BrokenSampleError("not in a step")
        busy_s = time.thread_time() + 5.0
        while time.thread_time() < busy_s:
            torch.ones(100).sum()
    elif session.rank == 1:
        time.sleep(6.0)
    return float(session.all_reduce(torch.ones(1)))


@pytest.mark.parametrize("everyone", [True, False], ids=["all leave", "one leaves, and computes"])
def test_a_script_that_goes_on_after_an_exception_is_not_stopped(warm_pool, everyone):
    assert warm_pool.run(2, goes_on, everyone) == [2.0, 2.0]


class _Actor:
    """One worker in an actor, whose errors Ray catches."""

    def work(self, rank, port):
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        session, *things = joined()
        train(session, *things, [1])


def drive(folder):
    """Run both actors from a driver; prints what each of them raised."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
    )
    try:
        kind = ray.remote(num_cpus=1)(_Actor)
        actors = [kind.remote() for _ in range(2)]
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for rank, task in enumerate([actor.work.remote(n, port) for n, actor in enumerate(actors)]):
            try:
                ray.get(task, timeout=120)
            except ray.exceptions.RayTaskError as error:
                sys.stdout.write(f"actor {rank}: {str(error.cause).splitlines()[0]}\n")
    finally:
        ray.shutdown()


def test_an_exception_in_a_ray_actor_reaches_the_other_actor():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray (pip install ray)")
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"import {__name__} as module; module.drive({folder!r})"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=240,
        )
    said = done.stdout.splitlines()
    assert len(said) == 2, done.stdout + done.stderr
    assert said[1] == "actor 1: sample 17 is broken"
    assert "rank 1 on" in said[0]
    assert "failed: BrokenSampleError: sample 17 is broken" in said[0]
