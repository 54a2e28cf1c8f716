"""Loops that draw batches ahead, from several loaders, or not at all, train as one process does."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.errors import DataError

LOSS = nn.functional.mse_loss


class Net(nn.Module):
    """Two layers, and a second output that the first depends on."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.outer = nn.Linear(4, 1)

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        return {"out": self.outer(hidden), "hidden": hidden}


@dataclass
class Outcome:
    out: torch.Tensor
    hidden: torch.Tensor


class Named(dict):
    """What some libraries return: a dict whose values are attributes too."""


class Other(Net):
    """The same, with outputs in another kind of object."""

    kind = None

    def forward(self, x):
        found = super().forward(x)
        return Outcome(**found) if self.kind is Outcome else self.kind(found)


class Job:
    """A model, an optimizer and two loaders whose batches do not divide evenly by 2, 3 or 4 workers."""

    def __init__(self, session, **options):
        torch.manual_seed(3)
        data = torch.randn(100, 3)
        first = TensorDataset(data, data.sum(1, keepdim=True))
        second = TensorDataset(data[:53] * 2, data[:53].prod(1, keepdim=True))
        model = Net().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = (
            DataLoader(first, batch_size=30, collate_fn=doubles),
            DataLoader(second, batch_size=11, shuffle=True, collate_fn=doubles),
        )
        self.model, self.optimizer, self.one, self.two = session.prepare(
            model, optimizer, *loaders, **options
        )

    def step(self, *losses):
        self.optimizer.zero_grad()
        sum(losses).backward()
        self.optimizer.step()

    def loss(self, batch, change=lambda x: x):
        x, y = batch
        out = self.model(change(x))
        return LOSS(out["out"], y) + 0.1 * out["hidden"].square().mean()

    def weights(self):
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def doubles(samples):
    return tuple(torch.stack(part).double() for part in zip(*samples, strict=True))


def plain(job, session):
    for batch in job.one:
        job.step(job.loss(batch))


def of_two_loaders(job, session):
    for a, b in zip(job.one, job.two, strict=False):
        job.step(job.loss(a), job.loss(b))


def of_two_loaders_with_a_penalty(job, session):
    for a, b in zip(job.two, job.one, strict=False):
        job.step(job.loss(a), job.loss(b), 0.01 * sum(p.square().sum() for p in job.model.parameters()))


def through_a_second_call(job, session):
    """What the model made of one batch is the model's input again, beside another batch."""
    for a, b in zip(job.one, job.two, strict=False):
        again = job.model(job.model(b[0])["hidden"][:, :3])["out"].square().mean()
        job.step(job.loss(a), again)


def of_a_list(job, session):
    for batch in reversed(list(job.one)):
        job.step(job.loss(batch))


def in_a_cycle(job, session):
    for batch in itertools.islice(itertools.cycle(job.one), 7):
        job.step(job.loss(batch))


def ahead_by_one(job, session):
    batches = iter(job.one)
    batch = next(batches)
    while batch is not None:
        following = next(batches, None)
        job.step(job.loss(batch))
        batch = following


def with_a_validation_between(job, session):
    for batch in job.one:
        loss = job.loss(batch)
        job.model.eval()
        with torch.no_grad():
            for other in job.two:
                job.loss(other)
        job.model.train()
        job.step(loss)
    session.barrier()


def validated_with_gradients(job, session):
    for batch in job.one:
        for other in job.two:
            job.loss(other)
        job.step(job.loss(batch))


def of_views(job, session):
    for batch in list(job.one):
        job.step(job.loss(batch, lambda x: x.view(-1).view(-1, 3)[:]))


def of_changed_inputs(job, session):
    for batch in job.one:
        job.step(job.loss(batch, lambda x: x * 1.5))


def in_two_parts(job, session):
    """Accumulated over batches with different weights."""
    for number, batch in enumerate(job.one):
        with session.accumulate(number % 2 == 0):
            job.loss(batch).backward()
        if number % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()


