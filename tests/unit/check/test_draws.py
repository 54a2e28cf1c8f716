"""Random tensors that were recorded alone are drawn again: each worker gets its own rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from echelon.check.cuts import BatchPart
from echelon.check.draws import AlignedDraws, DrawRecord, RecordedDraws

BATCH = 12
PARTS = (
    BatchPart(offset=0, share=5, batch=BATCH),
    BatchPart(offset=5, share=4, batch=BATCH),
    BatchPart(offset=9, share=3, batch=BATCH),
)

DRAWS = {
    "rand": lambda n: torch.rand(n, 3),
    "randn": lambda n: torch.randn(n, 3, generator=torch.Generator().manual_seed(4)),
    "randint": lambda n: torch.randint(2, 90, (n,)),
    "normal": lambda n: torch.normal(1.0, 2.0, (n, 3)),
    "normal of means": lambda n: torch.normal(torch.ones(n, 3), 2.0),
    "normal of spreads": lambda n: torch.normal(1.0, torch.full((n, 3), 2.0)),
    "normal of both": lambda n: torch.normal(torch.ones(n, 3), torch.full((n, 3), 2.0)),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 3)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n, 3, dtype=torch.float64)),
    "randint_like": lambda n: torch.randint_like(torch.ones(n, 3), 9),
    "uniform_": lambda n: torch.empty(n, 3).uniform_(2, 3),
    "normal_, channels last": lambda n: (
        torch.empty(n, 3, 2, 2).to(memory_format=torch.channels_last).normal_()
    ),
    "exponential_": lambda n: torch.empty(n, 3).exponential_(),
    "random_": lambda n: torch.empty(n, 3).random_(),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n, 3), 0.4)),
    "bernoulli with p": lambda n: torch.bernoulli(torch.ones(n, 3), 0.4),
    "bernoulli_": lambda n: torch.empty(n, 3).bernoulli_(0.4),
    "bernoulli_ of a tensor": lambda n: torch.empty(n, 3).bernoulli_(torch.full((3,), 0.4)),
    "dropout": lambda n: functional.dropout(torch.ones(n, 8)),
    "dropout of channels": lambda n: functional.dropout2d(torch.ones(n, 3, 2, 2)).flatten(1),
    "dropout of rows of samples": lambda n: functional.dropout(torch.ones(n * 4, 8)).view(n, -1),
    "dropout, batch second": lambda n: functional.dropout(torch.ones(5, n, 4)).transpose(0, 1),
    "alpha dropout": lambda n: functional.alpha_dropout(torch.ones(n, 8), training=True),
    "native dropout": lambda n: torch.native_dropout(torch.ones(n, 8), 0.5, True)[0],
    "gumbel softmax": lambda n: functional.gumbel_softmax(torch.ones(n, 4)),
    "multinomial": lambda n: torch.multinomial(torch.ones(n, 9), 3),
    "multinomial, replaced": lambda n: torch.multinomial(torch.ones(n, 9), 4, replacement=True),
    "a distribution": lambda n: torch.distributions.Normal(torch.zeros(n, 2), 1.0).rsample(),
    "attention": lambda n: functional.scaled_dot_product_attention(
        *[torch.ones(n, 2, 4, 3)] * 3, dropout_p=0.5
    ),
}


class _Parts:
    def __init__(self, *parts: BatchPart) -> None:
        self._parts = parts

    def parts(self) -> tuple[BatchPart, ...]:
        return self._parts


def _drawn(target, draw, parts: tuple[BatchPart, ...] = (), rank: int = 0):
    mode = AlignedDraws(target, _Parts(*parts), rank=rank, workers=3)
    mode.active = True
    try:
        with mode:
            result = draw()
        mode.next_segment()
    finally:
        target.close()
    return result, mode.unaligned


@pytest.mark.parametrize("name", DRAWS)
def test_workers_draw_together_what_one_draws_alone(name, tmp_path):
    draw = DRAWS[name]
    alone, _ = _drawn(DrawRecord(tmp_path), lambda: draw(BATCH))
    assert len(alone.unique(dim=0)) > 1
    rows = []
    for rank, part in enumerate(PARTS):
        torch.manual_seed(100 + rank)  # streams of their own
        mine, unaligned = _drawn(RecordedDraws(tmp_path), lambda part=part: draw(part.share), (part,), rank)
        assert unaligned == []
        rows.append(mine)
    assert torch.equal(torch.cat(rows), alone)


def test_what_is_drawn_for_no_batch_is_the_same_on_all_workers(tmp_path):
    def draw() -> torch.Tensor:
        return torch.randn(7)

    alone, _ = _drawn(DrawRecord(tmp_path), draw)
    torch.manual_seed(9)
    again, unaligned = _drawn(RecordedDraws(tmp_path), draw, PARTS[1:2])
    assert torch.equal(alone, again)
    assert unaligned == []


def test_the_values_that_are_drawn_alone_have_the_right_distribution(tmp_path):
    torch.manual_seed(5)
    chances = torch.tensor([0.1, 0.2, 0.7])

    def draw() -> list[torch.Tensor]:
        return [
            torch.multinomial(chances.expand(4000, 3), 1),
            torch.multinomial(chances.expand(4000, 3), 2, replacement=True),
            torch.bernoulli(torch.full((4000,), 0.7)),
        ]

    (once, often, ones), _ = _drawn(DrawRecord(tmp_path), draw)
    for taken in (once, often):
        shares = torch.bincount(taken.flatten(), minlength=3) / taken.numel()
        assert torch.allclose(shares, chances, atol=0.03)
    assert ones.mean().item() == pytest.approx(0.7, abs=0.03)


def test_draws_on_one_rank_only_do_not_shift_the_others(tmp_path):
    def draw(n: int, extra: bool) -> torch.Tensor:
        if extra:
            torch.randn(50)
        return torch.randn(n, 2)

    alone, _ = _drawn(DrawRecord(tmp_path), lambda: draw(BATCH, True))
    mine, unaligned = _drawn(RecordedDraws(tmp_path), lambda: draw(4, False), PARTS[1:2], 1)
    assert torch.equal(mine, alone[5:9])
    assert unaligned == []


@pytest.mark.parametrize(
    ("draw", "what", "why"),
    [
        (lambda n: torch.randperm(n), "randperm", "a draw of 12 cannot be shared out"),
        (lambda n: torch.randn(n, n), "randn", "12 x 12 alone and 4 x 4 on rank 1 are no parts of a batch"),
        (lambda n: torch.rand(n) if n < 9 else None, "rand", "alone does not draw there"),
        (
            lambda n: [torch.randn(3) for _ in range(n)],
            "randn",
            "alone draws 12 times there in a step, rank 1 4 times",
        ),
    ],
)
def test_what_cannot_be_aligned_is_named_with_its_line(tmp_path, draw, what, why):
    _drawn(DrawRecord(tmp_path), lambda: draw(BATCH))
    _, (found,) = _drawn(RecordedDraws(tmp_path), lambda: draw(4), PARTS[1:2], 1)
    assert found.what == what
    assert why in found.why
    assert found.place.endswith(f"test_draws.py:{draw.__code__.co_firstlineno}")


def test_layers_and_their_gradients_work_while_draws_are_watched(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
    _drawn(DrawRecord(tmp_path), lambda: model(torch.ones(6, 4)).square().mean().backward())
    assert all(p.grad is not None for p in model.parameters())
