"""A model in stages on real workers: what an unchanged loop may do, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import ConfigError, EchelonError, ModelError
from echelon.parallel.micro import ModelCall

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), *more, nn.Linear(5, 3)).double()


def prepared(layout: str, model: nn.Module, **options: Any) -> tuple[echelon.Session, nn.Module]:
    session = echelon.join(record=False, shares="equal")
    return session, session.prepare(model, parallel=layout, **options)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def most_kept_in_a_step(schedule: str) -> int:
    """How many micro-batches this stage kept at most, and whether its gradients are right."""
    most = 0

    class Kept(dict[int, Any]):
        def __setitem__(self, key: int, value: Any) -> None:
            nonlocal most
            super().__setitem__(key, value)
            most = max(most, len(self))

    own = ModelCall.__init__

    def watched(self: ModelCall, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        self.kept = Kept()

    whole = layers()
    (nn.functional.cross_entropy(whole(X), Y) / 2).backward()
    ModelCall.__init__ = watched  # type: ignore[method-assign]
    try:
        session, model = prepared(f"pipeline(stages=2, micro=4, schedule={schedule})", layers())
        output = model(X)
        loss = nn.CrossEntropyLoss()(output.view(-1, 3), Y)
        assert loss.item() == pytest.approx(nn.functional.cross_entropy(whole(X), Y).item(), abs=1e-14)
        (loss / 2).backward()
        assert torch.allclose(output.detach(), whole(X), atol=1e-14)
        assert int((output.argmax(1) == Y).sum()) == int((whole(X).argmax(1) == Y).sum())
        for name, found in gradients(model).items():
            assert torch.allclose(found, dict(whole.named_parameters())[name].grad, atol=1e-14)
        session.close()
    finally:
        ModelCall.__init__ = own  # type: ignore[method-assign]
    return most


def test_1f1b_keeps_fewer_micro_batches_than_gpipe(warm_pool):
    assert warm_pool.run(2, most_kept_in_a_step, "gpipe") == [4, 4]
    assert warm_pool.run(2, most_kept_in_a_step, "1f1b") == [2, 1]


def lowered_forward_pass(schedule: str) -> tuple[float, list[Tensor]]:
    """The model is called in an autocast block, the loss outside of it."""
    session, model = prepared(f"pipeline(stages=2, micro=2, schedule={schedule})", layers().float())
    x = X.float() * 1.001  # not exact in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
    loss = nn.functional.cross_entropy(output.float(), Y)
    loss.backward()
    session.close()
    return loss.item(), [one.clone() for one in gradients(model).values()]


def test_the_model_runs_in_the_precision_of_its_call_with_every_schedule(warm_pool):
    expected = warm_pool.run(2, lowered_forward_pass, "gpipe")
    whole = nn.functional.cross_entropy(layers().float()(X.float() * 1.001), Y).item()
    assert abs(expected[0][0] - whole) > 1e-5
    for schedule in ("1f1b", "filled"):
        for (loss, found), (as_gpipe, wanted) in zip(
            warm_pool.run(2, lowered_forward_pass, schedule), expected, strict=True
        ):
            assert loss == pytest.approx(as_gpipe, abs=1e-6)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))


def loss_of_ones_own(schedule: str) -> dict[str, Tensor]:
    """A loss that torch does not know, of an output that was looked at before."""
    whole = layers()
    (whole(X).sin().mean() + whole(X).square().mean()).backward()
    session, model = prepared(f"pipeline(stages=2, schedule={schedule})", layers())
    output = model(X)
    assert output.shape == (8, 3)
    (output.sin().mean() + output.square().mean()).backward()
    for name, found in gradients(model).items():
        assert torch.allclose(found, dict(whole.named_parameters())[name].grad, atol=1e-14)
    session.close()
    return gradients(model)


@pytest.mark.parametrize("schedule", ["1f1b", "filled"])
def test_a_loss_of_ones_own_works_with_every_schedule(warm_pool, schedule):
    names = [list(found) for found in warm_pool.run(2, loss_of_ones_own, schedule)]
    assert sorted(names[0] + names[1]) == ["0.bias", "0.weight", "2.bias", "2.weight"]


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if x.sum() > 0 else self.inner(-x)


def refused(what: str) -> tuple[str, str, str]:
    """The error of a layout that a model or a plan does not allow."""
    model, layout, options = layers(), "pipeline(stages=2)", dict[str, Any]()
    if what == "stages":
        model, layout = nn.Sequential(nn.Linear(6, 3)).double(), "pipeline(stages=2)"
    elif what == "control flow":
        model = Deciding()
    elif what == "batch normalisation":
        model = layers(nn.BatchNorm1d(5).double())
    elif what == "in place":
        model, layout = layers(nn.ReLU(inplace=True)), 'pipeline(cuts="2")'
    elif what == "no layer":
        layout = 'pipeline(cuts="9")'
    elif what in ("codec", "overlap"):
        options = {what: {"codec": "fp16", "overlap": "step"}[what]}
    session = echelon.join(record=False)
    try:
        session.prepare(model, torch.optim.SGD(model.parameters(), 0.1), parallel=layout, **options)
    except EchelonError as error:
        return type(error).__name__, error.message, error.fix
    finally:
        session.close()
    return "", "", ""


@pytest.mark.parametrize(
    ("what", "kind", "says", "fix"),
    [
        ("stages", ModelError, "2 stages are more than the 1", "fewer stages"),
        ("control flow", ModelError, "Deciding decides by values", "nn.Sequential"),
        ("batch normalisation", ModelError, "one micro-batch at a time", 'batchnorm="local"'),
        ("in place", ModelError, "layer 2, 2, changes its input in place", "cut at 3"),
        ("no layer", ModelError, "there is no layer 9", "below 3"),
        ("codec", ConfigError, "codec fp16 does not work", "default"),
        ("overlap", ConfigError, "overlap step does not work", "default"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused_in_prepare(warm_pool, what, kind, says, fix):
    for name, message, way in warm_pool.run(2, refused, what):
        assert name == kind.__name__
        assert says in message
        assert fix in way


def in_chunks(layout: str) -> tuple[dict[str, Tensor], float]:
    """One worker's gradients and loss, with dropout."""
    session = echelon.join(record=False)
    torch.manual_seed(1)
    model = layers(nn.Dropout(0.4))
    torch.manual_seed(2)
    if layout:
        model = session.prepare(model, parallel=layout)
    loss = nn.functional.cross_entropy(model(X), Y)
    loss.backward()
    session.close()
    return gradients(model), float(loss.detach())


