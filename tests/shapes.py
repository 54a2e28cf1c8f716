"""Training scripts of the shapes that people write, for the tests of `echelon adapt`.

Each runs on a CPU within a second. What the adapted script prints must not depend on the number of workers,
so none of them draws random numbers in the loop, and figures of single batches are not printed.
"""

from __future__ import annotations

FLAT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(96, 6)
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    right = (model(x).argmax(1) == y).sum().item()
    model.train()
    print(f"epoch {epoch}: {right} right")
torch.save(model.state_dict(), "model.pt")
"""

FUNCTIONS = """\
from __future__ import print_function
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.hidden = nn.Linear(6, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        return F.log_softmax(self.out(torch.relu(self.hidden(x))), dim=1)


def fit(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if args.verbose and batch_idx % 2 == 0:
            print("{} [{}] {:.6f}".format(epoch, batch_idx * len(data), loss.item()))


def check(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction='sum').item()  # summed over the batch
            correct += output.argmax(dim=1).eq(target).sum().item()
    test_loss /= len(test_loader.dataset)
    print('loss {:.4f}, {}/{} right'.format(test_loss, correct, len(test_loader.dataset)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--epochs', type=int, default=2)
    parser.add_argument('--verbose', action='store_true')
    parser.add_argument('--save', action='store_true')
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cpu")
    inputs = torch.randn(80, 6)
    targets = inputs[:, :3].argmax(1)
    train_loader = DataLoader(TensorDataset(inputs[:64], targets[:64]), batch_size=16, shuffle=True)
    test_loader = DataLoader(TensorDataset(inputs[64:], targets[64:]), batch_size=8)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)

    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        print('epoch', epoch)
        fit(args, model, device, train_loader, optimizer, epoch)
        check(model, device, test_loader)
        scheduler.step()
    if args.save:
        torch.save(model.state_dict(), "net.pt")


if __name__ == '__main__':
    main()
"""

SUMS = """\
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils import data

torch.manual_seed(2)
pictures = torch.rand(72, 8)
train_loader = data.DataLoader(data.TensorDataset(pictures), batch_size=12, shuffle=True)
test_loader = data.DataLoader(data.TensorDataset(pictures[:20]), batch_size=12)


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inwards = nn.Linear(8, 3)
        self.outwards = nn.Linear(3, 8)

    def forward(self, x):
        code = self.inwards(x)
        return torch.sigmoid(self.outwards(torch.tanh(code))), code


model = Coder()
optimizer = optim.SGD(model.parameters(), lr=0.01)


# the error of the picture and the size of the code, summed over all elements and samples
def loss_function(made, x, code):
    error = F.binary_cross_entropy(made, x, reduction='sum')
    size = 0.1 * torch.sum(code.pow(2))
    return error + size


def train(epoch):
    model.train()
    train_loss = 0
    for (x,) in train_loader:
        optimizer.zero_grad()
        made, code = model(x)
        loss = loss_function(made, x, code)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
    print('epoch {}: {:.4f}'.format(epoch, train_loss / len(train_loader.dataset)))


def test():
    model.eval()
    test_loss = 0
    with torch.no_grad():
        for (x,) in test_loader:
            made, code = model(x)
            test_loss += loss_function(made, x, code).item()
    print('test {:.4f}'.format(test_loss / len(test_loader.dataset)))


if __name__ == "__main__":
    for epoch in range(1, 4):
        train(epoch)
        test()
"""

MEANS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(9)
x = torch.randn(60, 4)
y = (x[:, 0] > 0).long()
loader = DataLoader(TensorDataset(x, y), 12, True)
net = nn.Linear(4, 2)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)


def epoch_of(number):
    running_loss = 0.0
    right = 0
    seen = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        _, predicted = outputs.max(1)
        right += predicted.eq(targets).sum().item()
        seen += targets.size(0)
    average = running_loss / len(loader)
    print('%d: %.4f, %d/%d right' % (number, average, right, seen))
    return average


for number in range(4):
    scheduler.step(epoch_of(number))
print('rate', optimizer.param_groups[0]['lr'])
"""

TWO_MODELS = """\
import torch
import torch.nn as nn
import torch.optim as optim
import torch.utils.data

torch.manual_seed(3)
real = torch.randn(48, 4) + 2
dataloader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(real), batch_size=12, shuffle=True)
maker = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
judge = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer_judge = optim.Adam(judge.parameters(), lr=1e-2)
optimizer_maker = optim.Adam(maker.parameters(), lr=1e-2)

for epoch in range(2):
    for i, (batch,) in enumerate(dataloader, 0):
        # the judge: real ones, then made ones
        judge.zero_grad()
        size = batch.size(0)
        label = torch.ones(size, 1)
        criterion(judge(batch), label).backward()
        made = maker(batch.flip(1))
        criterion(judge(made.detach()), label * 0).backward()
        optimizer_judge.step()
        # the maker
        maker.zero_grad()
        criterion(judge(made), label).backward()
        optimizer_maker.step()
    weights = [sum(p.abs().sum().item() for p in net.parameters()) for net in (maker, judge)]
    print('%d %.4f %.4f' % (epoch, weights[0], weights[1]))
    torch.save(maker.state_dict(), 'maker.pt')
    torch.save(judge.state_dict(), 'judge.pt')
"""

TRAINER = """\
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Trainer:
    def __init__(self, data, steps):
        self.steps = steps
        self.model = torch.nn.Linear(5, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        sampler = RandomSampler(data, replacement=True, num_samples=100000)
        self.loader = DataLoader(data, sampler=sampler, shuffle=False, batch_size=8)

    def run(self):
        self.model.train()
        step = 0
        batches = iter(self.loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(self.loader)
                batch = next(batches)
            x, y = batch
            loss = F.mse_loss(self.model(x), y)
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            step += 1
            if step >= self.steps:
                break
        print("weights", [round(w, 4) for w in self.model.weight.flatten().tolist()])


torch.manual_seed(4)
x = torch.randn(40, 5)
Trainer(TensorDataset(x, x.sum(1, keepdim=True)), 10).run()
"""

OWN_DATA = """\
import torch
from torch import nn

plain = False
torch.manual_seed(5)
x = torch.randn(30, 3)
y = x @ torch.tensor([[1.0], [2.0], [3.0]])
model = nn.Linear(3, 1)
if not plain:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
for step in range(4):
    def closure():
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss
    if not plain:
        optimizer.step(closure)
    else:
        closure()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    print("%d: %.5f" % (step, nn.functional.mse_loss(model(x), y).item()))
with open("model.pt", "wb") as file:
    torch.save(model.state_dict(), file)
with open("model.pt", "rb") as file:
    model.load_state_dict(torch.load(file))
print("done")
"""

DDP = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "29511"
    dist.init_process_group("gloo")


def main():
    setup()
    rank = dist.get_rank()
    torch.manual_seed(6 + rank)
    inputs = torch.arange(128.0).reshape(32, 4) / 128
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    layer = nn.Linear(4, 1)
    nn.init.constant_(layer.weight, 0.1)
    nn.init.constant_(layer.bias, 0.0)
    model = DDP(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for index, (x, y) in enumerate(loader):
            if index % 2 == 0:
                with model.no_sync():
                    loss = nn.functional.mse_loss(model(x), y) / 2
                    loss.backward()
            else:
                loss = nn.functional.mse_loss(model(x), y) / 2
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
        if rank == 0:
            print("epoch %d: %.5f" % (epoch, total.item() / dist.get_world_size()))
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "layer.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""

ACCELERATE = """\
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def evaluate(accelerator, model, loader):
    model.eval()
    seen = right = 0
    for x, y in loader:
        with torch.no_grad():
            found = model(x.to(accelerator.device)).argmax(1)
        found, y = accelerator.gather_for_metrics((found, y))
        seen += len(y)
        right += (found == y).sum().item()
    accelerator.print(f"{right} of {seen} right")


def main():
    accelerator = Accelerator()
    torch.manual_seed(7)
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).long()
    train_loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[:25], y[:25]), batch_size=10)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )
    for epoch in range(2):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        evaluate(accelerator, model, test_loader)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
"""

FABRIC = """\
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def run():
    fabric = L.Fabric(accelerator="auto", devices=2)
    fabric.launch()
    torch.manual_seed(8)
    x = torch.randn(48, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=6, shuffle=True)
    loader = fabric.setup_dataloaders(loader)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    for epoch in range(2):
        for index, (x, y) in enumerate(loader):
            waiting = index % 2 == 0
            with fabric.no_backward_sync(model, enabled=waiting):
                fabric.backward(nn.functional.mse_loss(model(x), y) / 2)
            if not waiting:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        if fabric.is_global_zero:
            print(epoch, fabric.global_rank)
    fabric.barrier("end")


run()
"""

# Their adapted forms run on any number of workers and print the same.
SAME = {
    "flat": FLAT,
    "functions": FUNCTIONS,
    "sums": SUMS,
    "means": MEANS,
    "two-models": TWO_MODELS,
    "trainer": TRAINER,
    "own-data": OWN_DATA,
}
SHAPES = {**SAME, "ddp": DDP, "accelerate": ACCELERATE, "fabric": FABRIC}
