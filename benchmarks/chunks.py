"""A large batch in chunks that fit the cache, against torch as it is: forward, loss and backward.

    python benchmarks/chunks.py

One worker, one thread; the HAR CNN of the zoo, 8,000 windows. Both ways take turns in one process, so that
both see the same machine; the ratio is that of the medians. Gradients are compared.
"""

from __future__ import annotations

import argparse
import statistics
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


def main() -> None:
    """Print a row for each size of chunks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=8000)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    x, y = torch.randn(given.batch, *SPEC.shape), torch.randint(SPEC.classes, (given.batch,))

    def seconds(one: nn.Module) -> float:
        one.zero_grad()
        begun = time.perf_counter()
        nn.functional.cross_entropy(one(x), y).backward()
        return time.perf_counter() - begun

    print("| samples in a chunk | whole | in chunks | faster | gradients differ by |")
    print("|---|---|---|---|---|")
    for samples in (1000, 250):
        session = echelon.join(record=False)
        whole, cut = model().eval(), model().eval()
        session.prepare(cut, parallel=f"pipeline(stages=1, schedule=1f1b, samples={samples})")
        taken = [(seconds(whole), seconds(cut)) for _ in range(given.turns + 1)][1:]
        at_once, in_chunks = (statistics.median(column) for column in zip(*taken, strict=True))
        pairs = zip(whole.parameters(), cut.parameters(), strict=True)
        off = max(float((p.grad - q.grad).abs().max()) for p, q in pairs)  # type: ignore[operator]
        session.close()
        ratio = at_once / in_chunks
        print(f"| {samples} | {at_once:.2f} s | {in_chunks:.2f} s | {ratio:.2f} | {off:.1e} |", flush=True)


if __name__ == "__main__":
    main()