def test_one_worker_computes_a_batch_in_chunks_with_the_same_result(warm_pool):
    ((whole, loss),) = warm_pool.run(1, in_chunks, "")
    for layout in ("pipeline(stages=1, schedule=1f1b, samples=3)", "pipeline(stages=1, micro=8)"):
        ((found, of_chunks),) = warm_pool.run(1, in_chunks, layout)
        assert of_chunks == pytest.approx(loss, abs=1e-14)
        assert all(torch.allclose(found[name], whole[name], atol=1e-14) for name in whole)


class Saved:
    """What autograd saves for backward passes; `most` is how many elements there were at once."""

    elements = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that is saved would refer to its own graph
        Saved.elements += tensor.numel()
        Saved.most = max(Saved.most, Saved.elements)

    def __del__(self) -> None:
        Saved.elements -= self.tensor.numel()


def saved_in_a_step(options: str) -> tuple[int, dict[str, Tensor]]:
    """The most activations of a stage, its gradients and buffers; with dropout and normalisation."""
    Saved.elements = Saved.most = 0
    torch.manual_seed(1)
    blocks = [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3)) for _ in range(6)
    ]
    whole = nn.Sequential(*blocks, nn.Linear(6, 3)).double()
    session, model = prepared(f'pipeline(cuts="12", micro=4{options})', whole, batchnorm="local")
    torch.manual_seed(2)
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        nn.functional.cross_entropy(model(X), Y).backward()
    found = gradients(model)
    found.update((name, value.clone()) for name, value in model.state_dict().items() if "running" in name)
    session.close()
    assert not Saved.elements
    return Saved.most, found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_recomputation_keeps_the_activations_of_one_micro_batch_and_changes_no_gradient(
    warm_pool, schedule
):
    kept = warm_pool.run(2, saved_in_a_step, f", schedule={schedule}")
    again = warm_pool.run(2, saved_in_a_step, f", schedule={schedule}, recompute=true")
    micro_batches = {"gpipe": [4, 4], "1f1b": [2, 1]}[schedule]
    for (most, found), (least, same), count in zip(kept, again, micro_batches, strict=True):
        assert found.keys() == same.keys()
        assert all(torch.equal(found[name], same[name]) for name in found)
        assert least == pytest.approx(most / count, rel=0.2)


def changed_in_place() -> str:
    """The error if the batch is changed between forward and backward."""
    session, model = prepared('pipeline(cuts="1", recompute=true)', layers())
    x = X.clone()
    loss = model(x).sum()
    if session.rank == 0:
        x.zero_()
    try:
        loss.backward()
    except EchelonError as error:
        return f"{type(error).__name__}: {error.message}"
    finally:
        session.close()
    return ""


def test_an_input_that_was_changed_is_not_computed_with_again(warm_pool):
    first, second = warm_pool.run(2, changed_in_place)
    assert "ModelError: an input of shape [2, 6] of a stage was changed in place" in first
    assert second == ""
