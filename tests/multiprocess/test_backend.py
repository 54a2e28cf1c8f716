"""The backend for torch.distributed, on real workers: against Gloo, against one process, and failing."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from warm import WarmPool, WorkerFailure

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
    torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
ORDERED = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
LONG = timedelta(seconds=60)


def opened(timeout: timedelta = LONG) -> tuple[int, int]:
    """Make the backend the default one; this worker's rank, and how many there are."""
    import echelon.backend  # noqa: F401

    dist.init_process_group("echelon", timeout=timeout)
    return dist.get_rank(), dist.get_world_size()


def values(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Small whole numbers, which every type adds without rounding."""
    chosen = torch.Generator().manual_seed(rank)
    whole = torch.randint(0, 2 if dtype == torch.bool else 4, shape, generator=chosen)
    return whole.to(dtype)


# Reductions ----------------------------------------------------------------------------------------


def long_reductions() -> None:
    """Long enough to go through buffers in shared memory, of which each worker sums a part."""
    rank, size = opened()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            for _ in range(2):  # in the same buffer
                tensor = values(rank, dtype, 100_001, 3)
                works = [dist.all_reduce(tensor, op, async_op=True)]
                turned = values(rank, dtype, 100_001, 3).t()  # not contiguous
                works.append(dist.all_reduce(turned, op, async_op=True))
                for work in works:
                    work.wait()
                expected = combined([values(one, dtype, 100_001, 3) for one in range(size)], op)
                assert tensor.equal(expected), (dtype, op)
                assert turned.equal(expected.t()), (dtype, op)
    dist.destroy_process_group()


def reductions() -> None:
    rank, size = opened()
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG, *ORDERED, *BITWISE):
            inexact = dtype.is_floating_point or dtype.is_complex
            if (op in BITWISE and inexact) or (dtype.is_complex and op != dist.ReduceOp.SUM):
                continue
            if dtype == torch.bool and op == dist.ReduceOp.AVG:
                continue
            parts = [values(one, dtype, 7, 3) for one in range(size)]
            expected = combined(parts, op)
            tensor = values(rank, dtype, 7, 3)
            dist.all_reduce(tensor, op)
            assert tensor.equal(expected), (dtype, op, tensor, expected)
            turned = values(rank, dtype, 7, 3).t().contiguous().t()  # not contiguous
            dist.all_reduce(turned, op)
            assert turned.equal(expected), (dtype, op)
            tensor = values(rank, dtype, 7, 3)
            dist.reduce(tensor, 1, op)
            assert tensor.equal(expected if rank == 1 else parts[rank]), (dtype, op)
            if not dtype.is_complex:
                out = torch.empty(7, 1, dtype=dtype)
                rows = [part.t().contiguous().view(3, 7, 1) for part in parts]
                dist.reduce_scatter(out, list(rows[rank]), op)
                assert out.equal(combined(rows, op)[rank]), (dtype, op)
                flat = torch.empty(7, dtype=dtype)
                dist.reduce_scatter_single(flat, rows[rank].reshape(-1), op)
                assert flat.equal(combined(rows, op)[rank].view(-1)), (dtype, op)


def combined(parts: list[Tensor], op: dist.ReduceOp) -> Tensor:
    """What one process computes."""
    stacked = torch.stack(parts)
    if op == dist.ReduceOp.AVG:
        total = stacked.sum(0).to(parts[0].dtype)
        return (
            total / len(parts)
            if total.is_floating_point()
            else total.div(len(parts), rounding_mode="trunc")
        )
    if parts[0].dtype == torch.bool:
        any_of = {dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.BOR}
        if op == dist.ReduceOp.BXOR:
            return stacked.sum(0) % 2 == 1
        return stacked.any(0) if op in any_of else stacked.all(0)
    if op in BITWISE:
        found = parts[0]
        for part in parts[1:]:
            found = {BITWISE[0]: found & part, BITWISE[1]: found | part, BITWISE[2]: found ^ part}[op]
        return found
    if op == dist.ReduceOp.SUM:
        return stacked.sum(0).to(parts[0].dtype)
    if op == dist.ReduceOp.PRODUCT:
        return stacked.prod(0).to(parts[0].dtype)
    return stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.amin(0)


def test_reductions_of_all_types_are_those_of_one_process(warm_pool: WarmPool) -> None:
    warm_pool.run(3, reductions)


def test_long_reductions_are_those_of_one_process(warm_pool: WarmPool) -> None:
    warm_pool.run(3, long_reductions)


# Moving tensors ------------------------------------------------------------------------------------


def movements() -> None:
    rank, size = opened()
    for dtype in [*DTYPES, torch.float8_e4m3fn]:
        own = [values(one, dtype, 2, 3) for one in range(size)]
        for root in range(size):
            tensor = values(rank, dtype, 2, 3)
            dist.broadcast(tensor, root)
            same(tensor, own[root])
            gathered = [torch.empty_like(own[0]) for _ in own] if rank == root else None
            dist.gather(own[rank], gathered, root)
            for got, sent in zip(gathered or [], own, strict=False):
                same(got, sent)
            out = torch.empty_like(own[0])
            dist.scatter(out, own if rank == root else None, root)
            same(out, own[rank])
        outputs = [torch.empty_like(one) for one in own]
        dist.all_gather(outputs, own[rank])
        for got, sent in zip(outputs, own, strict=True):
            same(got, sent)
        whole = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_single(whole, own[rank])
        same(whole, torch.cat([one.view(torch.uint8).view(dtype) for one in own]))
    uneven()
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": one} for one in range(size)]


def same(got: Tensor, sent: Tensor) -> None:
    assert got.contiguous().view(torch.uint8).equal(sent.contiguous().view(torch.uint8)), (got, sent)


def uneven() -> None:
    """Parts of different sizes, and empty ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = [torch.full((rank + to,), float(10 * rank + to)) for to in range(size)]
    outputs = [torch.empty(rank + source) for source in range(size)]
    dist.all_to_all(outputs, inputs)
    for source, got in enumerate(outputs):
        assert got.equal(torch.full((rank + source,), float(10 * source + rank)))
    whole = torch.empty(sum(len(one) for one in outputs))
    dist.all_to_all_single(
        whole, torch.cat(inputs), [len(one) for one in outputs], [len(one) for one in inputs]
    )
    assert whole.equal(torch.cat(outputs))
    parts = [torch.empty(one) for one in range(size)]
    dist.all_gather(parts, torch.full((rank,), float(rank)))
    assert [part.tolist() for part in parts] == [[float(one)] * one for one in range(size)]


def test_tensors_of_all_types_arrive_unchanged(warm_pool: WarmPool) -> None:
    warm_pool.run(3, movements)


# Messages ------------------------------------------------------------------------------------------


def messages() -> None:
    rank, size = opened()
    later, sooner = torch.empty(3), torch.empty(2)
    if rank == 0:
        dist.send(torch.ones(2), 1, tag=5)
        dist.isend(torch.full((3,), 2.0), 1, tag=7).wait()
    if rank == 1:
        dist.recv(later, 0, tag=7)
        assert dist.recv(sooner, tag=5) == 0
        assert (later.tolist(), sooner.tolist()) == ([2.0] * 3, [1.0] * 2)
    if rank:
        dist.send(torch.full((4,), float(rank)), 0, tag=1)
    else:
        senders = set()
        for _ in range(size - 1):
            got = torch.empty(4)
            source = dist.recv(got, tag=1)
            assert got.tolist() == [float(source)] * 4
            senders.add(source)
        assert senders == set(range(1, size))
    ring()
    large = torch.arange(1 << 20) if rank == 0 else torch.empty(1 << 20, dtype=torch.int64)
    if rank == 0:
        works = [dist.isend(large, to) for to in range(1, size)]
        for work in works:
            work.wait()
    else:
        work = dist.irecv(large, 0)
        while not work.is_completed():
            time.sleep(0.001)
        work.wait()
        assert large.equal(torch.arange(1 << 20))
    dist.destroy_process_group()
    assert not [one for one in threading.enumerate() if one.name.startswith("echelon-")]


def ring() -> None:
    """Non-contiguous and empty tensors to the next worker, all at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    turned = torch.empty(3, 2).t()
    operations = [
        dist.P2POp(dist.isend, torch.full((2, 3), float(rank)).t().contiguous().t(), (rank + 1) % size),
        dist.P2POp(dist.irecv, turned, (rank - 1) % size),
        dist.P2POp(dist.isend, torch.empty(0), (rank + 1) % size, tag=9),
        dist.P2POp(dist.irecv, torch.empty(0), (rank - 1) % size, tag=9),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert turned.equal(torch.full((2, 3), float((rank - 1) % size)))


def test_messages_are_matched_by_sender_and_tag(warm_pool: WarmPool) -> None:
    warm_pool.run(3, messages)


# What stands on it ---------------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch() -> Tensor:
    return torch.arange(48, dtype=torch.float64).view(8, 6).sin()


def alone(optimizer: str = "SGD") -> list[Tensor]:
    """The parameters after three steps in one process."""
    single = model()
    stepper = getattr(torch.optim, optimizer)(single.parameters(), lr=0.1)
    for _ in range(3):
        stepper.zero_grad()
        single(batch()).square().mean().backward()
        stepper.step()
    return [parameter.detach() for parameter in single.parameters()]


def trained(wrapped: nn.Module, stepper: torch.optim.Optimizer) -> None:
    share = batch().chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(3):
        stepper.zero_grad()
        wrapped(share).square().mean().backward()
        stepper.step()


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-12, atol=1e-12)


def data_parallel() -> None:
    opened()
    hooked = nn.parallel.DistributedDataParallel(model())
    hooked.register_comm_hook(None, averaging)
    for wrapped in (nn.parallel.DistributedDataParallel(model()), hooked):
        trained(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
        close(list(wrapped.parameters()), alone())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing this warns
        from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model())
    trained(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=0.1))
    close(list(wrapped.parameters()), alone("Adam"))
    sharded()


def averaging(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, which are text here
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


def sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    wrapped = model()
    for layer in wrapped:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    trained(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    close([one.full_tensor() for one in wrapped.parameters() if isinstance(one, DTensor)], alone())
    left = distribute_tensor(batch(), mesh, [Shard(0)])
    close([(left @ left.t()).full_tensor()], [batch() @ batch().t()])


def test_ddp_hooks_zero_fsdp_and_dtensor_equal_one_process(warm_pool: WarmPool) -> None:
    warm_pool.run(2, data_parallel)


def pipelined() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, _ = opened()
    whole = model()
    part = copy.deepcopy(whole[:3] if rank == 0 else whole[3:])
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, _: out.square().mean())
    if rank == 0:
        schedule.step(batch())
    else:
        schedule.step(target=torch.zeros(8, 4), losses=[])
    whole(batch()).square().mean().backward()
    expected = whole[:3] if rank == 0 else whole[3:]
    close([one.grad for one in part.parameters()], [one.grad for one in expected.parameters()])


def test_torchs_pipeline_equals_one_process(warm_pool: WarmPool) -> None:
    warm_pool.run(2, pipelined)


def nested() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    rank, _ = opened()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name, members in (
        ("inner", [rank - rank % 2, rank - rank % 2 + 1]),
        ("outer", [rank % 2, rank % 2 + 2]),
    ):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == sum(members)
    single = dist.new_group([rank], use_local_synchronization=True)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=single)
    dist.destroy_process_group(single)
    sparse = torch.sparse_coo_tensor([[rank, 0]], [1.0, 2.0], (4,), check_invariants=True)
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [9.0, 1.0, 1.0, 1.0]
    assert tensor.item() == rank


def test_groups_of_some_workers_and_sparse_sums(warm_pool: WarmPool) -> None:
    warm_pool.run(4, nested)


# Failures ------------------------------------------------------------------------------------------


def late() -> str:
    rank, _ = opened()
    brief = dist.new_group(timeout=timedelta(seconds=0.5))
    found = ""
    if rank == 0:
        for again in range(2):
            with pytest.raises(RuntimeError) as raised:
                dist.all_reduce(torch.ones(1), group=brief)
            found = found or str(raised.value)
            assert str(raised.value).startswith("a timeout has passed: rank 1 on "), again
    dist.all_reduce(torch.ones(1))  # the other group goes on
    return found


def test_deadline_names_the_late_worker_and_other_groups_go_on(warm_pool: WarmPool) -> None:
    found = warm_pool.run(2, late)[0]
    assert "did not arrive within 0.5 s" in found
    assert "timeout= of the group or the call" in found


def watched() -> list[str]:
    rank, _ = opened()
    world = dist.group.WORLD
    assert world is not None
    world.monitored_barrier(LONG)
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            world.monitored_barrier(timedelta(seconds=0.3), wait_all_ranks=True)
        dist.barrier()
        return [str(raised.value)]
    dist.barrier()
    return []


def test_monitored_barrier_names_all_that_did_not_come(warm_pool: WarmPool) -> None:
    assert re.match(
        r"Ranks 1, 2 failed to pass monitoredBarrier in 300 ms", warm_pool.run(3, watched)[0][0]
    )


def killed() -> str:
    rank, _ = opened()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    wrapped = nn.parallel.DistributedDataParallel(model(), init_sync=False)
    with pytest.raises(RuntimeError) as raised:
        wrapped(batch()).sum().backward()
    assert time.monotonic() - begun < LONG.total_seconds() / 2  # noticed, not timed out
    return str(raised.value)


def test_dead_worker_is_named_also_where_ddp_waits(warm_pool: WarmPool) -> None:
    survivor, dead = warm_pool.outcomes(2, killed)
    assert isinstance(dead, WorkerFailure)
    assert "rank 1 on " in survivor, survivor
    assert "gone" in survivor


# Launchers -----------------------------------------------------------------------------------------

SCRIPT = """
import torch, torch.distributed as dist
import echelon.backend
dist.init_process_group("echelon")
tensor = torch.ones(1)
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    print("sum", int(tensor))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "launcher",
    [
        ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
        ["echelon", "run", "--workers", "2"],
    ],
    ids=["torchrun", "echelon run"],
)
def test_launchers_start_it(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "sum 2" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
