"""Bits are flipped in the memory of real workers; each check finds its kind, names the worker, repairs."""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.errors import EchelonError
from echelon.observe.events import CorruptionFound, Verified
from echelon.observe.follow import read_run
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS

HIGH, LOW = 30, 18  # bits of a float32: of the exponent, which is seen in a norm, and of the mantissa
AT = 14  # the step in which a bit is flipped, when medians are known
STEPS = 18


def flip(tensor, bit):
    """In the largest value below 2: above it, the exponent's highest bit is set already."""
    flat = tensor.detach().reshape(-1).abs()
    element = int(torch.where(flat < 2, flat, 0.0).argmax())
    word = ctypes.c_uint32.from_address(tensor.data_ptr() + 4 * element)
    word.value ^= 1 << bit


class Heard(logging.Handler):
    """What Echelon warns of, as texts."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("echelon").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


class Fault:
    """Flips one bit in the memory of some workers: of a gradient before it is sent, or after a step."""

    def __init__(self, model, optimizer, what, bit, ranks):
        self.step, self.rank, self.ranks = 0, -1, ranks
        self.model, self.optimizer, self.what, self.bit = model, optimizer, what, bit
        model[-1].weight.register_post_accumulate_grad_hook(self.after_gradient)
        optimizer.register_step_post_hook(self.after_step)

    def due(self, what):
        return self.what == what and self.step == AT and self.rank in self.ranks

    def after_gradient(self, p):
        if self.due("gradient"):
            flip(p.grad, self.bit)
        if self.due("nan"):
            p.grad[0, 0] = float("nan")

    def after_step(self, *_):
        if self.due("weight"):
            flip(self.model[0].weight, self.bit)
        if self.due("state"):
            flip(self.optimizer.state[self.model[0].weight]["exp_avg"], self.bit)
        self.step += 1


def keep_small(replicas):
    return [i for i, one in enumerate(replicas) if all(float(g.norm()) < 1e6 for g in one.values())]


def last_of(replicas, passing):
    return passing[-1]


def train(verify, what="", bit=HIGH, ranks=(1,), functions=False, record=False):
    """Weights after every step, what was said, and how it ended."""
    heard = Heard()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fault = Fault(model, optimizer, what, bit, ranks)
    data = torch.randn(12 * STEPS, 6)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=12)
    weights = []
    folder = None
    try:
        with echelon.join(record=record, round_timeout_s=90, verify=verify, shares="equal") as session:
            fault.rank, folder = session.rank, session.folder
            model, optimizer, loader = session.prepare(model, optimizer, loader)
            if functions:
                session.compare_replicas(consensus=keep_small, validate=last_of)
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                weights.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()]))
                if record and fault.step > AT:
                    break  # the next forward pass would be infinite
    except EchelonError as error:
        return weights, heard.texts, str(error)
    events = list(read_run(folder)) if record and fault.rank == 0 else []
    found = [event for event in events if isinstance(event, CorruptionFound | Verified)]
    return weights, heard.texts, found if record else ""


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


REPAIRED = [
    ("weights(every=1)", 3, "weight", LOW, (1,), "verify weights, step 15: rank 1 on "),
    ("weights(every=1)", 3, "state", LOW, (0,), "Adam's state of 0.weight differs from the majority's"),
    ("replay(every=1)", 2, "gradient", LOW, (1,), "rank 1 on "),
    ("gradients; replay(every=0)", 2, "gradient", HIGH, (0,), "verify replay, step 14: rank 0 on "),
    ("replicate(3)", 3, "gradient", LOW, (2,), "rank 2 on "),
    ("weights(every=1); replicate(3); gradients", 3, "nan", LOW, (0,), "of its replicas, ranks 1, 2"),
]


@pytest.mark.parametrize(("verify", "workers", "what", "bit", "ranks", "said"), REPAIRED)
def test_flipped_bit_is_found_named_and_repaired_as_if_it_had_not_happened(
    verify, workers, what, bit, ranks, said, warm_pool
):
    clean = warm_pool.run(workers, train, verify)
    corrupted = warm_pool.run(workers, train, verify, what, bit, ranks)
    assert not any(heard for _, heard, _ in clean)
    (text,) = corrupted[0][1]
    assert said in text
    assert text.endswith("repaired")
    for mine, theirs in zip(clean, corrupted, strict=True):
        assert same(mine[0], theirs[0])


def test_without_the_check_the_same_flip_changes_the_training(warm_pool):
    clean = warm_pool.run(2, train, "none")
    corrupted = warm_pool.run(2, train, "none", "gradient", LOW)
    assert not same(clean[0][0], corrupted[0][0])


@pytest.mark.parametrize(
    ("verify", "workers", "what", "bit", "said"),
    [
        ("gradients", 3, "gradient", HIGH, "step 14: rank 1 on "),
        ("gradients", 1, "gradient", HIGH, "step 14: rank 0 on "),
        ("gradients", 2, "nan", HIGH, "4.weight is not finite"),
        ("replicate(2)", 2, "gradient", LOW, "without a majority (ranks 0, 1)"),
    ],
)
def test_step_that_cannot_be_repaired_is_skipped_on_all_workers_alike(
    verify, workers, what, bit, said, warm_pool
):
    done = warm_pool.run(workers, train, verify, what, bit, (workers > 1,))
    weights, (text,), _ = done[0]
    assert said in text
    assert text.endswith("refused")
    assert torch.equal(weights[AT], weights[AT - 1])
    assert not torch.equal(weights[AT + 1], weights[AT])
    assert all(same(weights, others) for others, *_ in done)


@pytest.mark.parametrize(
    ("verify", "what", "message"),
    [
        ("gradients(action=stop)", "nan", "rank 1 on"),
        ("weights(every=1)", "weight", "no majority says which is right"),
        ("replicate(2, tie=stop)", "gradient", "differs between replicas"),
    ],
)
def test_training_stops_with_the_reason_where_it_was_asked_to(verify, what, message, warm_pool):
    for weights, _, error in warm_pool.run(2, train, verify, what, LOW):
        assert message in error
        assert "fix:" in error
        assert len(weights) == AT


def test_two_workers_take_the_leaders_weights_by_rule_and_say_that_it_is_one(warm_pool):
    done = warm_pool.run(2, train, "weights(every=1, tie=leader)", "weight", LOW, (0,))
    (text,) = done[0][1]
    assert "rank 1 on" in text
    assert "there is no majority; repaired" in text
    assert same(done[0][0], done[1][0])


def test_users_functions_decide_which_replica_is_used(warm_pool):
    clean = warm_pool.run(2, train, "replicate(2)")
    done = warm_pool.run(2, train, "replicate(2)", "gradient", HIGH, (0,), True)
    (text,) = done[0][1]
    assert "rank 0 on" in text
    assert "does not pass the consensus function; repaired" in text
    assert same(clean[1][0], done[1][0])
    assert same(done[0][0], done[1][0])


def test_findings_are_events_and_the_run_counts_what_was_compared(warm_pool):
    done = warm_pool.run(2, train, "gradients(action=warn); weights", "gradient", HIGH, (1,), False, True)
    found, *_, counted = done[0][2]  # what follows a gradient that large is found too
    assert (found.check, found.worker, found.step, found.action) == ("gradients", 1, AT, "warned")
    assert found.tensor == "4.weight"
    assert counted.compared["gradients"] == AT + 1


def outside(verify):
    """A penalty on weights outside of the model, which no replay of the model computes."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with echelon.join(record=False, round_timeout_s=90, verify=verify) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.prepare(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).mean() + sum(p.square().sum() for p in model.parameters())
            loss.backward()
            optimizer.step()


