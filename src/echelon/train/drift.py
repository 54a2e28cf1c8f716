"""Do all workers still have the same weights? If not, which parameter differs, and on which worker?

Every worker computes a checksum of each parameter; the checksums are exchanged and compared. It is done at
the end of every epoch and at every checkpoint, so it costs little beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.errors import GradientError, ModelError
from echelon.verify.checksums import checksum as checksum
from echelon.verify.vote import vote

Named = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same on all workers; `ranks` are the workers in the minority."""

    name: str
    ranks: tuple[int, ...]


def first_difference(names: Sequence[str], sums: Sequence[Sequence[int]]) -> Difference | None:
    """The first tensor whose checksums differ; `sums` are all workers', by rank. Pure."""
    for index, name in enumerate(names):
        found = [mine[index] for mine in sums]
        if len(set(found)) > 1:
            return Difference(name, vote(found).others)
    return None


def compare(group: Group, tensors: Sequence[tuple[str, Tensor | None]]) -> Difference | None:
    """Compare tensors over all workers; all call this with tensors of the same names."""
    if group.size == 1 or not tensors:
        return None
    mine = torch.tensor([checksum(tensor) for _, tensor in tensors])
    sums = [part.tolist() for part in group.all_gather(mine)]
    return first_difference([name for name, _ in tensors], sums)


def weights_differ(found: Difference, nodes: Sequence[str], when: str) -> ModelError:
    """The error for weights that have drifted apart."""
    return ModelError(
        "the workers' weights have drifted apart: "
        f"parameter {found.name} differs on {_named(found, nodes)}",
        where=when,
        fix="change weights on all workers alike and before prepare, and let only prepared optimizers "
        "update them",
    )


def gradients_differ(found: Difference, nodes: Sequence[str], when: str) -> ModelError:
    """The error for a step on gradients that no round has reduced."""
    return ModelError(
        f"the gradient of parameter {found.name} was set without a backward pass, and differs on "
        f"{_named(found, nodes)}",
        where=when,
        fix="call loss.backward(), which reduces gradients; or reduce them: session.all_reduce(p.grad, "
        '"mean")',
    )


def weights_are_lost(
    name: str, rank: int, nodes: Sequence[str], began: int | None, when: str
) -> GradientError:
    """The error for weights that hold NaN; `began`: in which step a gradient of this worker did first."""
    here = f"rank {rank} on {nodes[rank]}"
    cause = "no gradient of an output was NaN on this worker before, so it began elsewhere, or in a layer"
    if began is not None:
        cause = f"the gradient of the model's output became NaN or infinite on {here} in step {began}"
    return GradientError(
        f"parameter {name} holds NaN, so training goes nowhere: {cause}",
        ranks=(rank,) if began is not None else (),
        where=f"{here}, {when}",
        fix="look at that worker's samples in that step, lower the learning rate, or clip gradients",
    )


def _named(found: Difference, nodes: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} on {nodes[rank]}" for rank in found.ranks)


def first_not_finite(tensors: Named) -> str:
    """The name of the first tensor that holds NaN or infinity; empty if none does."""
    for name, tensor in tensors:
        values = tensor.detach()
        # The sum first: it is quick, and not finite if any value is not.
        if values.is_floating_point() and not values.sum().isfinite() and not values.isfinite().all():
            return name
    return ""


def first_nan(tensors: Named) -> str:
    """The name of the first tensor that holds NaN; empty if none does."""
    for name, tensor in tensors:
        values = tensor.detach()
        if values.is_floating_point() and values.sum().isnan() and values.isnan().any():
            return name
    return ""
