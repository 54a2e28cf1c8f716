"""What does a codec cost in accuracy? The same training with several codecs.

    echelon run --workers 4 examples/thin_links.py
    echelon run --workers 4 examples/thin_links.py --codec none --codec "power-sgd(rank=2)"

Models of one script may have different codecs: `prepare(codec=...)`. Codecs keep what they leave out of a
step as a residual and send it later. `dgc` applies momentum itself, before it chooses what to send, so
its optimizer has none.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon

CODECS = ["none", "bf16", "one-bit", "top-k(ratio=0.01)", "dgc(ratio=0.01, warmup=60)"]


def main() -> None:
    """The whole script."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument(
        "--codec", action="append", help="may be given several times; see `echelon list codec`"
    )
    options.add_argument("--epochs", type=int, default=8)
    given = options.parse_args()

    session = echelon.join(factors="never")  # whole gradients, so that codecs are compared with these
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images / 16).float()
    for codec in given.codec or CODECS:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if "dgc" in codec else 0.9)
        loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=64, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader, codec=codec)
        for _ in range(given.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        if session.is_leader:
            with torch.no_grad():
                right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
            print(f"{codec:28} test accuracy {right:.1%}", flush=True)


if __name__ == "__main__":
    main()
