"""Sparse codecs for values of any length and size: bounded errors, and residuals that are kept."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.codec import positions
from echelon.codec.codec import CODECS, RESIDUAL, CodecContext
from echelon.codec.codecs.dgc import GATHERED
from echelon.codec.sparse import BLOCK, Source, largest
from echelon.errors import Corrupt

SPARSE = [
    "top-k(ratio=0.01)",
    "top-k(ratio=0.3, feedback=false)",
    "top-k(ratio=1)",
    "threshold(1e-3)",
    "threshold(0)",
    "dgc(ratio=0.01, momentum=0)",
    "dgc(ratio=0.1, warmup=4)",
]
EXACT = [*SPARSE, "none", "random-k(ratio=0.1)"]
LOSSY = [
    "random-k(ratio=0.1, feedback=false)",
    "sparse-binary(ratio=0.05)",
    "chain(top-k(ratio=0.1), fp16)",
    "chain(dgc(ratio=0.1, warmup=4), fp16)",
    "error-feedback(top-k(ratio=0.1, feedback=false))",
    "power-sgd(2)",
]
KEEPING = [
    "top-k(ratio=0.01)",
    "top-k(ratio=0.3)",
    "threshold(1e-3)",
    "sparse-binary(ratio=0.05)",
    "random-k(ratio=0.1)",
    "dgc(ratio=0.02, momentum=0)",
    "chain(top-k(ratio=0.1), fp16)",
    "error-feedback(top-k(ratio=0.1, feedback=false))",
]


def _made(length: int, kind: str, exponent: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(length)
    if kind == "zeros":
        values = 0 * values
    elif kind == "few":
        values *= rng.random(length) < 0.02
    elif kind == "equal":
        values = np.sign(values)
    elif kind == "heavy":
        values = values * 10.0 ** rng.integers(-6, 3, length)
    elif kind == "denormal":
        exponent = -43
    return torch.from_numpy((values * 10.0**exponent).astype(np.float32))


def tensors(longest: int = 3000) -> st.SearchStrategy[torch.Tensor]:
    return st.builds(
        _made,
        st.integers(0, longest),
        st.sampled_from(["normal", "zeros", "few", "equal", "heavy", "denormal"]),
        st.integers(-30, 30),
        st.integers(0, 2**32),
    )


contexts = st.builds(
    CodecContext,
    step=st.integers(0, 10),
    seed=st.integers(0, 2**32 - 1),
    start=st.integers(0, 10**6),
    rank=st.integers(0, 7),
)


def _shaped(context: CodecContext, length: int) -> CodecContext:
    """The context of a matrix if the length has a suitable divisor, otherwise of a vector."""
    rows = next((rows for rows in (16, 7, 5) if length and length % rows == 0), 0)
    shape = (rows, length // rows) if rows else (length,)
    return CodecContext(
        step=context.step, seed=context.seed, start=context.start, rank=context.rank, shape=shape
    )


@settings(max_examples=100, deadline=None)
@given(n=st.integers(0, 3000), data=st.data())
def test_reading_gives_the_written_positions(n, data):
    m = data.draw(st.integers(0, n))
    chosen = np.sort(np.random.default_rng(data.draw(st.integers(0, 99))).choice(n, m, replace=False))
    written = positions.write(chosen, n)
    assert len(written) == positions.size_bytes(n, m)
    assert np.array_equal(positions.read(written, n, m), chosen)


@settings(max_examples=100, deadline=None)
@given(n=st.integers(1, 3000), data=st.data())
def test_any_bytes_are_positions_or_are_refused(n, data):
    m = data.draw(st.integers(0, n))
    size = positions.size_bytes(n, m)
    noise = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, size, np.uint8)
    try:
        found = positions.read(noise, n, m)
    except Corrupt:
        return
    assert len(found) == m
    assert m == 0 or (found[0] >= 0 and found[-1] < n and (np.diff(found) > 0).all())


@settings(max_examples=60, deadline=None)
@given(values=tensors(), ratio=st.floats(0.001, 1), side=st.sampled_from([-1, 0, 1]))
def test_largest_agrees_with_sorting(values, ratio, side):
    count = int(len(values) * ratio)
    array = values.numpy()
    magnitude = np.abs(array) if side == 0 else np.maximum(side * array, 0)
    order = np.argsort(-magnitude, kind="stable")[:count]
    expected = np.sort(order[magnitude[order] > 0])
    assert np.array_equal(largest(Source(array), count, sample=0.01, side=side), expected)


@settings(max_examples=10, deadline=None)
@given(
    blocks=st.floats(0.5, 3),
    ratio=st.sampled_from([0.002, 0.01, 0.2]),
    kind=st.sampled_from(["normal", "few", "equal", "heavy"]),
    step=st.integers(0, 1000),
)
def test_largest_with_a_sample_agrees_with_largest_without(blocks, ratio, kind, step):
    array = _made(int(BLOCK * blocks), kind, 0, step).numpy()
    count = int(len(array) * ratio)
    by_sample = largest(Source(array), count, sample=0.01, step=step)
    assert np.array_equal(by_sample, largest(Source(array), count, sample=0))


@pytest.mark.parametrize("text", [*EXACT, *LOSSY])
@settings(max_examples=30, deadline=None)
@given(values=tensors(), context=contexts)
def test_error_is_within_the_bound_and_equals_the_residual(text, values, context):
    codec = CODECS.build(text)
    context = _shaped(context, len(values))
    before = values.clone()
    rest = torch.full_like(values, 3.0)
    payload = codec.write(values, {}, context, rest)
    assert torch.equal(values, before)
    out = torch.full_like(values, 7.0)
    codec.read(payload, out, context)
    error = (out.double() - values.double()).abs()
    assert (error <= codec.bound(values).double()).all()
    rounding = torch.maximum(values.abs(), out.abs()).double() * 2**-23 + 2e-45
    assert ((values.double() - rest.double() - out.double()).abs() <= rounding).all()
    if text in EXACT:
        assert torch.equal(values - rest, out)
        assert torch.equal(out[out != 0], values[out != 0])
    added = values.clone()
    codec.read(payload, added, context, add=True)
    assert torch.equal(added, values + out)
    assert torch.equal(codec.write(values, {}, context), payload)
    codec.write(values, {}, context, values)
    assert torch.equal(values, rest)


@pytest.mark.parametrize("text", KEEPING)
@settings(max_examples=25, deadline=None)
@given(length=st.integers(0, 500), exponent=st.integers(-30, 30), seed=st.integers(0, 999))
def test_results_plus_residuals_are_the_sum_of_the_inputs(text, length, exponent, seed):
    """Up to the rounding of a residual, a running float32 sum per element."""
    codec = CODECS.build(text)
    state, steps = codec.begin(length), 12
    kept = state[GATHERED if GATHERED in state else RESIDUAL]
    given_, read = torch.zeros(length, dtype=torch.float64), torch.zeros(length, dtype=torch.float64)
    size = torch.zeros(length, dtype=torch.float64)
    for step in range(steps):
        values = _made(length, "normal", exponent, seed + 1000 * step)
        out = torch.empty(length)
        codec.read(codec.encode(values, state, CodecContext(step=step)), out, CodecContext(step=step))
        given_ += values
        size += values.double().abs()
        read += out
    assert ((read + kept - given_).abs() <= size * steps * 2**-23).all()


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 400), ratio=st.floats(0.01, 1), seed=st.integers(0, 999))
def test_a_residual_is_the_running_sum_since_an_element_was_sent_last(length, ratio, seed):
    codec = CODECS.get("top-k")(ratio=ratio)
    state, running = codec.begin(length), torch.zeros(length)
    for step in range(6):
        values = _made(length, "heavy", 0, seed + 1000 * step)
        out = torch.empty(length)
        codec.read(codec.encode(values, state, CodecContext(step=step)), out, CodecContext(step=step))
        running += values
        assert torch.equal(out[out != 0], running[out != 0])
        running[out != 0] = 0
        assert torch.equal(state[RESIDUAL], running)


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 400),
    ratio=st.floats(0.01, 0.9),
    momentum=st.floats(0, 0.99),
    nesterov=st.booleans(),
    masking=st.booleans(),
    seed=st.integers(0, 999),
)
def test_dgc_follows_its_recurrences(length, ratio, momentum, nesterov, masking, seed):
    nesterov = nesterov and momentum > 0
    codec = CODECS.get("dgc")(ratio=ratio, momentum=momentum, nesterov=nesterov, masking=masking)
    state = codec.begin(length)
    u, v = np.zeros(length), np.zeros(length)
    for step in range(5):
        values = _made(length, "normal", 0, seed + 1000 * step)
        out = torch.empty(length)
        codec.read(codec.encode(values, state, CodecContext(step=step)), out, CodecContext(step=step))
        g = values.double().numpy()
        u = momentum * u + g
        v = v + (g + momentum * u if nesterov else u)
        sent = out.numpy() != 0
        np.testing.assert_allclose(out.numpy()[sent], v[sent], rtol=1e-4, atol=1e-5)
        assert np.abs(v[~sent]).max(initial=0) <= np.abs(v[sent]).min(initial=np.inf) + 1e-5
        v[sent] = 0
        if masking and sent.sum() < length:
            u[sent] = 0
        np.testing.assert_allclose(state[GATHERED].numpy(), v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["top-k(ratio=0.05)", "sparse-binary(ratio=0.05)", "dgc", "threshold(0.5)"]
)
@settings(max_examples=60, deadline=None)
@given(length=st.integers(0, 1000), seed=st.integers(0, 999), data=st.data())
def test_truncated_data_is_refused_and_damaged_data_stays_in_bounds(text, length, seed, data):
    codec = CODECS.build(text)
    payload = codec.write(_made(length, "normal", 0, seed), {}, CodecContext())
    with pytest.raises(Corrupt):
        codec.read(
            payload[: data.draw(st.integers(0, len(payload) - 1))], torch.empty(length), CodecContext()
        )
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Corrupt):
        codec.read(payload, torch.empty(length), CodecContext())