def test_training_that_cannot_be_replayed_is_refused_at_its_first_replay(warm_pool):
    with pytest.raises(Exception, match="this training cannot be replayed"):
        warm_pool.run(2, outside, "replay(every=1)")


def accumulated(verify):
    """Several backward passes for a step, gradients that are zeroed in place, and two calls in one pass."""
    heard = Heard()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    with echelon.join(record=False, round_timeout_s=90, verify=verify) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        session.prepare(model, optimizer)
        for _ in range(6):
            optimizer.zero_grad(set_to_none=False)
            with session.accumulate():
                model(torch.randn(3, 4)).square().mean().backward()
            (model(torch.randn(3, 4)) * model(torch.randn(3, 4))).mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()], heard.texts


def test_odd_loops_raise_no_false_alarm(warm_pool):
    plain = warm_pool.run(2, accumulated, "none")
    checked = warm_pool.run(2, accumulated, "gradients; replay(every=1); weights(every=1)")
    assert not checked[0][1]
    assert same(plain[0][0], checked[0][0])


ALL = "gradients; weights(every=6); replay(every=6); replicate(2)"
ZOO = {
    "mlp": (20,),
    "lenet": (1, 28, 28),
    "cnn": (3, 32, 32),
    "har-cnn": (9, 128),
    "char-lstm(width=32, dropout=0.2)": (16,),
    "char-transformer(width=32, depth=2, dropout=0.2)": (16,),
    "resnet18": (3, 16, 16),
}


def zoo(name, shape, verify, steps, batch):
    """A clean run of a model of the zoo: what was said, and how often was compared."""
    heard = Heard()
    torch.manual_seed(0)
    text = len(shape) == 1 and name.startswith("char")
    spec = SampleSpec(
        shape=shape,
        dtype="int64" if text else "float32",
        classes=10,
        task="next-token" if text else "classify",
    )
    model = MODELS.build(name).build(spec)
    many = batch * steps
    x = torch.randint(10, (many, *shape)) if text else torch.randn(many, *shape)
    y = torch.randint(10, (many, *shape) if text else (many,))
    with echelon.join(record=False, round_timeout_s=90, verify=verify) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loader = DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            optimizer.zero_grad()
            logits = model(inputs)
            nn.functional.cross_entropy(logits.reshape(-1, 10), targets.reshape(-1)).backward()
            optimizer.step()
        return heard.texts, session._verifier.totals().compared


@pytest.mark.parametrize("name", ZOO)
def test_clean_runs_of_the_zoos_models_raise_no_alarm(name, warm_pool):
    steps = 6 if name == "resnet18" else 14  # it is large, and has batch normalisation
    for texts, compared in warm_pool.run(2, zoo, name, ZOO[name], ALL, steps, 8):
        assert not texts
        votes = steps // 6 + 1  # one at the end of the pass
        assert compared == {"replicate": steps, "gradients": steps, "replay": steps // 6, "weights": votes}
