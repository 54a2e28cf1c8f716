"""Between a worker and a server nothing that a codec leaves out is lost, and both know the same."""

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
from echelon.server import encoding as coding
from echelon.server import shards
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
OWING = (
    "dynamic-fixed(bits=8)",
    "one-bit",
    "error-feedback(fp16)",
    "threshold(value=0.5)",
    "top-k(ratio=0.05)",
    "sparse-binary(ratio=0.05)",
    "dgc(ratio=0.05, momentum=0)",
    "chain(top-k(ratio=0.1), one-bit)",
)
SHAPES = ((40_000,), (7, 5), (), (3,), (0,))  # the first one is cut if there are two servers
ALL_ABSENT = range(len(SHAPES))


class Wire:
    """A worker, the servers' layout, and what the servers read."""

    def __init__(self, codec, *, servers=1, worker=1, shapes=SHAPES):
        made = coding.open_codec(codec, torch.float32, 0, shapes)
        assert made is not None
        self.coding = made
        self.worker = worker
        lengths = [torch.Size(shape).numel() for shape in shapes]
        self.shards = shards.shard(lengths, servers, item_bytes=4)
        self.pieces = shards.pieces(self.shards, item_bytes=4, piece_bytes=1 << 16)
        self.out = coding.PushEncoder(self.coding, self.pieces, worker)
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
            coding.read_push(self.coding, payload, piece, flats[piece.shard], self.worker, "rank 1")
        return flats

    def push(self, flats, absent=()):
        written = self.write(flats, absent)
        self.out.finish()
        return self.read(written)

    def residuals(self):
        """What is kept back, in the shards' order."""
        saved = self.out.save()
        flats = []
        for shard in self.shards:
            parts = []
            for part in shard.parts:
                state = saved.get(self.coding.name(part.parameter), {})
                kept = state.get("residual", state.get("gathered", torch.zeros(part.stop)))
                parts.append(kept[part.start : part.stop])
            flats.append(torch.cat(parts))
        return flats


