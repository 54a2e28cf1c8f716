"""Losses by micro-batches are the losses of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from echelon.parallel.losses import micro_loss
from echelon.parallel.micro import part_of

ROWS, EDGES = 7, [(0, 2), (2, 3), (3, 7)]
LOGITS = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.tensor([0, 1, 3, -100, 2, 2, 1])
WEIGHT = torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=torch.float64)
VALUES = LOGITS.flip(0)

CASES: list[tuple[Any, torch.Tensor, dict[str, Any]]] = [
    (functional.cross_entropy, TARGETS, {}),
    (functional.cross_entropy, TARGETS, {"reduction": "sum"}),
    (functional.cross_entropy, TARGETS, {"weight": WEIGHT}),
    (functional.cross_entropy, TARGETS, {"weight": WEIGHT, "label_smoothing": 0.1}),
    (functional.cross_entropy, TARGETS, {"label_smoothing": 0.1}),
    (functional.cross_entropy, TARGETS.clamp(min=0), {"ignore_index": 2}),
    (functional.cross_entropy, VALUES.softmax(1), {}),
    (functional.nll_loss, TARGETS, {"weight": WEIGHT}),
    (functional.mse_loss, VALUES, {}),
    (functional.l1_loss, VALUES, {}),
    (functional.smooth_l1_loss, VALUES, {"beta": 0.5}),
    (functional.huber_loss, VALUES, {"delta": 0.5, "reduction": "sum"}),
    (functional.binary_cross_entropy_with_logits, VALUES.sigmoid(), {"pos_weight": WEIGHT}),
]


@pytest.mark.parametrize(("function", "target", "options"), CASES)
def test_parts_of_a_loss_add_up_to_the_loss_of_the_batch(function, target, options):
    loss = micro_loss(function, (LOGITS, target), options, ROWS)
    assert loss is not None
    parts = [loss.part(part_of(LOGITS, ROWS, edge), edge) for edge in EDGES]
    torch.testing.assert_close(sum(parts), function(LOGITS, target, **options), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(
    ("function", "target", "options"),
    [
        (functional.cross_entropy, TARGETS, {"reduction": "none"}),
        (functional.mse_loss, VALUES, {"size_average": True}),
        (functional.mse_loss, VALUES[:1], {}),
        (functional.kl_div, VALUES, {}),
        (functional.mse_loss, VALUES, {"weight": VALUES.abs()}),
    ],
)
def test_a_loss_that_cannot_be_divided_is_computed_at_once(function, target, options):
    assert micro_loss(function, (LOGITS, target), options, ROWS) is None
