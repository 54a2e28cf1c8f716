"""Every transport against the contract of a group. Many checks go into each call of the warm pool."""

from __future__ import annotations

import hashlib

import pytest
import torch

import echelon
from wires import values

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
MOVED = [*DTYPES, torch.bool, torch.complex64, torch.int16]
COMBINED = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}
LENGTHS = [0, 1, 2, 1000]
LARGE = 1_500_000
CPU = torch.device("cpu")

every_transport = pytest.mark.parametrize("transport", ["shm", "tcp", "c10d"])
sizes = pytest.mark.parametrize("size", [2, 4])


class member:  # noqa: N801 - reads as what it gives
    """A worker's group, for the time of a call."""

    def __init__(self, transport):
        self._session = echelon.join(record=False, transport=transport, round_timeout_s=30, timeout_s=30)

    def __enter__(self):
        self._session.__enter__()
        return self._session, self._session._group

    def __exit__(self, *story):
        self._session.__exit__(*story)


def noise(rank, length, dtype=torch.float32):
    """Numbers whose sum depends on the order in which they are added."""
    made = torch.randn(length, generator=torch.Generator().manual_seed(rank))
    return (made * 10.0**rank).to(dtype)


def reductions(transport):
    out = {}
    with member(transport) as (_, group):
        out["rank"] = (group.rank, group.size)
        for dtype in DTYPES:
            for op in COMBINED:
                for length in LENGTHS:
                    tensor = values(group.rank, length, dtype)
                    result = group.all_reduce(tensor, op).wait()
                    out[dtype, op, length, "plain"] = tensor
                    out[dtype, op, length, "same"] = result.data_ptr() == tensor.data_ptr()
                    buffer = group.buffer(length, dtype, CPU)
                    out[dtype, op, length, "new"] = bool(buffer.any())
                    buffer.copy_(values(group.rank, length, dtype))
                    group.all_reduce(buffer, op).wait()
                    out[dtype, op, length, "buffer"] = buffer.clone()
                    group.release(buffer)
                    buffer.copy_(values(group.rank, length, dtype))
                    group.all_reduce(buffer, op).wait()
                    out[dtype, op, length, "released"] = buffer.clone()
    return out


def others(transport):
    out = {}
    with member(transport) as (session, group):
        rank, size = group.rank, group.size
        out["gathered"] = [group.all_gather(values(rank, 3, dtype)) for dtype in MOVED]
        out["gathered 0-dim"] = group.all_gather(torch.tensor(float(rank)))
        out["gathered empty"] = group.all_gather(torch.zeros(0, 3))
        out["gathered turned"] = group.all_gather((torch.arange(6.0).view(2, 3) + rank).t())
        out["gathered large"] = [bool((p == r).all()) for r, p in enumerate(group.all_gather(_full(rank)))]
        out["gathered bytes"] = group.all_gather_bytes(b"x" * (rank * 5))
        told = []
        for source in range(size):
            for dtype in MOVED:
                tensor = values(rank, 4, dtype)
                group.broadcast(tensor, source)
                told.append(torch.equal(tensor, values(source, 4, dtype)))
            large = _full(rank)
            group.broadcast(large, source)
            told.append(bool((large == source).all()))
            told.append(group.broadcast_bytes(f"from {rank}".encode(), source) == f"from {source}".encode())
        group.broadcast(torch.zeros(0), size - 1)
        out["told"] = told
        for _ in range(20):
            group.barrier()
        sheet = torch.arange(6.0).view(2, 3) * (rank + 1)
        session.all_reduce(sheet.t())
        column = torch.ones(3, 2)
        session.all_reduce(column[:, 1])
        out["turned"], out["column"] = sheet, column
        weight = torch.ones(3, requires_grad=True)
        group.all_reduce(weight).wait()
        out["leaf"] = weight.detach()
        broken = torch.ones(5)
        broken[rank] = float("nan")
        out["nan"] = group.all_reduce(broken).wait()
    return out


