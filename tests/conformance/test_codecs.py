"""Every registered codec against its contract: errors are bounded, residuals kept, workers agree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.codec.codec import CODECS, RESIDUAL, SATURATED, CodecContext, StandIn, Summed, owners, seed_of
from echelon.codec.reference import ReferenceGroup, part_of
from echelon.errors import Corrupt

NAMES = [name for name in CODECS.names() if not issubclass(CODECS.get(name), StandIn)]
# With default options, and with options that change the behaviour.
TEXTS = [
    *NAMES,
    "top-k(ratio=0.3)",
    "top-k(ratio=0.3, feedback=false)",
    "threshold(value=0.5)",
    "dgc(ratio=0.2, momentum=0.5, nesterov=true)",
    "dgc(ratio=0.2, momentum=0)",
    "random-k(ratio=0.3)",
    "random-k(ratio=0.3, feedback=false)",
    "power-sgd(rank=1)",
    "power-sgd(rank=1, feedback=false)",
    "sparse-binary(ratio=0.2)",
    "chain(first=top-k(ratio=0.3), then=fixed)",
    "chain(first=threshold(value=0.5), then=one-bit)",
    "fixed(bits=1)",
    "fixed(bits=2)",
    "fixed(bits=16)",
    "fixed(bits=5, range=1)",
    "fixed(bits=4, rounding=stochastic)",
    "ternary(clip=0)",
    "one-bit(per=column)",
    "dynamic-fixed(bits=4)",
    "error-feedback(fp16)",
    "error-feedback(fixed(bits=3))",
    "error-feedback(fixed(bits=3, range=1))",
]
every_codec = pytest.mark.parametrize("text", TEXTS)
TRAVELLING = [text for text in TEXTS if CODECS.build(text).travels != "sum"]
KEEPING = [text for text in TEXTS if CODECS.build(text).feedback]
quick = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

shapes = st.one_of(
    st.tuples(st.integers(1, 200)),
    st.tuples(st.integers(1, 12), st.integers(1, 40)),
    st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)),
)
kinds = st.sampled_from(["normal", "zeros", "equal", "tiny", "huge", "spike", "mixed"])


def values_of(kind, length, seed):
    """Finite gradients of many kinds."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(length, generator=draw)
    return {
        "normal": noise,
        "zeros": torch.zeros(length),
        "equal": torch.full((length,), 0.75),
        "tiny": noise * 1e-39,
        "huge": noise * 1e30,
        "spike": torch.where(torch.arange(length) == seed % length, 1e6, 1e-3 * noise),
        "mixed": noise * 10.0 ** torch.randint(-6, 6, (length,), generator=draw),
    }[kind]


@st.composite
def given_values(draw, kinds=kinds):
    """A shape, and values for it."""
    shape = draw(shapes)
    return shape, values_of(draw(kinds), math.prod(shape), draw(st.integers(0, 99)))


def test_every_codec_except_auto_and_between_is_tested():
    assert {CODECS.build(text).name for text in TEXTS} == set(NAMES)
    assert set(NAMES) < set(CODECS.names()), "auto and between are left out by their type"


# One worker's bytes ------------------------------------------------------------------------------


@every_codec
@given(given_values())
@quick
def test_error_is_within_the_bound_and_equals_the_residual(text, made):
    shape, values = made
    codec, context = CODECS.build(text), CodecContext(shape=shape, seed=7)
    kept = values.clone()
    state, rest = codec.begin(len(values)), torch.empty_like(values)
    payload = codec.write(values, state, context, rest)
    assert payload.dtype == torch.uint8
    assert payload.dim() == 1
    assert torch.equal(values, kept), "the values do not change"
    read = torch.full_like(values, torch.nan)
    codec.read(payload, read, context)
    assert read.isfinite().all()
    away = (read.double() - values.double()).abs()
    bound = codec.bound(values).double()
    assert (away <= bound * (1 + 1e-6) + 1e-44).all(), (away - bound).max()
    _assert_left(values, read, rest)


def _assert_left(values, read, rest):
    """Up to the rounding of one subtraction, relative to the largest of the three."""
    away = (values.double() - read.double() - rest.double()).abs()
    most = torch.stack([values.abs(), read.abs(), rest.abs()]).amax(0).double()
    assert (away <= most * 2.0**-22 + 1e-44).all()


