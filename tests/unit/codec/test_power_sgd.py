"""Power-SGD: exact low-rank sums, conserved residuals, and a basis that improves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from echelon.codec.codec import CODECS, RESIDUAL, CodecContext, State
from echelon.codec.codecs.power_sgd import BASIS, PowerSgd, _orthonormal
from echelon.errors import ConfigError, Corrupt


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _combined(
    codec: PowerSgd, gradients: list[torch.Tensor], states: list[State], step: int = 0
) -> list[torch.Tensor]:
    """Each worker's result; all totals are sums in the order of ranks."""
    shape = tuple(gradients[0].shape)
    contexts = [
        CodecContext(step=step, workers=len(states), rank=rank, shape=shape, seed=9)
        for rank in range(len(states))
    ]
    numbers = [
        codec.first(gradient.flatten(), state, context)
        for gradient, state, context in zip(gradients, states, contexts, strict=True)
    ]
    numbers = [
        codec.further(torch.stack(numbers).sum(0), state, context)
        for state, context in zip(states, contexts, strict=True)
    ]
    outs = []
    for state, context in zip(states, contexts, strict=True):
        out = torch.full((math.prod(shape),), 7.0)
        codec.finish(torch.stack(numbers).sum(0), out, state, context)
        outs.append(out.view(shape))
    return outs


def _off(one: torch.Tensor, other: torch.Tensor) -> float:
    """The distance relative to `other`, in float64 so that squares do not overflow."""
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_sum_of_low_rank_is_exact(scale):
    codec = PowerSgd(rank=3)
    left = _normal(40, 3)
    gradients = [left @ _normal(3, 70, seed=1) * scale, left @ _normal(3, 70, seed=2) * scale]
    states = [codec.begin(2800) for _ in gradients]
    for step in range(3):
        outs = _combined(codec, gradients, states, step)
        assert _off(outs[0], sum(gradients)) < 1e-5
        assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_results_plus_residuals_are_the_sum_of_the_inputs(scale):
    codec = PowerSgd(rank=2)
    states = [codec.begin(30 * 50) for _ in range(3)]
    given, read = torch.zeros(30, 50, dtype=torch.float64), torch.zeros(30, 50, dtype=torch.float64)
    for step in range(10):
        gradients = [_normal(30, 50, seed=3 * step + rank) * scale for rank in range(3)]
        given += sum(gradients)
        read += _combined(codec, gradients, states, step)[0]
    left = sum(state[RESIDUAL].double() for state in states).view(30, 50)
    assert left.norm() > 0.1 * given.norm()
    assert _off(read + left, given) < 1e-5


def test_the_basis_improves_from_step_to_step():
    codec = PowerSgd(rank=2, feedback=False)
    strong = _normal(60, 2, seed=4) @ _normal(2, 80, seed=5)
    gradient = strong + _normal(60, 80, seed=6)
    states = [codec.begin(4800)]
    off = [_off(_combined(codec, [gradient], states, step)[0], gradient) for step in range(8)]
    u, s, v = torch.linalg.svd(gradient)
    best = _off(u[:, :2] * s[:2] @ v[:2], gradient)
    assert off[0] > off[1] > best
    assert off[-1] < best * 1.01


def test_all_workers_have_the_same_basis_and_no_other_state():
    codec = PowerSgd(rank=2)
    states = [codec.begin(600) for _ in range(2)]
    _combined(codec, [_normal(20, 30), _normal(20, 30, seed=1)], states)
    assert torch.equal(states[0][BASIS], states[1][BASIS])
    assert all(set(state) == {RESIDUAL, BASIS} for state in states)


def test_dimensions_beyond_the_first_are_columns():
    codec = PowerSgd(rank=1)
    gradient = (_normal(16, 1) @ _normal(1, 27, seed=1)).view(16, 3, 3, 3)
    out = _combined(codec, [gradient], [codec.begin(gradient.numel())])[0]
    torch.testing.assert_close(out, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(100,), (4, 4), (2, 500), (1, 50), (0, 5), (5, 0), ()])
