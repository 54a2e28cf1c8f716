"""Do all workers have the same model, optimizer and data? Checked before the first step.

Workers that differ would hang or, worse, train nonsense. Each worker describes what it prepared; every
worker's error names the first difference from the leader.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from echelon.comm.group import Group
from echelon.data.dataset import ChunkDataset
from echelon.errors import DataError, ModelError
from echelon.train.loader import SharedLoader

_SAMPLED = 4096
_PLACES = (0.0, 0.5, 1.0)  # of a data set, at which samples are compared
_LONG_S = 0.1


class Fact(msgspec.Struct, frozen=True):
    """One value that must be the same on all workers."""

    kind: str
    name: str
    value: str


def describe_model(model: nn.Module, index: int) -> list[Fact]:
    """The model's parameters and buffers, in order."""
    facts = [
        Fact("parameter", label(index, name), f"{list(p.shape)} {p.dtype} {_trained(p.requires_grad)}")
        for name, p in model.named_parameters()
    ]
    buffers = [
        Fact("buffer", label(index, name), f"{list(b.shape)} {b.dtype}")
        for name, b in model.named_buffers()
    ]
    return facts + buffers


def describe_optimizer(optimizer: Optimizer, index: int) -> list[Fact]:
    """The optimizer's type, and how many tensors each of its groups has."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    return [Fact("optimizer", str(index), f"{type(optimizer).__name__} with {sizes} parameters")]


def describe_loader(loader: SharedLoader, index: int) -> list[Fact]:
    """The numbers of samples and batches, and the batch size."""
    try:
        count: Any = len(loader)
    except TypeError:
        count = "unknown"
    facts = [Fact("loader", f"{index}, batch size", str(loader.global_batch_size))]
    if not loader.streams and hasattr(loader.dataset, "__len__"):
        facts.append(Fact("loader", f"{index}, samples", str(len(loader.dataset))))
        facts.append(Fact("loader", f"{index}, which samples", _fingerprint(loader.dataset)))
    return [*facts, Fact("loader", f"{index}, batches", str(count))]


def _fingerprint(data: Any) -> str:
    """A text that differs if workers hold different samples, as far as can be seen quickly.

    A data set that was split at random on each worker has other samples there.
    """
    if isinstance(data, Subset):
        chosen = torch.tensor([int(index) for index in data.indices], dtype=torch.int64)
        return f"{_digest(chosen)} of {_fingerprint(data.dataset)}"
    if isinstance(data, ConcatDataset):
        return " and ".join(_fingerprint(part) for part in data.datasets)
    if isinstance(data, ChunkDataset):
        return data.catalogue.fingerprint
    if isinstance(data, TensorDataset):
        return " ".join(_digest(_sample(tensor)) for tensor in data.tensors)
    return f"{type(data).__name__} {_held(data)}".strip()


def _held(data: Any) -> str:
    """A digest of the tensors and arrays that a data set of another class holds as attributes."""
    found: list[str] = []
    for name, value in sorted(getattr(data, "__dict__", {}).items()):
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(
                np.ascontiguousarray(value.reshape(-1)[:: max(1, value.size // _SAMPLED)])
            )
        if isinstance(value, torch.Tensor) and not value.is_sparse:
            found.append(f"{name}={_digest(_sample(value))}")
    return " ".join(found)


def sample_digests(loader: SharedLoader) -> list[int]:
    """Digests of a few samples, for data sets whose attributes do not tell; 0 where nothing can be said.

    Samples are drawn twice from the same random state: one that differs then is drawn at random in a way
    that cannot be repeated. Nothing is drawn for a loader with processes of its own, because files that a
    data set opens here must not be shared with them, nor after a sample that took long.
    """
    nothing = [0] * len(_PLACES)
    data = loader.dataset
    known = isinstance(data, Subset | ConcatDataset | ChunkDataset | TensorDataset)
    if known or loader.streams or not hasattr(data, "__len__") or loader.num_workers:
        return nothing
    count, begun = len(data), time.perf_counter()
    found = list(nothing)
    for at, place in enumerate(_PLACES):
        if count and time.perf_counter() - begun < _LONG_S:
            found[at] = _sample_digest(data, int(place * (count - 1)))
    return found


def _sample_digest(data: Any, index: int) -> int:
    drawn: set[int] = set()
    before = random.getstate(), np.random.get_state()
    try:
        for _ in range(2):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(index)
                random.seed(index)
                np.random.seed(index % (1 << 32))
                drawn.add(_of_sample(data[index]))
    except Exception:  # noqa: BLE001 - the script's own pass over the data will raise it
        return 0
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
    return drawn.pop() if len(drawn) == 1 else 0


def _of_sample(sample: Any) -> int:
    """A number for the tensors, arrays and plain values in a sample; others do not count."""
    digest = xxhash.xxh3_64()
    left = [sample]
    while left:
        one = left.pop()
        if isinstance(one, np.ndarray) and one.dtype.kind in "biufc":
            one = torch.from_numpy(np.ascontiguousarray(one))
        if isinstance(one, torch.Tensor) and not one.is_sparse:
            digest.update(_digest(one.detach().cpu()).encode())
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple):
            left += one
        elif isinstance(one, str | bytes | int | float | bool):
            digest.update(repr(one).encode())
    return (digest.intdigest() >> 1) or 1


def differing_samples(digests: list[list[int]]) -> tuple[int, int] | None:
    """The place and the rank of the first sample that differs from the others' most common one. Pure."""
    for place in range(len(digests[0])):
        said = [one[place] for one in digests]
        known = [value for value in said if value]
        if len(set(known)) > 1:
            usual = max(known, key=lambda value: (known.count(value), -said.index(value)))
            return place, next(rank for rank, value in enumerate(said) if value not in (0, usual))
    return None


