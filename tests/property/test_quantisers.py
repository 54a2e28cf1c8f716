"""The contract of quantising codecs for any finite values: bound, residual, totals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.codec.codec import CODECS, RESIDUAL, Codec, CodecContext
from echelon.errors import Corrupt

NAMES = [
    "fp16",
    "bf16",
    "fixed",
    "fixed(bits=1)",
    "fixed(bits=2, rounding=stochastic)",
    "fixed(bits=5, rounding=stochastic)",
    "fixed(bits=16, rounding=stochastic)",
    "fixed(bits=1, rounding=stochastic)",
    "fixed(bits=16)",
    "fixed(range=0.5)",
    "fixed(bits=1, range=0.5)",
    "fixed(bits=11, range=3e-8, rounding=stochastic)",
    "dynamic-fixed",
    "dynamic-fixed(bits=2, feedback=false)",
    "one-bit",
    "one-bit(per=column)",
    "ternary",
    "ternary(clip=0, feedback=true)",
]
POWER_OF_TWO = "bits=1, range=0.5"  # its step is one
SHARED_SCALE = [
    "fixed(range=0.5)",
    f"fixed({POWER_OF_TWO})",
    "fixed(bits=2, range=1e-3)",
    "fixed(bits=16, range=2)",
    "dynamic-fixed",
    "dynamic-fixed(bits=2, feedback=false)",
]
every_codec = pytest.mark.parametrize("name", NAMES)
modest = settings(max_examples=16, deadline=None)


@st.composite
def values(draw: st.DrawFn, top: float = 38.4) -> torch.Tensor:
    """Flat float32 tensors of kinds that tend to break rounding."""
    length = draw(st.one_of(st.integers(0, 9), st.integers(0, 3000)))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "zeros", "equal", "denormal", "mixture", "sparse", "uniform"]))
    scale = 10.0 ** draw(st.one_of(st.floats(-45, top), st.floats(-6, 1)))
    x = random.standard_normal(length)
    if kind == "zeros":
        x = np.zeros(length)
    elif kind == "equal":
        x = np.full(length, draw(st.sampled_from([-1.0, 1.0])))
    elif kind == "denormal":
        x, scale = random.integers(-5, 6, length), 2.0**-149
    elif kind == "mixture":
        x = x * 10.0 ** random.uniform(-30, 0, length)
    elif kind == "sparse":
        x = x * (random.random(length) < 0.01)
    elif kind == "uniform":
        x = random.uniform(-1, 1, length)
    most = np.finfo(np.float32).max if top > 38 else 10.0**top
    return torch.from_numpy(np.clip(x * scale, -most, most).astype(np.float32))


@st.composite
def contexts(draw: st.DrawFn) -> CodecContext:
    """A piece somewhere in a parameter whose rows are longer or shorter than the piece."""
    width = draw(st.sampled_from([1, 30, 64, 65, 100, 1000]))
    return CodecContext(
        step=draw(st.integers(0, 5)),
        seed=draw(st.integers(0, 9)),
        start=draw(st.integers(0, 300)),
        shape=(50, width),
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b)


def once(codec: Codec, x: torch.Tensor, context: CodecContext) -> tuple[torch.Tensor, torch.Tensor]:
    """The payload of some values, and the values read from it."""
    payload = codec.encode(x, codec.begin(len(x)), context)
    out = torch.full_like(x, float("nan"))
    codec.read(payload, out, context)
    return payload, out


@every_codec
@given(values(), contexts())
@modest
def test_the_error_is_within_the_bound(name, x, context):
    codec = CODECS.build(name)
    before = x.clone()
    _, out = once(codec, x, context)
    bound = codec.bound(x)
    assert bound.shape == x.shape
    assert same(x, before)
    assert bool(((out.double() - x.double()).abs() <= bound.double()).all())


@every_codec
@given(values(), contexts())
@modest
def test_residual_equals_the_error(name, x, context):
    codec = CODECS.build(name)
    rest = torch.full_like(x, float("nan"))
    out = torch.empty_like(x)
    payload = codec.write(x, codec.begin(len(x)), context, rest)
    codec.read(payload, out, context)
    assert same(rest, x - out)

    in_place = x.clone()
    assert same(codec.write(in_place, codec.begin(len(x)), context, in_place), payload)
    assert same(in_place, rest)


@every_codec
@given(values(top=36), contexts())
@modest
def test_reading_with_add_adds_to_the_output(name, x, context):
    codec = CODECS.build(name)
    payload, out = once(codec, x, context)
    there = torch.linspace(-1, 1, len(x)) * (float(x.abs().max()) if len(x) else 1.0)
    added = there.clone()
    codec.read(payload, added, context, add=True)
    assert same(added, there + out)


@every_codec
@given(values(), contexts(), st.data())
@modest
def test_data_of_the_wrong_length_is_refused(name, x, context, data):
    codec = CODECS.build(name)
    payload, out = once(codec, x, context)
    if len(payload):
        fewer = data.draw(st.integers(0, len(payload) - 1))
        with pytest.raises(Corrupt):
            codec.read(payload[:fewer], out, context)
    with pytest.raises(Corrupt):
        codec.read(torch.cat([payload, payload.new_zeros(1)]), out, context)


@every_codec
@given(values(), contexts())
@settings(max_examples=10, deadline=None)
def test_data_at_any_address_can_be_read(name, x, context):
    codec = CODECS.build(name)
    payload, out = once(codec, x, context)
    elsewhere = torch.cat([payload.new_zeros(1), payload])[1:]
    again = torch.empty_like(x)
    codec.read(elsewhere, again, context)
    assert same(again, out)


@pytest.mark.parametrize("name", [name for name in NAMES if "range" not in name and "dynamic" not in name])
@given(st.lists(values(top=36), min_size=1, max_size=4), contexts())
@modest
def test_the_error_of_a_total_is_within_the_bound(name, given_values, context):
    codec = CODECS.build(name)
    total, reads = merged(codec, of_one_length(given_values), context)
    assert all(same(read, reads[0]) for read in reads)
    assert bool(((reads[0].double() - total.double()).abs() <= codec.bound(total).double()).all())


def of_one_length(given_values: list[torch.Tensor]) -> list[torch.Tensor]:
    length = min(len(x) for x in given_values)
    return [x[:length].clone() for x in given_values]


def merged(
    codec: Codec, given_values: list[torch.Tensor], context: CodecContext
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The total of the piece, owned by worker 0, and the values that each worker reads."""
    workers, length = len(given_values), len(given_values[0])

    def of(rank: int) -> CodecContext:
        return CodecContext(
            step=context.step,
            workers=workers,
            rank=rank,
            seed=context.seed,
            start=context.start,
            shape=context.shape,
        )

    states = [codec.begin(length) for _ in given_values]
    parts = [codec.encode(x, states[r], of(r)) for r, x in enumerate(given_values) if r > 0]
    total = given_values[0].clone()
    for part in parts:
        codec.read(part, total, of(0), add=True)
    payload = codec.merge(parts, given_values[0], states[0], of(0))
    reads = []
    for rank, state in enumerate(states):
        out = torch.empty(length)
        codec.read_total(payload, out, state, of(rank))
        codec.settle(state, of(rank))
        reads.append(out)
    return total, reads


