"""One slow worker, a parameter server, and a policy that does not wait for it.

    echelon run --workers 4 --servers 1 --speed 1,1,1,0.2 --sync "backup(1)" examples/parameter_server.py
    echelon run --workers 4 --servers 1 --speed 1,1,1,0.2 --sync full examples/parameter_server.py

The script does not change with the policy: `--sync` decides when workers agree (`echelon list sync`).
`--speed` makes the last worker five times slower. With `backup(1)` an update is made of the first three
gradients and the last one is dropped; with `full` everybody waits for the slow worker.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon


def main() -> None:
    """The whole script."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--epochs", type=int, default=10)
    given = options.parse_args()

    session = echelon.join()
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images / 16).float().view(-1, 1, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(images, labels), batch_size=128, shuffle=True)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    begun = time.perf_counter()
    for epoch in session.epochs(given.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
        if session.is_leader:
            with torch.no_grad():
                right = (model(images).argmax(1) == labels).float().mean().item()
            print(f"epoch {epoch}: {right:.1%} right, {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
