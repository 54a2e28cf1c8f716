"""An experiment on an emulated cluster: the same training in several variants, and a table of the results.

    sudo .venv/bin/python examples/lab_experiment.py

The lab (`lab.toml`) emulates four machines on this one: CPU quotas, shaped links, two sites. It needs
root on Linux; `echelon doctor` says whether it works here. Every run leaves a record with a summary; the
table is made of these.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
VARIANTS = {
    "equal shares": [],
    "shares by speed": ["--shares", "by-speed"],
    "backup(1)": ["--sync", "backup(1)", "--servers", "1"],
    "codec between sites": ["--shares", "by-speed", "--codec", "between(top-k(ratio=0.01))"],
}


def run(name: str, more: list[str], epochs: int, batch: int, runs: Path) -> dict:
    """One training in the lab; returns its summary."""
    command = [sys.executable, "-m", "echelon", "train", "--lab", str(HERE / "lab.toml"), "--model", "cnn"]
    command += ["--data", "digits", "--batch", str(batch), "--epochs", str(epochs), "--runs", str(runs)]
    folder = name.partition("(")[0].replace(" ", "-")
    done = subprocess.run([*command, "--name", folder, *more], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout}{done.stderr}")
    newest = max(runs.glob(f"*-{folder}"))
    return json.loads((newest / "summary.json").read_text())


def main() -> None:
    """The whole script."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--batch", type=int, default=96, help="the batch of all workers together")
    options.add_argument("--runs", type=Path, default=Path("runs"))
    options.add_argument("--only", choices=VARIANTS, action="append", help="leave out the others")
    given = options.parse_args()
    print(f"{'variant':22} {'samples/s':>10} {'accuracy':>9}", flush=True)
    for name in given.only or VARIANTS:
        summary = run(name, VARIANTS[name], given.epochs, given.batch, given.runs)
        print(f"{name:22} {summary['samples_per_s']:10,.0f} {summary['accuracy']:9.1%}", flush=True)


if __name__ == "__main__":
    main()