def test_vectors_and_small_matrices_are_sent_unencoded(shape):
    codec = PowerSgd(rank=2)
    gradients = [_normal(*shape, seed=seed) for seed in range(2)]
    length = math.prod(shape)
    states = [codec.begin(length) for _ in range(2)]
    out = _combined(codec, gradients, states)[1]
    assert torch.equal(out, gradients[0] + gradients[1])
    assert not states[0][RESIDUAL].any()
    context = CodecContext(shape=shape)
    values = gradients[0].flatten()
    back = torch.empty(length)
    codec.read(codec.write(values, {}, context), back, context)
    assert torch.equal(back, values)


def test_zeros_give_zeros_and_a_basis_for_the_next_step():
    codec = PowerSgd(rank=2)
    states = [codec.begin(600)]
    assert not _combined(codec, [torch.zeros(20, 30)], states)[0].any()
    assert not states[0][RESIDUAL].any()
    assert states[0][BASIS].abs().max(0).values.min() > 0
    gradient = _normal(20, 2) @ _normal(2, 30)
    assert _off(_combined(codec, [gradient], states, 1)[0], gradient) < 1e-5


def test_a_matrix_of_lower_rank_does_not_lose_directions_permanently():
    codec = PowerSgd(rank=3, feedback=False)
    states = [codec.begin(600)]
    row = torch.zeros(20, 30)
    row[4] = 1.0  # of rank one
    for step in range(4):
        out = _combined(codec, [row], states, step)[0]
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out, row, rtol=1e-5, atol=1e-6)
    full = _normal(20, 3) @ _normal(3, 30, seed=1)
    assert _off(_combined(codec, [full], states, 5)[0], full) < 1e-4


def test_overflow_does_not_spoil_the_basis():
    codec = PowerSgd(rank=2, feedback=False)
    states = [codec.begin(600)]
    too_large = torch.full((20, 30), 3e38)
    too_large[:, ::2] *= -1  # products with any basis overflow
    column = torch.zeros(20, 30)
    column[:, 0] = 1e38  # its norm overflows
    for gradient in (too_large, column):
        _combined(codec, [gradient], states)
        assert torch.isfinite(states[0][BASIS]).all()


@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-3, 1e30])
def test_columns_become_orthonormal_or_zero(scale):
    matrix = _normal(50, 4) * scale
    matrix[:, 2] = matrix[:, 0] * 2
    columns = _orthonormal(matrix).double()
    product = columns.T @ columns
    torch.testing.assert_close(
        product, torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)), rtol=0, atol=1e-6
    )


def test_single_worker_writes_both_matrices_and_keeps_the_residual():
    codec = PowerSgd(rank=2)
    context, state = CodecContext(shape=(40, 50)), codec.begin(2000)
    values = _normal(2000)
    payload = codec.encode(values, state, context)
    assert len(payload) == 4 * 2 * (40 + 50)
    out = torch.empty(2000)
    codec.read(payload, out, context)
    torch.testing.assert_close(out + state[RESIDUAL], values)
    codec.read(payload, out, context, add=True)
    torch.testing.assert_close(out / 2 + state[RESIDUAL], values)
    assert ((out / 2 - values).abs() <= codec.bound(values)).all()
    assert BASIS in state


def test_a_payload_of_another_length_is_refused():
    codec = PowerSgd(rank=2)
    context = CodecContext(shape=(40, 50))
    payload = codec.write(_normal(2000), {}, context)
    for wrong in (payload[:-1], payload[:0], torch.cat([payload, payload[:4]])):
        with pytest.raises(Corrupt):
            codec.read(wrong, torch.empty(2000), context)


def test_a_rank_below_one_is_refused():
    with pytest.raises(ConfigError, match="rank cannot be 0"):
        CODECS.build("power-sgd(0)")


def test_the_basis_begins_the_same_on_all_workers():
    codec = PowerSgd(rank=2)
    values = _normal(600)
    one = codec.first(values, codec.begin(600), CodecContext(rank=0, shape=(20, 30), seed=4))
    two = codec.first(values, codec.begin(600), CodecContext(rank=1, shape=(20, 30), seed=4))
    assert np.array_equal(one.numpy(), two.numpy())