def of_noise_beside_a_batch(job, session):
    """A second model input that no loader knows has the weight of the batch beside it."""
    ahead = list(job.one)
    for batch in ahead:
        fixed = torch.linspace(-1, 1, 3).double().expand(len(batch[0]), 3)
        job.step(job.loss(batch), job.model(fixed)["out"].square().mean())


def in_objects(job, session):
    """Outputs in a dataclass and in a subclass of dict, of two batches with different weights."""
    models = []
    for kind in (Outcome, Named):
        torch.manual_seed(5)
        model = Other().double()
        model.kind = kind
        models.append(session.prepare(model))
    for a, b in zip(job.one, job.two, strict=False):
        found = [[model(x) for x, _ in (a, b)] for model in models]
        losses = [one.out.square().mean() + one.hidden.mean() for one in found[0]]
        losses += [one["out"].square().mean() + one["hidden"].mean() for one in found[1]]
        job.step(*losses)
        for model, first in zip(models, job.model.parameters(), strict=False):
            for p in model.parameters():  # what they learn shows in the job's own weights
                first.data.add_(0.01 * p.grad.mean())
                p.data.sub_(0.1 * p.grad)
                p.grad = None


def changed_in_place(job, session):
    for x, y in list(job.one):
        out = job.model(x)["out"]
        out.mul_(2)
        job.step(LOSS(out, y))


LOOPS = [
    of_changed_inputs,
    plain,
    of_two_loaders,
    of_two_loaders_with_a_penalty,
    through_a_second_call,
    of_a_list,
    in_a_cycle,
    ahead_by_one,
    with_a_validation_between,
    validated_with_gradients,
    of_views,
    in_two_parts,
    of_noise_beside_a_batch,
    in_objects,
    changed_in_place,
]


def trained():
    """The weights after each loop."""
    found = {}
    with echelon.join(record=False, round_timeout_s=90) as session:
        for loop in LOOPS:
            job = Job(session)
            loop(job, session)
            found[loop.__name__] = job.weights()
    return found


@pytest.fixture(scope="module")
def alone():
    return trained()


@pytest.fixture(scope="module", params=[2, 4])
def together(request, warm_pool):
    return warm_pool.run(request.param, trained)


@pytest.mark.parametrize("loop", [loop.__name__ for loop in LOOPS])
def test_workers_train_as_one_process_whatever_the_loop_has_drawn(alone, together, loop):
    for worker in together:
        assert (worker[loop] - alone[loop]).abs().max() < 1e-12


def ambiguous(change):
    with echelon.join(record=False, round_timeout_s=90) as session:
        job = Job(session)
        try:
            for batch in list(job.one):
                if change == "weighed":
                    session.weigh(len(batch[0]))
                    job.step(job.loss(batch, lambda x: x * 1.0))
                else:
                    job.step(job.loss(batch, lambda x: x * 1.0))
        except DataError as error:
            return str(error)
        return job.weights()


def test_backward_pass_that_may_be_of_two_weights_is_refused_and_can_be_weighed(warm_pool):
    for told in warm_pool.run(4, ambiguous, "changed"):
        assert "cannot tell which batch this backward pass is of" in told
        assert "session.weigh(" in told
    expected = ambiguous("weighed")
    for weights in warm_pool.run(4, ambiguous, "weighed"):
        assert (weights - expected).abs().max() < 1e-12


def summed():
    """Sums need no weights, whatever is drawn ahead."""
    with echelon.join(record=False, round_timeout_s=90) as session:
        job = Job(session, loss="sum")
        for x, y in list(job.one):
            job.optimizer.zero_grad()
            (job.model(x)["out"] - y).square().sum().backward()
            for p in job.model.parameters():
                p.grad.div_(100)
            job.optimizer.step()
        return job.weights()


def test_summed_losses_of_batches_drawn_ahead_are_those_of_one_process(warm_pool):
    expected = summed()
    for weights in warm_pool.run(3, summed):
        assert (weights - expected).abs().max() < 1e-12