def compare_samples(group: Group, loaders: list[SharedLoader], nodes: list[str]) -> str:
    """A warning if workers read different samples at the same index; empty if no difference is seen."""
    if group.size == 1 or not loaders:
        return ""
    mine = torch.tensor([sample_digests(loader) for loader in loaders])
    by_rank = [one.tolist() for one in group.all_gather(mine)]
    for at, loader in enumerate(loaders):
        found = differing_samples([one[at] for one in by_rank])
        if found is not None:
            place, rank = found
            index = int(_PLACES[place] * (len(loader.dataset) - 1))  # type: ignore[arg-type]
            return (
                f"workers have different data: sample {index} of loader {loader.index} differs on rank "
                f"{rank} on {nodes[rank]}. Each worker draws its share of indices from its own data set, "
                "so some samples are never seen; build the same data set on all workers"
            )
    return ""


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """A few thousand values from all over the tensor."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].cpu()


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.contiguous().view(-1)
    raw = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    return f"{list(tensor.shape)} {xxhash.xxh3_64_hexdigest(raw)}"


def label(index: int, name: str) -> str:
    """A parameter's name, with its model's index if there may be several."""
    return name if index == 0 else f"{name} of model {index}"


def _trained(requires_grad: bool) -> str:
    return "trained" if requires_grad else "frozen"


def check(group: Group, facts: list[Fact], nodes: list[str]) -> None:
    """Raise on every worker if any worker's facts differ from the leader's."""
    mine = msgspec.json.encode(facts)
    if group.changes is not None:
        first = group.changes.described(mine)
        if first is not None and first != mine:  # of one that joins; what the others compare lacks its part
            raise _difference(msgspec.json.decode(first, type=list[Fact]), facts, group.changes.slot, nodes)
    digests = group.all_gather_bytes(xxhash.xxh3_64_digest(mine))
    if len(set(digests)) == 1:
        return
    described = [msgspec.json.decode(data, type=list[Fact]) for data in group.all_gather_bytes(mine)]
    for rank in range(1, group.size):
        if digests[rank] != digests[0]:
            raise _difference(described[0], described[rank], rank, nodes)


def _difference(
    leader: list[Fact], other: list[Fact], rank: int, nodes: list[str]
) -> ModelError | DataError:
    at = next(
        (i for i, (a, b) in enumerate(zip(leader, other, strict=False)) if a != b),
        min(len(leader), len(other)),
    )
    ours = leader[at] if at < len(leader) else None
    theirs = other[at] if at < len(other) else None
    named = theirs or ours
    assert named is not None
    error = DataError if named.kind == "loader" else ModelError
    same_name = ours is not None and theirs is not None and ours.name == theirs.name
    if same_name and ours is not None and theirs is not None:
        told = f"{named.kind} {named.name} is {theirs.value} on rank {rank}, but {ours.value} on rank 0"
    else:
        told = f"rank {rank} has {_said(theirs)} where rank 0 has {_said(ours)}"
    return error(
        f"workers differ: {told}",
        where=f"prepare, rank {rank} on {nodes[rank]}",
        fix="build the same model, optimizer and data set on every worker, whatever its rank",
    )


def _said(fact: Fact | None) -> str:
    return f"{fact.kind} {fact.name} ({fact.value})" if fact else "nothing more"


@torch.no_grad()
def share_state(group: Group, model: nn.Module) -> None:
    """Give all workers the leader's parameters and buffers."""
    share_tensors(group, [p.data for p in model.parameters()] + list(model.buffers()))


@torch.no_grad()
def share_tensors(group: Group, tensors: list[torch.Tensor]) -> None:
    """Give all workers the leader's values, in place; tensors of a type are sent as one message."""
    by_type: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for batch in by_type.values():
        joined = torch.cat([tensor.reshape(-1) for tensor in batch])
        group.broadcast(joined)
        for tensor, part in zip(batch, joined.split([t.numel() for t in batch]), strict=True):
            tensor.copy_(part.view_as(tensor))
