"""With batch="per-worker" a loader's batch is each worker's, and gradients are those that DDP gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import echelon
from plain import examples, network


def beside_ddp(normalise, transport):
    """Train one model with both; returns the differences of gradients and weights, and the batches."""
    dist.init_process_group("gloo")
    with echelon.join(record=False, transport=transport) as session:
        model = network(session)
        if normalise:
            model.insert(1, nn.BatchNorm1d(16).double())
        peer = DistributedDataParallel(copy.deepcopy(model))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, peer)]
        model, optimizers[0], loader = session.prepare(
            model,
            optimizers[0],
            DataLoader(examples(56), batch_size=6),
            batch="per-worker",
            batchnorm="local",
        )
        apart, drawn = [], []
        for _ in session.epochs(6):
            for x, y in loader:
                for m, optimizer in zip((model, peer), optimizers, strict=True):
                    optimizer.zero_grad()
                    F.cross_entropy(m(x), y).backward()
                pairs = list(zip(model.parameters(), peer.module.parameters(), strict=True))
                apart.append(max(float((p.grad - q.grad).abs().max()) for p, q in pairs))
                for optimizer in optimizers:
                    optimizer.step()
                apart.append(max(float((p - q).detach().abs().max()) for p, q in pairs))
                drawn.append(x[:, 0].tolist())
        length = len(loader)
    return max(apart), drawn, length, dist.is_initialized()


@pytest.mark.parametrize("normalise", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(("workers", "transport"), [(2, "c10d"), (4, "auto")])
def test_per_worker_batches_give_the_gradients_of_ddp(warm_pool, workers, transport, normalise):
    told = warm_pool.run(workers, beside_ddp, normalise, transport)
    for apart, drawn, length, still_initialised in told:
        assert apart < 1e-12
        assert {len(batch) for batch in drawn[: length - 1]} == {6}
        assert still_initialised, "a script's own process group is left alone"
    first_epoch = [value for _, drawn, length, _ in told for batch in drawn[:length] for value in batch]
    assert sorted(first_epoch) == sorted(examples(56).tensors[0][:, 0].tolist())