@every_codec
@given(given_values(st.sampled_from(["normal", "spike", "mixed"])))
@quick
def test_reading_replaces_or_adds(text, made):
    shape, values = made
    codec, context = CODECS.build(text), CodecContext(shape=shape, seed=7)
    payload = codec.write(values, codec.begin(len(values)), context)
    read, added = torch.empty_like(values), torch.full_like(values, 2.0)
    codec.read(payload, read, context)
    codec.read(payload, added, context, add=True)
    torch.testing.assert_close(added, read + 2, rtol=1e-6, atol=0)


@every_codec
@given(made=given_values(st.just("normal")), data=st.data())
@quick
def test_data_of_the_wrong_length_is_refused(text, made, data):
    shape, values = made
    codec, context = CODECS.build(text), CodecContext(shape=shape, seed=7)
    payload = codec.write(values, codec.begin(len(values)), context)
    length = data.draw(st.integers(0, len(payload) + 5).filter(lambda n: n != len(payload)))
    damaged = torch.cat([payload, torch.zeros(5, dtype=torch.uint8)])[:length]
    with pytest.raises(Corrupt):
        codec.read(damaged, torch.empty_like(values), context)


@every_codec
def test_empty_piece_can_be_written_and_read(text):
    codec, context = CODECS.build(text), CodecContext(shape=(0,))
    values = torch.empty(0)
    payload = (
        codec.encode(values, codec.begin(0), context)
        if text in TRAVELLING
        else codec.write(values, {}, context)
    )
    codec.read(payload, torch.empty(0), context)
    codec.read(payload, torch.empty(0), context, add=True)
    assert codec.bound(values).shape == (0,)
    assert len(payload) <= 16


@every_codec
def test_data_may_begin_at_any_address(text):
    codec, context = CODECS.build(text), CodecContext(shape=(9, 33), seed=7)
    values = values_of("normal", 297, 3)
    payload = codec.write(values, codec.begin(297), context)
    wanted, found = torch.empty(297), torch.empty(297)
    codec.read(payload, wanted, context)
    for offset in range(1, 4):
        shifted = torch.cat([torch.zeros(offset, dtype=torch.uint8), payload])[offset:]
        codec.read(shifted, found, context)
        assert torch.equal(found, wanted)


# Several workers ---------------------------------------------------------------------------------

groups = st.tuples(st.integers(1, 4), st.lists(given_values(), min_size=1, max_size=3), st.integers(1, 4))


def gradients(shaped, workers, step):
    """Gradients of all workers: the same kinds, different numbers."""
    return [
        {
            f"p{at}": (values.roll(step + rank) * (1 + rank)).view(shape)
            for at, (shape, values) in enumerate(shaped)
        }
        for rank in range(workers)
    ]


@every_codec
@given(groups)
@quick
def test_all_workers_end_with_the_same_finite_bits(text, group):
    workers, shaped, steps = group
    reference = ReferenceGroup(CODECS.build(text), workers)
    for step in range(steps):
        first, *others = reference.outcomes(gradients(shaped, workers, step))
        for name, value in first.items():
            assert value.isfinite().all()
            assert all(torch.equal(value, other[name]) for other in others)


@every_codec
@given(groups)
@quick
def test_same_states_and_values_give_the_same_bits(text, group):
    workers, shaped, steps = group
    one, other = (ReferenceGroup(CODECS.build(text), workers) for _ in range(2))
    for step in range(steps):
        given_now = gradients(shaped, workers, step)
        first, second = one.combine(given_now), other.combine(given_now)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert one.sent_bytes == other.sent_bytes


def residuals(reference, name):
    """The sum of all workers' residuals, in float64."""
    keys = (RESIDUAL, "gathered")
    return sum(
        state[name][key].double() for state in reference.states for key in keys if key in state[name]
    )


