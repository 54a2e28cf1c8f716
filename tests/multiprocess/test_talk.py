"""Collectives that a script calls itself; an invalid call does not end the session."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.errors import ConfigError, DataError, EchelonError, MismatchedCalls, ModelError

TRANSPORTS = ["auto", "c10d"]
SMALL = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float64, torch.complex64)


def attempt(act, *args, **options):
    try:
        return act(*args, **options)
    except EchelonError as error:
        return error


def reductions(transport):
    with echelon.join(record=False, transport=transport, round_timeout_s=90) as session:
        rank = session.rank
        out = {}
        for op in ("sum", "mean", "max", "min"):
            tensor = torch.tensor([[1.0, -1.0], [0.5, 4.0]]) * (rank + 1)
            result = session.all_reduce(tensor, op)
            out[op] = (result.clone(), result is tensor)
        counts = torch.tensor([1, 2, rank])
        out["whole"] = session.all_reduce(counts)
        out["most"] = session.all_reduce(torch.tensor([rank, -rank]), "max")
        out["any"] = session.all_reduce(torch.tensor([rank == 1, False]), "max")
        sheet = torch.arange(6.0).view(2, 3) * (rank + 1)
        session.all_reduce(sheet.t())
        column = torch.ones(3, 2)
        session.all_reduce(column[:, 1])
        out["turned"], out["column"] = sheet, column
        out["scalar"] = session.all_reduce(torch.tensor(float(rank)))
        out["empty"] = session.all_reduce(torch.zeros(0, 3))
        out["halves"] = session.all_reduce(torch.full((4,), 0.5, dtype=torch.bfloat16))
        weight = nn.Parameter(torch.ones(2))
        session.all_reduce(weight)
        out["parameter"] = weight.detach()
        future = session.all_reduce(torch.full((3,), 2.0 * rank), "mean", wait=False)
        turned = torch.ones(2, 3).t()
        later = session.all_reduce(turned, wait=False)
        out["future"] = (future.wait().clone(), future.wait().clone(), future.wait() is future.wait())
        later.wait()
        out["later"] = turned
        return out


def parts(transport):
    with echelon.join(record=False, transport=transport, round_timeout_s=90) as session:
        rank = session.rank
        rows = torch.arange(10.0).view(5, 2) * (rank + 1)
        out = {op: session.reduce_scatter(rows, op) for op in ("sum", "mean", "max")}
        out["kept"] = rows
        out["whole"] = session.reduce_scatter(torch.arange(7) + rank)
        out["one row"] = session.reduce_scatter(torch.ones(1, 3))
        out["empty"] = session.reduce_scatter(torch.ones(0, 3))
        out["weighted"] = session.all_reduce(torch.tensor([1.0, 2.0]) * rank, "mean", weight=3.0 * rank + 1)
        out["refused"] = [
            attempt(session.reduce_scatter, torch.tensor(1.0)),
            attempt(session.all_reduce, torch.ones(1), "mean", weight=0.0),
            attempt(session.all_reduce, torch.ones(1), "mean", weight=-1.0 if rank else 1.0),
            attempt(session.all_reduce, torch.ones(1), "sum", weight=1.0),
            attempt(session.all_reduce, torch.ones(1), "mean", weight=1.0 if rank else None),
        ]
        out["after"] = session.all_reduce(torch.ones(1))
        return out


def gathers(transport):
    with echelon.join(record=False, transport=transport, round_timeout_s=90) as session:
        rank = session.rank
        out = {"pieces": session.all_gather(torch.full((rank, 2), float(rank)))}
        out["scalars"] = session.all_gather(torch.tensor(rank))
        out["kinds"] = [session.all_gather(torch.tensor([1, rank]).to(dtype)) for dtype in SMALL]
        out["turned"] = session.all_gather((torch.arange(6).view(2, 3) + rank).t())
        told = torch.arange(3.0) * (rank + 1)
        given = session.broadcast(told, source=1)
        out["told"] = (told, given is told)
        out["told kinds"] = [session.broadcast(torch.tensor([rank]).to(dtype), 2) for dtype in SMALL]
        sheet = torch.full((2, 3), float(rank))
        session.broadcast(sheet.t(), source=2)
        out["sheet"] = sheet
        session.barrier()
        return out


def mistakes(transport):
    """Each invalid call raises on every worker, and the session works after each."""
    with echelon.join(record=False, transport=transport, round_timeout_s=90) as session:
        odd = session.rank == 1
        one = torch.ones(2)
        calls = {
            "shape": lambda: session.all_reduce(torch.ones(3 if odd else 2)),
            "type": lambda: session.all_reduce(one.double() if odd else one),
            "operation": lambda: session.all_reduce(one, "max" if odd else "sum"),
            "call": lambda: session.barrier() if odd else session.all_reduce(one),
            "source": lambda: session.broadcast(one, 1 if odd else 0),
            "gathered type": lambda: session.all_gather(one.int() if odd else one),
            "mean of whole numbers": lambda: session.all_reduce(torch.ones(2, dtype=torch.int64), "mean"),
            "sum of truths": lambda: session.all_reduce(torch.ones(2, dtype=torch.bool)),
            "unknown operation": lambda: session.all_reduce(one, "average"),
            "unknown source": lambda: session.broadcast(one, 7),
        }
        out = {}
        for name, call in calls.items():
            error = attempt(call)
            out[name] = (type(error), str(error), session.all_reduce(torch.ones(1)).item())
        return out


def disagreements():
    """The errors of preparing objects that differ between workers."""
    with echelon.join(record=False, round_timeout_s=90) as session:
        odd = session.rank == 1
        data = TensorDataset(torch.ones(9 if odd else 10, 2))
        frozen = nn.Linear(2, 2)
        frozen.weight.requires_grad_(not odd)
        model = nn.Linear(2, 2)
        optimizer = (torch.optim.AdamW if odd else torch.optim.SGD)(model.parameters(), lr=0.1)
        out = {
            "shape": attempt(
                session.prepare, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4 if odd else 3))
            ),
            "names": attempt(session.prepare, nn.ModuleDict({"tail" if odd else "head": nn.Linear(2, 2)})),
            "more": attempt(session.prepare, nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + odd)))),
            "frozen": attempt(session.prepare, frozen),
            "type": attempt(session.prepare, nn.Linear(2, 2).double() if odd else nn.Linear(2, 2)),
            "samples": attempt(session.prepare, DataLoader(data, batch_size=5)),
            "batch": attempt(
                session.prepare, DataLoader(TensorDataset(torch.ones(8)), batch_size=6 if odd else 4)
            ),
            "optimizer": attempt(session.prepare, optimizer),
        }
        out["still there"] = session.all_reduce(torch.ones(1)).item()
        return out


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reductions_are_in_place_for_any_tensor(warm_pool, transport):
    base = torch.tensor([[1.0, -1.0], [0.5, 4.0]])
    for out in warm_pool.run(3, reductions, transport):
        expected = {"sum": 6 * base, "mean": 2 * base}
        expected["max"] = torch.maximum(base, 3 * base)
        expected["min"] = torch.minimum(base, 3 * base)
        for op, value in expected.items():
            result, same = out[op]
            assert torch.equal(result, value), op
            assert same, op
        assert out["whole"].tolist() == [3, 6, 3]
        assert out["most"].tolist() == [2, 0]
        assert out["any"].tolist() == [True, False]
        assert torch.equal(out["turned"], torch.arange(6.0).view(2, 3) * 6)
        assert out["column"].tolist() == [[1, 3]] * 3
        assert out["scalar"].shape == ()
        assert out["scalar"] == 3
        assert out["empty"].shape == (0, 3)
        assert out["halves"].tolist() == [1.5] * 4
        assert out["parameter"].tolist() == [3, 3]
        first, second, same = out["future"]
        assert first.tolist() == second.tolist() == [2, 2, 2]
        assert same
        assert torch.equal(out["later"], torch.full((3, 2), 3.0))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reduce_scatter_splits_by_rows_and_means_can_be_weighted(warm_pool, transport):
    found = warm_pool.run(3, parts, transport)
    rows = torch.arange(10.0).view(5, 2)
    for rank, out in enumerate(found):
        mine = torch.tensor_split(rows, 3)[rank]
        torch.testing.assert_close(out["sum"], mine * 6)
        torch.testing.assert_close(out["mean"], mine * 2)
        torch.testing.assert_close(out["max"], mine * 3)
        assert torch.equal(out["kept"], rows * (rank + 1))
        assert torch.equal(out["whole"], torch.tensor_split(3 * torch.arange(7) + 3, 3)[rank])
        assert out["one row"].shape == ((1, 3) if rank == 0 else (0, 3))
        assert out["empty"].shape == (0, 3)
        torch.testing.assert_close(out["weighted"], torch.tensor([1.0, 2.0]) * (4 + 2 * 7) / 12)
        assert all(isinstance(one, (ConfigError, MismatchedCalls)) for one in out["refused"]), out[
            "refused"
        ]
        assert out["after"] == 3


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_gather_and_broadcast_accept_any_tensor(warm_pool, transport):
    for out in warm_pool.run(3, gathers, transport):
        assert [piece.tolist() for piece in out["pieces"]] == [[], [[1, 1]], [[2, 2], [2, 2]]]
        assert [int(value) for value in out["scalars"]] == [0, 1, 2]
        for dtype, parts in zip(SMALL, out["kinds"], strict=True):
            for rank, part in enumerate(parts):
                assert torch.equal(part, torch.tensor([1, rank]).to(dtype))
        assert torch.equal(out["turned"][2], (torch.arange(6).view(2, 3) + 2).t())
        told, same = out["told"]
        assert told.tolist() == [0, 2, 4]
        assert same
        for dtype, given in zip(SMALL, out["told kinds"], strict=True):
            assert torch.equal(given, torch.tensor([2]).to(dtype))
        assert torch.equal(out["sheet"], torch.full((2, 3), 2.0))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_invalid_calls_are_refused_on_all_workers_and_the_session_continues(warm_pool, transport):
    told = {
        "shape": "rank 0 all_reduce sum [2] torch.float32, rank 1 all_reduce sum [3] torch.float32",
        "type": "torch.float64",
        "operation": "rank 1 all_reduce max",
        "call": "rank 1 in barrier()",
        "source": "rank 1 broadcast 1",
        "gathered type": "rank 1 all_gather torch.int32 of",
        "mean of whole numbers": "a mean of torch.int64 is not a whole number",
        "sum of truths": "torch.bool has no sum",
        "unknown operation": "unknown op 'average'",
        "unknown source": "there is no rank 7",
    }
    for out in warm_pool.run(3, mistakes, transport):
        for name, text in told.items():
            kind, said, after = out[name]
            assert issubclass(kind, (ConfigError, MismatchedCalls)), name
            assert text in said
            assert "fix:" in said
            assert after == 3, name


def test_workers_that_prepare_different_objects_are_told_the_first_difference(warm_pool):
    told = {
        "shape": (ModelError, "parameter 1.weight is [4, 2] torch.float32 trained on rank 1, but [3, 2]"),
        "names": (ModelError, "rank 1 has parameter tail.weight"),
        "more": (
            ModelError,
            "1.weight of model 2 ([2, 2] torch.float32 trained) where rank 0 has nothing more",
        ),
        "frozen": (ModelError, "weight of model 3 is [2, 2] torch.float32 frozen on rank 1"),
        "type": (ModelError, "torch.float64"),
        "samples": (DataError, "loader 0, samples is 9 on rank 1, but 10 on rank 0"),
        "batch": (DataError, "batch size is 6 on rank 1, but 4 on rank 0"),
        "optimizer": (ModelError, "AdamW with [2] parameters on rank 1, but SGD"),
    }
    for out in warm_pool.run(3, disagreements):
        for name, (kind, text) in told.items():
            assert type(out[name]) is kind, name
            assert text in out[name].message
            assert "rank 1 on " in out[name].where
        assert out["still there"] == 3
