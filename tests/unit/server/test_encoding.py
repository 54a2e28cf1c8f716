"""What a codec leaves out is sent later, and the server knows exactly which weights a worker has."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.codec.codec import CODECS, CodecContext
from echelon.codec.codecs.one_bit import OneBit
from echelon.codec.fitting import served_codec
from echelon.errors import ConfigError, Corrupt
from echelon.server import encoding
from echelon.server.layout import cut_pieces, split
from echelon.sync.families.shard import ShardState
from echelon.sync.policy import POLICIES

CODES = (
    "fp16",
    "bf16",
    "fixed(bits=8)",
    "fixed(bits=1)",
    'fixed(bits=2, rounding="stochastic")',
    "fixed(bits=8, range=4.0)",
    "dynamic-fixed",
    "one-bit",
    "one-bit(per=column)",
    "ternary",
    "error-feedback(ternary(clip=0))",
    "threshold(value=0.5)",
    "threshold(value=1e6)",
    "top-k(ratio=0.05)",
    "sparse-binary(ratio=0.05)",
    "dgc(ratio=0.05, momentum=0)",
    "chain(top-k(ratio=0.1), one-bit)",
    "chain(threshold(value=1e6), fp16)",
    "chain(dgc(ratio=0.1), ternary)",
)
WITH_RESIDUALS = (
    "dynamic-fixed(bits=8)",
    "one-bit",
    "error-feedback(fp16)",
    "threshold(value=0.5)",
    "top-k(ratio=0.05)",
    "sparse-binary(ratio=0.05)",
    "dgc(ratio=0.05, momentum=0)",
    "chain(top-k(ratio=0.1), one-bit)",
)
SHAPES = ((40_000,), (7, 5), (), (3,), (0,))  # the first one is split between two servers
ALL_ABSENT = range(len(SHAPES))


class Wire:
    """A worker's encoder, and the reading of its pushes by servers."""

    def __init__(self, codec, *, servers=1, worker=1, shapes=SHAPES):
        made = encoding.open_codec(codec, torch.float32, 0, shapes)
        assert made is not None
        self.codec = made
        self.worker = worker
        lengths = [torch.Size(shape).numel() for shape in shapes]
        self.shards = split(lengths, servers, item_bytes=4)
        self.pieces = cut_pieces(self.shards, item_bytes=4, piece_bytes=1 << 16)
        self.out = encoding.PushEncoder(self.codec, self.pieces, worker)
        self.sent_bytes = 0

    def gradients(self, seed, scale=1.0):
        draw = torch.Generator().manual_seed(seed)
        return [torch.randn(shard.length, generator=draw) * scale for shard in self.shards]

    def write(self, flats, absent=(), *, early=False):
        written = [
            self.out.write(number, flats[piece.shard], absent, early=early)
            for number, piece in enumerate(self.pieces)
        ]
        self.sent_bytes += sum(map(len, written))
        return written

    def read(self, written):
        flats = [torch.full((shard.length,), torch.nan) for shard in self.shards]
        for piece, data in zip(self.pieces, written, strict=True):
            payload = memoryview(bytearray(data.numpy().tobytes()))
            encoding.read_push(self.codec, payload, piece, flats[piece.shard], self.worker, "rank 1")
        return flats

    def push(self, flats, absent=()):
        written = self.write(flats, absent)
        self.out.finish()
        return self.read(written)

    def residuals(self):
        """The residuals, in the shards' order."""
        saved = self.out.save()
        flats = []
        for shard in self.shards:
            parts = []
            for part in shard.parts:
                state = saved.get(self.codec.name(part.parameter), {})
                kept = state.get("residual", state.get("gathered", torch.zeros(part.stop)))
                parts.append(kept[part.start : part.stop])
            flats.append(torch.cat(parts))
        return flats


