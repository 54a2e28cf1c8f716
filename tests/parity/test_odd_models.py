"""Models that change during training, that are compiled, or that need double backward."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon.errors import ModelError
from plain import assert_same, examples, in_session, network, plainly, seed_weights


def work(name, options, *args):
    return in_session(globals()[name], options, *args)


def compiled(session, journal):
    """A compiled model, also with batch normalisation in it."""
    warnings.simplefilter("ignore")  # the compiler gives several of its own
    seed_weights(session)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    fast = torch.compile(model, backend="aot_eager")
    fast, optimizer, loader = session.prepare(fast, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(fast(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def test_compiled_model_trains_like_an_uncompiled_model(warm_pool):
    with warnings.catch_warnings():
        assert_same(plainly(compiled), warm_pool.run(2, work, "compiled", {"shares": (3, 1)}), rtol=1e-6)


def compiled_files(options):
    """The source files that the compiler traced while a compiled model trained in a session."""
    from torch._dynamo.utils import get_compilation_metrics

    work("compiled", options)
    return [metrics.co_filename for metrics in get_compilation_metrics() if metrics.co_filename]


def test_compiler_does_not_trace_communication_code(warm_pool):
    for files in warm_pool.run(2, compiled_files, {"shares": (3, 1)}):
        assert any(file.endswith("echelon/train/batchnorm.py") for file in files)
        assert not [file for file in files if "echelon/comm/" in file]


def penalised(session, journal):
    """A gradient penalty: the inner gradient has a graph, the outer one is reduced."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            x.requires_grad_()
            loss = F.cross_entropy(model(x), y)
            (inner,) = torch.autograd.grad(loss * len(x), x, create_graph=True)
            loss = loss + inner.square().sum(1).mean()
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def test_gradient_penalty_trains_like_one_process(parity):
    parity(work, penalised, rtol=1e-6)


def changing(session, journal):
    """A layer is unfrozen in the middle of one epoch, and the model becomes double in another."""
    model = network(session, dtype=torch.float32)
    for p in model[0].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for epoch in session.epochs(7):
        for turn, (x, y) in enumerate(loader):
            if (epoch, turn) == (1, 2):
                for p in model[0].parameters():
                    p.requires_grad_()
            if (epoch, turn) == (3, 1):
                model.double()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(model[0].weight.dtype)), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def test_parameters_changed_in_the_middle_of_an_epoch_are_still_reduced(parity):
    parity(work, changing, rtol=1e-4)


def doubled():
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = session.prepare(nn.Linear(2, 1))
        loss = model(torch.ones(1, 2)).square().sum()
        with pytest.warns(UserWarning, match="create_graph"), pytest.raises(ModelError) as error:
            loss.backward(create_graph=True)
        return str(error.value)


def test_backward_with_create_graph_is_refused_by_name(warm_pool):
    for said in warm_pool.run(2, doubled):
        assert "weight" in said or "bias" in said
        assert "torch.autograd.grad" in said