def _full(rank):
    return torch.full((LARGE // 4,), float(rank))


def at_once(transport):
    """Several under way, on several forks, waited for in another order than they were begun."""
    out = {}
    with member(transport) as (_, group):
        rank = group.rank
        held = [group.buffer(1000, torch.float32, CPU) for _ in range(3)]
        tensors = [*held, *(torch.empty(n) for n in (10, 30_000, LARGE))]
        for turn in range(3):
            for n, tensor in enumerate(tensors):
                tensor.fill_(rank + n + turn)
            begun = [group.all_reduce(tensor, priority=-n) for n, tensor in enumerate(tensors)]
            group.barrier()
            order = range(len(begun)) if (rank + turn) % 2 else reversed(range(len(begun)))
            for n in order:
                begun[n].wait()
                out[turn, n] = (tensors[n].unique().tolist(), begun[n].done())
        one, other = group.fork(), group.fork()
        pair = [one, other] if rank % 2 else [other, one]
        parts = {fork: torch.full((50_000,), float(rank + 1)) for fork in pair}
        begun = [fork.all_reduce(parts[fork], "max" if fork is one else "min") for fork in pair]
        main = torch.full((50_000,), float(rank))
        group.all_reduce(main).wait()
        for pending in begun:
            pending.wait()
        out["forks"] = (parts[one][0].item(), parts[other][0].item(), main[0].item())
        one.close()
        out["after a fork"] = [g.all_reduce(torch.ones(3)).wait().tolist() for g in (other, group)]
        grown = group.fork().buffer(LARGE, torch.float32, CPU)
        grown.copy_(noise(rank, LARGE))
    return out


def exactly(transport):
    """The bits of sums that depend on the order of adding."""
    out = []
    with member(transport) as (_, group):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for length in (7, 5000, LARGE):
                plain = noise(group.rank, length, dtype)
                group.all_reduce(plain).wait()
                buffer = group.buffer(length, dtype, CPU)
                buffer.copy_(noise(group.rank, length, dtype))
                group.all_reduce(buffer).wait()
                out += [hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest() for t in (plain, buffer)]
    return out


def kinds(transport):
    with member(transport) as (_, group):
        buffer = group.buffer(10, torch.float32, CPU)
        team = getattr(group, "_team", None)
        return type(group).__name__, team is not None and team.holds(buffer)


@every_transport
@sizes
def test_reductions_of_every_type_are_right_in_place_on_every_member(warm_pool, transport, size):
    for rank, out in enumerate(warm_pool.run(size, reductions, transport)):
        assert out["rank"] == (rank, size)
        for dtype in DTYPES:
            for op, combine in COMBINED.items():
                for length in LENGTHS:
                    inputs = torch.stack([values(r, length, dtype) for r in range(size)])
                    expected = combine(inputs.to(torch.float64), 0).to(dtype)
                    case = (dtype, op, length)
                    for what in ("plain", "buffer", "released"):
                        assert torch.equal(out[*case, what], expected), (*case, what)
                    assert out[*case, "same"], case
                    assert not out[*case, "new"], case


@every_transport
@sizes
def test_gathering_telling_and_odd_tensors_are_right_on_every_member(warm_pool, transport, size):
    total = size * (size + 1) / 2
    for out in warm_pool.run(size, others, transport):
        for dtype, parts in zip(MOVED, out["gathered"], strict=True):
            assert [part.dtype for part in parts] == [dtype] * size
            assert all(torch.equal(part, values(r, 3, dtype)) for r, part in enumerate(parts))
        assert [part.shape for part in out["gathered 0-dim"]] == [()] * size
        assert [part.item() for part in out["gathered 0-dim"]] == list(range(size))
        assert [part.shape for part in out["gathered empty"]] == [(0, 3)] * size
        for r, part in enumerate(out["gathered turned"]):
            assert torch.equal(part, (torch.arange(6.0).view(2, 3) + r).t())
        assert out["gathered large"] == [True] * size
        assert out["gathered bytes"] == [b"x" * (r * 5) for r in range(size)]
        assert all(out["told"])
        assert torch.equal(out["turned"], torch.arange(6.0).view(2, 3) * total)
        assert out["column"].tolist() == [[1, size]] * 3
        assert out["leaf"].tolist() == [size] * 3
        assert out["nan"].isnan().tolist() == [n < size for n in range(5)]
        assert out["nan"][size:].tolist() == [size] * (5 - size)


@every_transport
@sizes
def test_operations_at_once_and_forks_keep_out_of_each_others_way(warm_pool, transport, size):
    for out in warm_pool.run(size, at_once, transport):
        for turn in range(3):
            for n in range(6):
                assert out[turn, n] == ([sum(r + n + turn for r in range(size))], True)
        assert out["forks"] == (size, 1, sum(range(size)))
        assert out["after a fork"] == [[size] * 3] * 2


@every_transport
def test_every_member_ends_with_identical_bits(warm_pool, transport):
    first, *rest = warm_pool.run(4, exactly, transport)
    for other in rest:
        assert other == first


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("shm", ("EngineGroup", True)),
        ("auto", ("EngineGroup", True)),
        ("tcp", ("EngineGroup", False)),
        ("c10d", ("C10dGroup", False)),
    ],
)
def test_the_transport_that_was_asked_for_is_the_one_that_is_used(warm_pool, transport, expected):
    assert warm_pool.run(2, kinds, transport) == [expected] * 2