def same(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# Pushes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", WITH_RESIDUALS)
@pytest.mark.parametrize("servers", [1, 2])
def test_decoded_pushes_plus_residuals_equal_the_pushed_gradients(codec, servers):
    wire = Wire(codec, servers=servers)
    given_in_all = [torch.zeros(shard.length, dtype=torch.float64) for shard in wire.shards]
    read_in_all = [torch.zeros(shard.length, dtype=torch.float64) for shard in wire.shards]
    for step in range(6):
        gradients = wire.gradients(step)
        read = wire.push(gradients)
        for flat, more in zip(given_in_all, gradients, strict=True):
            flat += more
        for flat, more in zip(read_in_all, read, strict=True):
            flat += more
    for given_flat, read_flat, residuals in zip(given_in_all, read_in_all, wire.residuals(), strict=True):
        torch.testing.assert_close(read_flat + residuals.double(), given_flat, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", CODES)
def test_early_pieces_that_are_taken_back_leave_no_trace(codec):
    plain, hasty = Wire(codec, servers=2), Wire(codec, servers=2)
    for step in range(3):
        final = plain.gradients(step)
        hasty.write(hasty.gradients(100 + step), early=True)
        hasty.out.take_back()
        if step:  # also if only some had been written
            hasty.out.write(0, hasty.gradients(200)[hasty.pieces[0].shard], (), early=True)
            hasty.out.take_back()
        assert same(plain.write(final), hasty.write(final))
        plain.out.finish()
        hasty.out.finish()
    one, other = plain.out.save(), hasty.out.save()
    assert one.keys() == other.keys()
    assert all(same(one[name].values(), other[name].values()) for name in one)


def test_saved_states_ignore_pieces_that_were_written_early():
    wire = Wire("top-k")
    wire.push(wire.gradients(0))
    before = wire.out.save()
    wire.write(wire.gradients(1), early=True)
    after = wire.out.save()
    assert all(same(before[name].values(), after[name].values()) for name in before)


@pytest.mark.parametrize(
    "codec", ["top-k(ratio=0.05)", 'fixed(bits=2, rounding="stochastic")', "dynamic-fixed"]
)
def test_a_worker_with_loaded_states_writes_the_same_bytes(codec):
    one, other = Wire(codec), Wire(codec)
    for step in range(3):
        one.push(one.gradients(step))
    other.out.load(one.out.save())
    assert same(one.write(one.gradients(9)), other.write(other.gradients(9)))


def test_random_rounding_differs_between_pushes():
    wire = Wire("ternary")
    assert not same(wire.push(wire.gradients(0)), wire.push(wire.gradients(0)))


def test_states_of_another_table_are_not_loaded():
    wire = Wire("top-k")
    assert wire.out.load({"1/0": {"residual": torch.ones(3)}}) == 0
    assert wire.out.save() == {}


@pytest.mark.parametrize("codec", ["top-k(ratio=0.05)", "dynamic-fixed", "ternary"])
def test_states_of_parameters_of_other_shapes_are_counted_and_not_loaded(codec):
    """Even with the same number of elements, or with one element; a scalar's state is loaded."""
    one = Wire(codec, shapes=((40,), (5, 4), (1,), ()))
    other = Wire(codec, shapes=((40,), (4, 5), (), ()))
    one.push(one.gradients(0))
    saved = one.out.save()
    assert other.out.load(saved) == 2
    taken = other.out.save()
    assert taken.keys() == {"0/0", "0/3"}
    assert all(same(taken[name].values(), saved[name].values()) for name in taken)


class Following(OneBit):
    """A user's codec that adapts to the totals."""

    settled: ClassVar[list[CodecContext]] = []

    def settle(self, state, context):
        self.settled.append(context)


def test_a_codec_that_adapts_to_totals_is_told_when_a_push_ends():
    wire = Wire("one-bit", shapes=((40,), (5, 4)))
    codec = encoding.TableCodec(push=Following(), pull=OneBit(), table=0, shapes=wire.codec.shapes)
    out = encoding.PushEncoder(codec, wire.pieces, 1)
    Following.settled.clear()
    for step in range(2):
        out.write(0, wire.gradients(step)[0], ())
        out.finish()
    assert [(context.step, context.shape) for context in Following.settled] == [
        (0, (40,)), (0, (5, 4)), (1, (40,)), (1, (5, 4)),
    ]  # fmt: skip


def test_a_parameter_without_a_gradient_is_read_as_zeros_and_keeps_its_residual():
    wire = Wire("top-k(ratio=0.01)")
    wire.push(wire.gradients(0))
    residuals = wire.residuals()
    read = wire.push(wire.gradients(1), absent=ALL_ABSENT)
    assert not any(flat.any() for flat in read)
    assert same(wire.residuals(), residuals)
    assert wire.sent_bytes > 0


@pytest.mark.parametrize(("codec", "smaller"), [("fp16", 1.99), ("one-bit", 30), ("top-k(ratio=0.01)", 60)])
def test_coded_pushes_are_smaller_headers_included(codec, smaller):
    wire = Wire(codec, shapes=((200_000,), (1000,)))
    wire.push(wire.gradients(0))
    assert wire.sent_bytes * smaller < 4 * 201_000


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("codec", ["dynamic-fixed", "error-feedback(dynamic-fixed(feedback=false))"])
def test_an_adaptive_scale_follows_this_workers_gradients(codec, scale):
    wire = Wire(codec)
    for step in range(4):
        gradients = wire.gradients(step, scale)
        wire.push(gradients)
    assert 0 < float(wire.residuals()[0].norm()) < 0.01 * float(gradients[0].norm())


def test_a_damaged_piece_is_refused_and_its_sender_named():
    wire = Wire("top-k(ratio=0.05)", shapes=((100,), (3,)))
    (data,) = wire.write(wire.gradients(0))
    raw = data.numpy().tobytes()
    damaged = (b"", raw[:20], raw[:-1], raw + bytes(8), raw[:8] + b"\xff" * 7 + b"\x7f" + raw[16:])
    flat = torch.zeros(103)
    for bad in (*damaged, raw[:24] + b"\xff" * 8 + raw[32:]):
        with pytest.raises(Corrupt, match="rank 1 sent a coded piece"):
            encoding.read_push(wire.codec, memoryview(bytearray(bad)), wire.pieces[0], flat, 1, "rank 1")


@pytest.mark.parametrize("values", [[], [0.0], [3e38, -3e38]])
def test_numbers_are_finite(values):
    assert encoding.is_finite(torch.tensor(values))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_is_found_anywhere(value):
    for place in (0, 50, 99):
        values = torch.ones(100)
        values[place] = value
        assert not encoding.is_finite(values)


# Pulls -------------------------------------------------------------------------------------------


def send_change(wire, shadows, weights, had, version):
    """Send a change to a worker and add it to the weights that it has."""
    for piece in reversed(wire.pieces):
        change = shadows.change(wire.worker, piece, weights, version)
        assert change is not None
        payload = memoryview(bytearray(change.numpy().tobytes()))
        encoding.add_change(wire.codec, payload, piece, had, wire.worker, "the server")


@pytest.mark.parametrize("codec", CODES)
def test_shadow_equals_the_workers_weights_and_each_pull_reduces_the_error(codec):
    wire = Wire(codec)
    seed = wire.gradients(0)[0]
    shadows = encoding.Shadows(wire.codec, torch.zeros_like(seed), 3)
    shadows.begin(seed)
    had, weights = seed.clone(), seed + 0.9 * wire.gradients(1)[0]
    far = [float((weights - had).norm())]
    for version in range(20):
        send_change(wire, shadows, weights, had, version)
        assert torch.equal(had, shadows.of(wire.worker))
        far.append(float((weights - had).norm()))
    assert all(now <= before * (1 + 1e-6) for before, now in pairwise(far)), far
    assert far[-1] < 0.6 * far[0]
    assert torch.equal(shadows.of(0), seed), "other workers' shadows do not change"


@pytest.mark.parametrize("codec", ["ternary", "one-bit", "top-k(ratio=0.05)", "fixed(bits=1)"])
def test_a_worker_does_not_fall_behind_while_weights_change(codec):
    wire = Wire(codec, shapes=((2000,),))
    weights = torch.zeros(2000)
    shadows, had = encoding.Shadows(wire.codec, weights, 3), weights.clone()
    far = []
    for version in range(150):
        weights = weights + wire.gradients(version)[0]
        send_change(wire, shadows, weights, had, version)
        far.append(float((weights - had).norm()))
    assert max(far[100:]) < 1.5 * max(far[50:100])


def test_weights_that_are_not_finite_are_not_coded_and_the_shadow_takes_them():
    wire = Wire("one-bit", shapes=((50,),))
    weights = torch.zeros(50)
    shadows = encoding.Shadows(wire.codec, weights, 2)
    weights[7] = torch.inf
    assert shadows.change(1, wire.pieces[0], weights, 1) is None
    assert torch.equal(shadows.of(1), weights)
    weights[7] = 1.0
    assert shadows.change(1, wire.pieces[0], weights, 2) is None, "the shadow still has an infinite value"
    assert shadows.change(1, wire.pieces[0], weights, 3) is not None


@given(
    codec=st.sampled_from(CODES),
    seed=st.integers(0, 1000),
    scale=st.floats(-20, 20).map(lambda power: 10.0**power),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_worker_and_server_agree_for_any_sizes_and_scales(codec, seed, scale, lengths):
    wire = Wire(codec, shapes=tuple((length,) for length in lengths))
    if not sum(lengths):
        return
    read = wire.push(wire.gradients(seed, scale))
    assert all(bool(torch.isfinite(flat).all()) for flat in read)
    weights = torch.zeros(sum(lengths))
    shadows, had = encoding.Shadows(wire.codec, weights, 2), weights.clone()
    for version in range(3):
        send_change(wire, shadows, wire.gradients(seed + version, scale)[0], had, version)
        assert torch.equal(had, shadows.of(1))


# Memory ------------------------------------------------------------------------------------------


class Taken(list):
    """A list that another thread empties just before `pop`."""

    def pop(self, *args):
        self.clear()
        return super().pop(*args)


def test_memory_is_allocated_if_another_thread_takes_the_spare_one():
    flat = torch.zeros(3)
    shard = ShardState(POLICIES.build("async"), flat, [flat], lambda: None, spare=1)
    shard._free = Taken([torch.zeros(3)])
    assert shard.push_memory().shape == flat.shape


# Which codec -------------------------------------------------------------------------------------

PULL_CODECS = {
    "fp16": "fp16",
    "one-bit(per=column)": "one-bit(per=column)",
    "threshold(value=0.5)": "top-k(ratio=0.05)",
    "chain(threshold(value=0.5), fp16)": "chain(top-k(ratio=0.05), fp16)",
    "top-k(ratio=0.05, feedback=false)": "top-k(ratio=0.05, feedback=false)",
    "sparse-binary(ratio=0.05)": "sparse-binary(ratio=0.05)",
    "dgc(ratio=0.05)": "top-k(ratio=0.05)",
    "dynamic-fixed(bits=5)": "fixed(bits=5)",
    "fixed(bits=6, range=2.0)": "fixed(bits=6)",
    'fixed(bits=6, rounding="stochastic")': "fixed(bits=6)",
    "fixed(bits=1)": "one-bit",
    "ternary": "fixed(bits=2)",
    "error-feedback(ternary)": "fixed(bits=2)",
    "error-feedback(bf16)": "bf16",
    "chain(dgc(ratio=0.05), ternary)": "chain(top-k(ratio=0.05), fixed(bits=2))",
}


@pytest.mark.parametrize("codec", PULL_CODECS)
def test_pulls_use_a_codec_without_randomness_and_momentum(codec):
    found, expected = encoding.pull_codec(CODECS.build(codec)), CODECS.build(PULL_CODECS[codec])
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    context = CodecContext(shape=(500,))
    assert type(found) is type(expected)
    assert torch.equal(found.write(values, {}, context), expected.write(values, {}, context))


@pytest.mark.parametrize("codec", ["power-sgd", "random-k", "auto", "between(one-bit)"])
def test_codecs_that_a_server_cannot_use_are_refused_and_another_is_named(codec):
    with pytest.raises(ConfigError) as caught:
        served_codec(codec)
    assert codec.partition("(")[0] in caught.value.message
    assert "top-k" in caught.value.fix


def test_an_unknown_codec_is_refused_and_the_nearest_is_named():
    with pytest.raises(ConfigError, match="unknown codec 'topk'"):
        served_codec("topk(ratio=0.1)")


@pytest.mark.parametrize(("codec", "dtype"), [("none", torch.float32), ("fp16", torch.float64)])
def test_nothing_is_coded_without_a_codec_or_for_another_dtype(codec, dtype):
    assert encoding.open_codec(codec, dtype, 0, SHAPES) is None
