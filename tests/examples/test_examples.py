"""Every example does what its first lines say."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, *arguments: str) -> str:
    """Run an example as a script in this worker; returns what it prints."""
    import echelon

    joined, join = [], echelon.join

    def remember(**choices: object) -> echelon.Session:
        joined.append(join(**choices))
        return joined[-1]

    echelon.join = remember
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        del echelon.join  # it is looked up again, also by whoever replaces it next
        for session in joined:  # a script that ends would do this
            session.close()
    return printed.getvalue()


def stopped_example(step: int, name: str, *arguments: str) -> None:
    """Stop an example after so many optimizer steps, as Ctrl-C does."""
    taken = 0

    def count(*_: object) -> None:
        nonlocal taken
        taken += 1
        if taken == step:
            raise KeyboardInterrupt

    handle = register_optimizer_step_post_hook(count)
    try:
        run_example(name, *arguments)
    except KeyboardInterrupt:
        return
    finally:
        handle.remove()
    raise AssertionError("it was not stopped")


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\d+\.\d+", text)]


def command(*words: str, timeout_s: float = 115, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "echelon", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cifar_cnn_started_again_continues_after_the_last_epoch(warm_pool, tmp_path):
    words = ["cifar_cnn.py", "--batch", "250", "--checkpoints", str(tmp_path / "checkpoints")]
    first = warm_pool.run(2, run_example, *words, "--epochs", "1")[0]
    again = warm_pool.run(2, run_example, *words, "--epochs", "2")[0]
    assert first.startswith("epoch 0: test accuracy")
    assert again.startswith("epoch 1: test accuracy")
    assert warm_pool.run(1, run_example, *words, "--epochs", "2")[0] == ""  # all epochs are done


def test_cifar_cnn_stopped_in_an_epoch_continues_with_the_same_result(warm_pool, tmp_path):
    straight = warm_pool.run(2, run_example, "cifar_cnn.py", "--epochs", "1")[0]
    words = ["cifar_cnn.py", "--epochs", "1", "--checkpoints", str(tmp_path / "checkpoints")]
    warm_pool.run(2, stopped_example, 25, *words)  # after the checkpoint of step 20
    assert warm_pool.run(2, run_example, *words)[0] == straight


def test_language_model_learns_the_same_on_one_worker_and_on_two(warm_pool):
    arguments = ("--steps", "21", "--batch", "16")
    (alone,) = warm_pool.run(1, run_example, "language_model.py", *arguments)
    both = warm_pool.run(2, run_example, "language_model.py", *arguments)
    assert numbers(both[0]) == pytest.approx(numbers(alone), abs=2e-3)
    assert both[1] == ""  # only the leader prints
    losses = numbers(alone)[::2]
    assert losses[-1] < losses[0] - 0.3


def test_gan_draws_different_noise_and_keeps_models_the_same(warm_pool):
    leader, other = warm_pool.run(2, run_example, "gan.py", "--epochs", "10")
    first, *picture = leader.splitlines()
    assert first.startswith("epoch 9: generator")
    assert [len(row) for row in picture] == [16] * 8
    assert other == ""


def test_thin_links_trains_once_with_each_codec(warm_pool):
    words = ["--epochs", "3", "--codec", "none", "--codec", "top-k(ratio=0.05)"]
    leader, _ = warm_pool.run(2, run_example, "thin_links.py", *words)
    dense, sparse = leader.splitlines()
    assert dense.startswith("none")
    assert sparse.startswith("top-k(ratio=0.05)")
    assert numbers(dense)[-1] > 60


def test_a_parameter_server_goes_on_without_the_slow_worker(tmp_path):
    printed = command(
        "run", "--workers", "3", "--servers", "1", "--sync", "backup(1)", "--runs", str(tmp_path),
        str(EXAMPLES / "parameter_server.py"), "--epochs", "2",
    )  # fmt: skip
    assert "epoch 1:" in printed
    events = "".join(file.read_text() for file in tmp_path.glob("*/events/*"))
    assert '"drop"' in events  # the policy dropped gradients that came after the others'


def test_an_installed_policy_is_listed_and_simulated(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--target",
            str(tmp_path / "installed"),
            str(EXAMPLES / "plugin"),
        ],
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(tmp_path / "installed"), os.environ.get("PYTHONPATH", "")])
    assert "staleness-aware" in command("list", "sync", PYTHONPATH=path)
    words = ["--workers", "4", "--seconds", "1", "--compute", "20ms", "--server-costs", "1ms,1ms,1ms"]
    printed = command(
        "simulate",
        *words,
        "--no-gradients",
        "--json",
        "--sync",
        "staleness-aware(power=0.5)",
        PYTHONPATH=path,
    )
    assert '"staleness-aware(power=0.5)"' in printed


def test_notebook_runs_from_the_first_cell_to_the_last(tmp_path):
    import nbclient
    import nbformat

    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=110, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "2 workers joined after" in printed
    assert "epoch 4:" in printed
    assert "115 steps" in printed or "145 steps" in printed
    assert "backup(2)" in printed