@pytest.mark.parametrize("text", [text for text in KEEPING if not CODECS.build(text).momentum])
@given(
    workers=st.integers(1, 4),
    shaped=st.lists(
        given_values(st.sampled_from(["normal", "equal", "zeros", "spike"])), min_size=1, max_size=2
    ),
    steps=st.integers(1, 5),
)
@quick
def test_with_feedback_results_plus_residuals_are_the_sum_of_the_inputs(text, workers, shaped, steps):
    reference = ReferenceGroup(CODECS.build(text), workers)
    read = {f"p{at}": torch.zeros(shape, dtype=torch.float64) for at, (shape, _) in enumerate(shaped)}
    put_in = {name: value.clone() for name, value in read.items()}
    largest = dict.fromkeys(read, 0.0)
    for step in range(steps):
        given_now = gradients(shaped, workers, step)
        for name, value in reference.combine(given_now).items():
            read[name] += value.double()
            put_in[name] += sum(mine[name].double() for mine in given_now)
            largest[name] += sum(float(mine[name].abs().max()) for mine in given_now)
    for name in read:
        left = residuals(reference, name).view(read[name].shape)
        away = (read[name] + left - put_in[name]).abs().max()
        assert away <= 1e-5 * largest[name] * workers


@pytest.mark.parametrize("text", TRAVELLING)
@given(length=st.integers(1, 9000), workers=st.integers(1, 4), seed=st.integers(0, 99))
@quick
def test_pieces_by_owner_are_encoded_one_by_one_in_views_of_one_state(text, length, workers, seed):
    """As between machines, a parameter is split and each piece has its start in the context."""
    codec = CODECS.build(text)
    name = f"p{seed}"
    state, values = codec.begin(length), values_of("normal", length, seed)
    out = torch.empty(length)
    for start, stop in owners(length, workers, seed_of(name)):
        context = CodecContext(seed=seed_of(name), start=start, shape=(length,), workers=workers)
        piece = part_of(state, length, start, stop)
        payload = codec.encode(values[start:stop], piece, context)
        codec.read(payload, out[start:stop], replace(context, rank=workers - 1))
    assert out.isfinite().all()
    if codec.feedback and not codec.momentum:
        kept = state[RESIDUAL] if RESIDUAL in state else state["gathered"]
        _assert_left(values, out, kept)


@pytest.mark.parametrize("text", [text for text in TEXTS if isinstance(CODECS.build(text), Summed)])
@given(groups)
@quick
def test_summed_codecs_keep_only_state_that_a_checkpoint_needs(text, group):
    workers, shaped, steps = group
    reference = ReferenceGroup(CODECS.build(text), workers)
    for step in range(steps):
        reference.combine(gradients(shaped, workers, step))
    for states in reference.states:
        for state in states.values():
            assert state.keys() <= {RESIDUAL, "basis"}


@every_codec
@given(groups)
@quick
def test_states_keep_their_keys_types_and_shapes(text, group):
    """So they can be saved, loaded and passed on."""
    workers, shaped, steps = group
    codec = CODECS.build(text)
    reference = ReferenceGroup(codec, workers)
    for step in range(steps):
        reference.combine(gradients(shaped, workers, step))
    for at, (_, values) in enumerate(shaped):
        fresh = codec.begin(len(values))
        for states in reference.states:
            state = states[f"p{at}"]
            for key, value in fresh.items():
                assert (state[key].dtype, state[key].shape) == (value.dtype, value.shape)
            if SATURATED in state:
                assert state[SATURATED].dtype == torch.int64
                assert int(state[SATURATED]) >= 0
            for key in (RESIDUAL, "gathered", "velocity"):
                if key in state:
                    assert state[key].shape == (len(values),)
                    assert state[key].dtype == torch.float32


def test_codecs_reach_their_stated_sizes():
    """In bits per element, for 100,000 normal numbers."""
    values, shape = values_of("normal", 100_000, 1), (200, 500)
    bits = {
        "none": 32,
        "fp16": 16,
        "bf16": 16,
        "fixed(bits=8)": 8,
        "fixed(bits=2)": 1.6,
        "ternary": 1.6,
        "one-bit": 1,
        "dynamic-fixed(bits=12)": 12,
        "top-k(ratio=0.01)": 0.42,
        "random-k(ratio=0.01)": 0.32,
        "sparse-binary(ratio=0.01)": 0.086,
        "power-sgd(rank=2)": 32 * 2 * 700 / 100_000,
    }
    for text, wanted in bits.items():
        codec = CODECS.build(text)
        payload = codec.write(values, codec.begin(len(values)), CodecContext(shape=shape))
        assert 8 * len(payload) / len(values) == pytest.approx(wanted, rel=0.12), text
