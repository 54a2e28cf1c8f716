"""Whose gradients are not finite, though the others' are? The sum is made again without them.

Sums are the same on all members, so all ask each other, or none does: a round of finite sums costs no
message. What to do about such a worker is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.reduce.bucket import Bucket


def find_unfit(group: Group, members: Sequence[int], buckets: Sequence[Bucket]) -> Sequence[int]:
    """The members whose own gradients are not finite, if a sum is not; none if they are all members'."""
    if all(_looks_finite(bucket.sums()) for bucket in buckets):
        return ()
    own = all(
        p.grad is None or bool(p.grad.isfinite().all()) for bucket in buckets for p in bucket.parameters
    )
    told = group.all_gather(torch.tensor([float(own)]))
    unfit = [slot for slot, fit in zip(members, told, strict=True) if not fit]
    return unfit if len(unfit) < len(told) else ()


@torch.no_grad()
def send_without(group: Group, buckets: Sequence[Bucket], weight: float, *, is_unfit: bool) -> None:
    """Send gradients again, those of an unfit worker as zeros; it keeps its own, for another round."""
    weight = 0.0 if is_unfit else weight
    total = torch.tensor([weight], dtype=torch.float64)
    group.all_reduce(total).wait()
    for index, bucket in enumerate(buckets):
        own = [p.grad for p in bucket.parameters]
        for p in bucket.parameters if is_unfit else ():
            p.grad = None if p.grad is None else torch.zeros_like(p.grad)  # NaN times 0 is NaN
        bucket.reset()
        bucket.send(weight / float(total), -index - 1)
        for p, gradient in zip(bucket.parameters, own, strict=True) if is_unfit else ():
            p.grad = gradient


def _looks_finite(values: Tensor) -> bool:
    """Whether the sum of all values is finite: false also for values too large to be added up."""
    halves = values.dtype in (torch.float16, torch.bfloat16)
    return bool(torch.isfinite(values.sum(dtype=torch.float32 if halves else None)))
