"""A small network on the handwritten digits of scikit-learn. The lines marked make it distributed.

python examples/train.py
echelon run --workers 4 examples/train.py --epochs 10
torchrun --nproc-per-node 2 examples/train.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon  # 1

options = argparse.ArgumentParser()
options.add_argument("--epochs", type=int, default=5)
epochs = options.parse_args().epochs

session = echelon.join()  # 2
torch.manual_seed(0)
images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer, loader = session.prepare(model, optimizer, loader)  # 3
for epoch in session.epochs(epochs):  # 4
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    right = (model(images.to(x.device)).argmax(1).cpu() == labels).sum().item()
    print(f"epoch {epoch}: {right} of {len(labels)} images are right")