def same(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


# Up ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", OWING)
@pytest.mark.parametrize("servers", [1, 2])
def test_all_that_servers_have_read_and_what_is_owed_is_what_was_given(codec, servers):
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
def test_what_was_written_too_early_and_taken_back_leaves_no_trace(codec):
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


def test_what_is_saved_is_as_if_nothing_had_been_written_early():
    wire = Wire("top-k")
    wire.push(wire.gradients(0))
    before = wire.out.save()
    wire.write(wire.gradients(1), early=True)
    after = wire.out.save()
    assert all(same(before[name].values(), after[name].values()) for name in before)


@pytest.mark.parametrize(
    "codec", ["top-k(ratio=0.05)", 'fixed(bits=2, rounding="stochastic")', "dynamic-fixed"]
)
def test_a_worker_that_is_given_its_saved_state_goes_on_as_it_would_have(codec):
    one, other = Wire(codec), Wire(codec)
    for step in range(3):
        one.push(one.gradients(step))
    other.out.load(one.out.save())
    assert same(one.write(one.gradients(9)), other.write(other.gradients(9)))


def test_lots_are_drawn_anew_in_every_round():
    wire = Wire("ternary")
    assert not same(wire.push(wire.gradients(0)), wire.push(wire.gradients(0)))


def test_states_of_another_table_are_not_taken_over():
    wire = Wire("top-k")
    assert wire.out.load({"1/0": {"residual": torch.ones(3)}}) == 0
    assert wire.out.save() == {}


@pytest.mark.parametrize("codec", ["top-k(ratio=0.05)", "dynamic-fixed", "ternary"])
def test_states_of_parameters_of_other_shapes_are_not_taken_over_and_counted(codec):
    """Also of one that has as many elements, or one; and a scalar keeps its own."""
    one = Wire(codec, shapes=((40,), (5, 4), (1,), ()))
    other = Wire(codec, shapes=((40,), (4, 5), (), ()))
    one.push(one.gradients(0))
    saved = one.out.save()
    assert other.out.load(saved) == 2
    taken = other.out.save()
    assert taken.keys() == {"0/0", "0/3"}
    assert all(same(taken[name].values(), saved[name].values()) for name in taken)


class Following(OneBit):
    """Somebody's codec that follows the totals."""

    settled: ClassVar[list[CodecContext]] = []

    def settle(self, state, turn):
        self.settled.append(turn)


def test_any_codec_that_follows_totals_is_told_when_a_round_is_over():
    wire = Wire("one-bit", shapes=((40,), (5, 4)))
    ways = coding.TableCodec(up=Following(), down=OneBit(), table=0, shapes=wire.coding.shapes)
    out = coding.PushEncoder(ways, wire.pieces, 1)
    Following.settled.clear()
    for step in range(2):
        out.write(0, wire.gradients(step)[0], ())
        out.finish()
    assert [(turn.step, turn.shape) for turn in Following.settled] == [
        (0, (40,)), (0, (5, 4)), (1, (40,)), (1, (5, 4)),
    ]  # fmt: skip


def test_a_parameter_without_a_gradient_is_read_as_zeros_and_owes_what_it_did():
    wire = Wire("top-k(ratio=0.01)")
    wire.push(wire.gradients(0))
    residuals = wire.residuals()
    read = wire.push(wire.gradients(1), absent=ALL_ABSENT)
    assert not any(flat.any() for flat in read)
    assert same(wire.residuals(), residuals)
    assert wire.sent_bytes > 0


@pytest.mark.parametrize(("codec", "smaller"), [("fp16", 1.99), ("one-bit", 30), ("top-k(ratio=0.01)", 60)])
def test_bytes_are_really_fewer_heads_included(codec, smaller):
    wire = Wire(codec, shapes=((200_000,), (1000,)))
    wire.push(wire.gradients(0))
    assert wire.sent_bytes * smaller < 4 * 201_000


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("codec", ["dynamic-fixed", "error-feedback(dynamic-fixed(feedback=false))"])
def test_a_scale_that_follows_the_gradients_does_so_on_each_worker_by_itself(codec, scale):
    wire = Wire(codec)
    for step in range(4):
        gradients = wire.gradients(step, scale)
        wire.push(gradients)
    assert 0 < float(wire.residuals()[0].norm()) < 0.01 * float(gradients[0].norm())


def test_bytes_that_are_no_piece_are_refused_and_the_sender_is_named():
    wire = Wire("top-k(ratio=0.05)", shapes=((100,), (3,)))
    (data,) = wire.write(wire.gradients(0))
    raw = data.numpy().tobytes()
    damaged = (b"", raw[:20], raw[:-1], raw + bytes(8), raw[:8] + b"\xff" * 7 + b"\x7f" + raw[16:])
    flat = torch.zeros(103)
    for bad in (*damaged, raw[:24] + b"\xff" * 8 + raw[32:]):
        with pytest.raises(Corrupt, match="rank 1 sent a coded piece"):
            coding.read_push(wire.coding, memoryview(bytearray(bad)), wire.pieces[0], flat, 1, "rank 1")


@pytest.mark.parametrize("values", [[], [0.0], [3e38, -3e38]])
def test_all_that_is_a_number_is_finite(values):
    assert coding.is_finite(torch.tensor(values))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_none_is_found_anywhere(value):
    for place in (0, 50, 99):
        values = torch.ones(100)
        values[place] = value
        assert not coding.is_finite(values)


# Down --------------------------------------------------------------------------------------------


def handed(wire, shadows, weights, had, version):
    """What a worker has after a hand-out."""
    for piece in reversed(wire.pieces):
        change = shadows.change(wire.worker, piece, weights, version)
        assert change is not None
        payload = memoryview(bytearray(change.numpy().tobytes()))
        coding.add_change(wire.coding, payload, piece, had, wire.worker, "the server")


@pytest.mark.parametrize("codec", CODES)
def test_a_worker_has_what_the_server_thinks_it_has_and_it_comes_nearer_every_time(codec):
    wire = Wire(codec)
    seed = wire.gradients(0)[0]
    shadows = coding.Shadows(wire.coding, torch.zeros_like(seed), 3)
    shadows.begin(seed)
    had, weights = seed.clone(), seed + 0.9 * wire.gradients(1)[0]
    far = [float((weights - had).norm())]
    for version in range(20):
        handed(wire, shadows, weights, had, version)
        assert torch.equal(had, shadows.of(wire.worker))
        far.append(float((weights - had).norm()))
    assert all(now <= before * (1 + 1e-6) for before, now in pairwise(far)), far
    assert far[-1] < 0.6 * far[0]
    assert torch.equal(shadows.of(0), seed), "others have what they had"


@pytest.mark.parametrize("codec", ["ternary", "one-bit", "top-k(ratio=0.05)", "fixed(bits=1)"])
def test_while_weights_move_on_a_worker_does_not_fall_behind_for_ever(codec):
    wire = Wire(codec, shapes=((2000,),))
    weights = torch.zeros(2000)
    shadows, had = coding.Shadows(wire.coding, weights, 3), weights.clone()
    far = []
    for version in range(150):
        weights = weights + wire.gradients(version)[0]
        handed(wire, shadows, weights, had, version)
        far.append(float((weights - had).norm()))
    assert max(far[100:]) < 1.5 * max(far[50:100])


def test_weights_that_are_not_finite_are_not_coded_and_the_worker_is_taken_to_have_them():
    wire = Wire("one-bit", shapes=((50,),))
    weights = torch.zeros(50)
    shadows = coding.Shadows(wire.coding, weights, 2)
    weights[7] = torch.inf
    assert shadows.change(1, wire.pieces[0], weights, 1) is None
    assert torch.equal(shadows.of(1), weights)
    weights[7] = 1.0
    assert shadows.change(1, wire.pieces[0], weights, 2) is None, "it still has an infinite one"
    assert shadows.change(1, wire.pieces[0], weights, 3) is not None


@given(
    codec=st.sampled_from(CODES),
    seed=st.integers(0, 1000),
    scale=st.floats(-20, 20).map(lambda power: 10.0**power),
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_both_sides_agree_for_any_sizes_and_scales(codec, seed, scale, lengths):
    wire = Wire(codec, shapes=tuple((length,) for length in lengths))
    if not sum(lengths):
        return
    read = wire.push(wire.gradients(seed, scale))
    assert all(bool(torch.isfinite(flat).all()) for flat in read)
    weights = torch.zeros(sum(lengths))
    shadows, had = coding.Shadows(wire.coding, weights, 2), weights.clone()
    for version in range(3):
        handed(wire, shadows, wire.gradients(seed + version, scale)[0], had, version)
        assert torch.equal(had, shadows.of(1))


# Memory ------------------------------------------------------------------------------------------


class Taken(list):
    """Has something, until it is asked for it: another thread was quicker."""

    def pop(self, *args):
        self.clear()
        return super().pop(*args)


def test_memory_that_another_thread_takes_first_is_made_anew():
    flat = torch.zeros(3)
    shard = ShardState(POLICIES.build("async"), flat, [flat], lambda: None, spare=1)
    shard._free = Taken([torch.zeros(3)])
    assert shard.room().shape == flat.shape


# Which codec -------------------------------------------------------------------------------------

DOWN = {
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


@pytest.mark.parametrize("codec", DOWN)
def test_weights_come_by_a_codec_that_needs_no_luck_and_no_momentum(codec):
    down, expected = coding.pull_codec(CODECS.build(codec)), CODECS.build(DOWN[codec])
    values = torch.randn(500, generator=torch.Generator().manual_seed(0))
    turn = CodecContext(shape=(500,))
    assert type(down) is type(expected)
    assert torch.equal(down.write(values, {}, turn), expected.write(values, {}, turn))


@pytest.mark.parametrize("codec", ["power-sgd", "random-k", "auto", "between(one-bit)"])
def test_codecs_that_mean_nothing_to_a_server_are_refused_with_one_that_does(codec):
    with pytest.raises(ConfigError) as caught:
        served_codec(codec)
    assert codec.partition("(")[0] in caught.value.message
    assert "top-k" in caught.value.fix


def test_an_unknown_codec_is_refused_with_its_nearest():
    with pytest.raises(ConfigError, match="unknown codec 'topk'"):
        served_codec("topk(ratio=0.1)")


@pytest.mark.parametrize(("codec", "dtype"), [("none", torch.float32), ("fp16", torch.float64)])
def test_nothing_is_coded_without_a_codec_or_with_numbers_that_none_writes(codec, dtype):
    assert coding.open_codec(codec, dtype, 0, SHAPES) is None