@pytest.mark.parametrize("name", SHARED_SCALE)
@given(st.lists(values(top=2), min_size=1, max_size=4), contexts())
@modest
def test_numbers_on_a_shared_scale_add_up_exactly(name, given_values, context):
    codec = CODECS.build(name)
    given_values = of_one_length(given_values)
    _, reads = merged(codec, given_values, context)
    assert all(same(read, reads[0]) for read in reads)
    each = [once(codec, x, context)[1].double() for x in given_values]
    exact = torch.stack(each).sum(0)
    if POWER_OF_TWO in name or "dynamic" in name:
        assert same(reads[0].double(), exact)
    else:  # each value read alone is rounded to float32
        assert bool(((reads[0] - exact).abs() <= 2.0**-22 * torch.stack(each).abs().sum(0)).all())


@pytest.mark.parametrize("name", [name for name in NAMES if CODECS.build(name).feedback])
@given(values(top=30), st.integers(1, 3), contexts())
@settings(max_examples=15, deadline=None)
def test_results_plus_residuals_equal_the_inputs_over_many_steps_with_feedback(name, x, workers, context):
    codec = CODECS.build(name)
    states = [codec.begin(len(x)) for _ in range(workers)]
    given_sum = torch.zeros(len(x), dtype=torch.float64)
    read_sum = torch.zeros(len(x), dtype=torch.float64)
    moved = torch.zeros(len(x), dtype=torch.float64)  # magnitudes added or subtracted as float32
    for step in range(6):
        mine = [x.roll(step + 7 * rank) * (1 - 0.1 * step) for rank in range(workers)]
        of = [
            CodecContext(
                step=step,
                workers=workers,
                rank=r,
                seed=context.seed,
                start=context.start,
                shape=context.shape,
            )
            for r in range(workers)
        ]
        parts = [codec.encode(mine[r], states[r], of[r]) for r in range(1, workers)]
        payload = codec.merge(parts, mine[0], states[0], of[0])
        out = torch.empty_like(x)
        for state, its in zip(states, of, strict=True):
            codec.read_total(payload, out, state, its)
            codec.settle(state, its)
        given_sum += sum(m.double() for m in mine)
        read_sum += out
        moved += out.abs() + sum(m.abs() for m in mine) + sum(s[RESIDUAL].abs() for s in states)
    kept = sum(state[RESIDUAL].double() for state in states)
    # Each part may be far larger than the total, so the largest of all bounds the rounding.
    most = float(moved.max()) if len(x) else 0.0
    assert bool(((read_sum + kept - given_sum).abs() <= 1e-5 * most + 1e-43).all())
