"""A convolutional network on small colour images, with data augmentation, evaluation and resume.

    echelon run --workers 4 examples/cifar_cnn.py --images cifar10 --epochs 10
    echelon run --workers 2 examples/cifar_cnn.py --images cifar10 --epochs 10    # goes on after Ctrl-C

`--images` is a folder with `train/CLASS/*.png` and `test/CLASS/*.png`, as CIFAR-10 is often distributed.
Without it the script draws shapes, so that it runs anywhere. Stop it at any moment and start it again, also
with another number of workers: it continues with the next sample of the epoch.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import echelon


class ImageFolder(Dataset):
    """The images below `root`, one folder per class."""

    def __init__(self, root: Path) -> None:
        self.files = sorted(file for file in root.glob("*/*") if file.suffix in (".png", ".jpg"))
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import numpy
        from PIL import Image

        with Image.open(self.files[index]) as image:
            pixels = torch.from_numpy(numpy.array(image.convert("RGB").resize((32, 32))))
        return pixels.permute(2, 0, 1).float() / 255, self.classes.index(self.files[index].parent.name)


def drawn(count: int, seed: int) -> TensorDataset:
    """Squares, frames and stripes in noise: three classes."""
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(count, 3, 32, 32, generator=random) * 0.7
    labels = torch.randint(3, (count,), generator=random)
    for image, label in zip(images, labels, strict=True):
        row, column = torch.randint(0, 20, (2,), generator=random).tolist()
        patch = image[:, row : row + 12, column : column + 12]
        patch += 0.5
        if label == 1:
            patch[:, 3:9, 3:9] -= 0.5
        elif label == 2:
            patch[:, ::3] -= 0.5
    return TensorDataset(images, labels)


def network(classes: int) -> nn.Module:
    """Three convolutional blocks; their batch statistics are of all workers' samples."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))


def flipped(images: torch.Tensor) -> torch.Tensor:
    """Half of the images, mirrored."""
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)


def evaluate(session: echelon.Session, model: nn.Module, loader: DataLoader) -> float:
    """Test accuracy over all workers: each evaluates its share."""
    counts = torch.zeros(2, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            counts += torch.tensor([(model(x).argmax(1) == y).sum().item(), len(y)])
    model.train()
    right, total = session.all_reduce(counts).tolist()
    return right / total


def main() -> None:
    """The whole script."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument(
        "--images", type=Path, help="folder with train/ and test/; shapes are drawn otherwise"
    )
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--batch", type=int, default=64, help="the batch of all workers together")
    options.add_argument("--checkpoints", default="checkpoints")
    given = options.parse_args()

    session = echelon.join()
    torch.manual_seed(0)
    train = ImageFolder(given.images / "train") if given.images else drawn(2000, seed=1)
    test = ImageFolder(given.images / "test") if given.images else drawn(500, seed=2)
    model = network(len(train.classes) if isinstance(train, ImageFolder) else 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.epochs)
    model, optimizer, scheduler, loader, tests = session.prepare(
        model,
        optimizer,
        scheduler,
        DataLoader(train, batch_size=given.batch, shuffle=True),
        DataLoader(test, batch_size=256),
    )
    session.load(given.checkpoints, required=False)
    for epoch in session.epochs(given.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(flipped(x)), y)
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            if session.step % 20 == 0:
                session.save(given.checkpoints)
        scheduler.step()
        accuracy = evaluate(session, model, tests)
        session.log_evaluation(accuracy=accuracy, samples=len(test))
        if session.is_leader:
            print(f"epoch {epoch}: test accuracy {accuracy:.1%}", flush=True)
        session.save(given.checkpoints)


if __name__ == "__main__":
    main()
