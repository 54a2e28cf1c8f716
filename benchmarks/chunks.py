"""A large batch in chunks that fit the cache, against torch as it is: forward, loss and backward.

    python benchmarks/chunks.py

One worker, one thread; the HAR CNN of the zoo, 8,000 windows. Three ways take turns, so that all see the
same machine: torch in a process of its own, as it is; the whole batch in a worker, which keeps memory;
and in chunks. Ratios are those of medians. Gradients are compared.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

import echelon
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS

SPEC = SampleSpec(shape=(9, 128), dtype="float32", classes=6, task="classify")


def model() -> nn.Module:
    """The model, the same each time."""
    torch.manual_seed(0)
    return MODELS.build("har-cnn").build(SPEC)


def seconds(one: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """How long forward and backward take."""
    one.zero_grad()
    begun = time.perf_counter()
    nn.functional.cross_entropy(one(x), y).backward()
    return time.perf_counter() - begun


def as_torch_is(x: torch.Tensor, y: torch.Tensor) -> None:
    """One pass for each line that comes in."""
    whole = model().eval()
    for _ in sys.stdin:
        print(seconds(whole, x, y), flush=True)


def main() -> None:
    """Print a row for each size of chunks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="be the process of torch as it is")
    given = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(given.batch, *SPEC.shape), torch.randint(SPEC.classes, (given.batch,))

    if given.plain:
        as_torch_is(x, y)
        return
    command = [sys.executable, __file__, "--plain", "--batch", str(given.batch)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as plain:
        compare(plain, x, y, given.turns)


def compare(plain: subprocess.Popen[str], x: torch.Tensor, y: torch.Tensor, turns: int) -> None:
    """Take turns, and print."""

    def asked() -> float:
        print(file=plain.stdin, flush=True)
        return float(plain.stdout.readline())

    print("| samples in a chunk | torch as it is | worker, whole | in chunks | than torch | than whole |")
    print("|---|---|---|---|---|---|")
    for samples in (1000, 250):
        session = echelon.join(record=False)
        whole, cut = model().eval(), model().eval()
        session.prepare(cut, parallel=f"pipeline(stages=1, schedule=1f1b, samples={samples})")
        taken = [(asked(), seconds(whole, x, y), seconds(cut, x, y)) for _ in range(turns + 1)][1:]
        usual, at_once, in_chunks = (statistics.median(column) for column in zip(*taken, strict=True))
        pairs = zip(whole.parameters(), cut.parameters(), strict=True)
        off = max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]
        session.close()
        assert off < 1e-5, off
        print(
            f"| {samples} | {usual:.2f} s | {at_once:.2f} s | {in_chunks:.2f} s | {usual / in_chunks:.2f} |"
            f" {at_once / in_chunks:.2f} |",
            flush=True,
        )
    plain.stdin.close()


if __name__ == "__main__":
    main()
