"""Quantising codecs one by one: sizes, means, scales, overflow, and meaningless options."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from echelon.codec.bits import BLOCK
from echelon.codec.codec import CODECS, RESIDUAL, SATURATED, Codec, CodecContext, State
from echelon.codec.codecs.dynamic_fixed import DynamicFixed
from echelon.codec.codecs.fixed import Fixed
from echelon.codec.codecs.one_bit import OneBit
from echelon.codec.codecs.ternary import Ternary
from echelon.errors import ConfigError, Corrupt

LONG = 2 * BLOCK + 77


def normal(length: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale


def read(codec: Codec, payload: torch.Tensor, length: int, context: CodecContext) -> torch.Tensor:
    out = torch.empty(length)
    codec.read(payload, out, context)
    return out


def through(codec: Codec, x: torch.Tensor, context: CodecContext | None = None) -> torch.Tensor:
    context = context or CodecContext()
    return read(codec, codec.write(x, codec.begin(len(x)), context), len(x), context)


# All of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bits", "head_bytes"),
    [
        ("fp16", 16, 1),
        ("bf16", 16, 1),
        ("fixed", 8, 4),
        ("fixed(bits=1)", 1, 4),
        ("fixed(bits=11)", 11, 4),
        ("fixed(bits=4, range=1)", 4, 0),
        ("dynamic-fixed", 12, 24),
        ("one-bit", 1, 8),
        ("ternary", 1.6, 4),
    ],
)
def test_the_size_is_bits_per_element_plus_a_header(name, bits, head_bytes):
    codec = CODECS.build(name)
    for length in (16_384, LONG):
        payload = codec.encode(normal(length), codec.begin(length), CodecContext())
        assert 0 <= len(payload) - head_bytes - length * bits / 8 < 3


def test_ternary_is_sixteen_times_smaller_from_64_kilobytes_on():
    length = 16_384
    assert 4 * length / len(Ternary().write(normal(length), {}, CodecContext())) >= 16


@pytest.mark.parametrize("name", ["fp16", "bf16", "fixed(bits=12)", "dynamic-fixed", "one-bit", "ternary"])
def test_error_bound_and_residual_hold_for_pieces_of_several_blocks(name):
    codec = CODECS.build(name)
    x = normal(LONG)
    rest = torch.empty_like(x)
    payload = codec.write(x, codec.begin(LONG), CodecContext(), rest)
    out = read(codec, payload, LONG, CodecContext())
    assert bool(((out - x).abs() <= codec.bound(x)).all())
    assert torch.equal(rest, x - out)


@pytest.mark.parametrize("name", ["fixed(rounding=stochastic)", "ternary"])
def test_random_numbers_repeat_only_for_the_same_context(name):
    codec = CODECS.build(name)
    x = normal(1000)
    mine = codec.write(x, {}, CodecContext(rank=1, seed=3))
    assert torch.equal(mine, codec.write(x, {}, CodecContext(rank=1, seed=3)))
    for other in (
        CodecContext(rank=0, seed=3),
        CodecContext(rank=1, seed=4),
        CodecContext(rank=1, seed=3, step=1),
    ):
        assert not torch.equal(mine, codec.write(x, {}, other))


@pytest.mark.parametrize(
    "name",
    [
        "fixed(bits=0)",
        "fixed(bits=17)",
        "fixed(range=-1)",
        "fixed(range=1e39)",
        "fixed(range=1e-45)",
        "dynamic-fixed(bits=1)",
        "dynamic-fixed(bits=17)",
        "dynamic-fixed(most_overflow=0.5)",
        "dynamic-fixed(most_overflow=-0.1)",
        "ternary(clip=-1)",
        "one-bit(per=row)",
        "fixed(rounding=up)",
    ],
)
def test_meaningless_options_are_refused_with_a_fix(name):
    with pytest.raises(ConfigError) as caught:
        CODECS.build(name)
    assert caught.value.fix


@pytest.mark.parametrize("make", [lambda: Fixed(rounding="up"), lambda: OneBit(per="row")])
def test_choices_are_also_checked_without_the_registry(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("fixed", struct.pack("<f", float("nan"))),
        ("fixed", struct.pack("<f", float("inf"))),
        ("fixed", struct.pack("<f", -1.0)),
        ("fixed", struct.pack("<fB", 1.0, 255)),  # 254 is the largest code
        ("ternary", struct.pack("<f", -1.0)),
        ("ternary", struct.pack("<f", float("inf"))),
        ("one-bit", struct.pack("<ff", 1.0, 1.0)),
        ("one-bit", struct.pack("<ff", -1.0, -1.0)),
        ("one-bit", struct.pack("<ff", -1.0, float("nan"))),
        ("dynamic-fixed", struct.pack("<h", 129)),
        ("dynamic-fixed", struct.pack("<h", -127)),
        ("dynamic-fixed", struct.pack("<hhI", 0, 0, 0)),
        ("dynamic-fixed", struct.pack("<hhI", 0, 0, 9)),
    ],
)
def test_impossible_headers_are_refused(name, head):
    codec = CODECS.build(name)
    payload = codec.write(normal(100), codec.begin(100), CodecContext())
    payload[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    with pytest.raises(Corrupt):
        codec.read(payload, torch.empty(100), CodecContext())


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_an_impossible_exponent_is_refused(name):
    codec = CODECS.build(name)
    payload = codec.write(normal(100), {}, CodecContext())
    payload[-1] = 200
    with pytest.raises(Corrupt, match="exponent"):
        codec.read(payload, torch.empty(100), CodecContext())


# fp16 and bf16 -----------------------------------------------------------------------------------


def test_halves_round_as_torch_does():
    x = normal(LONG, 1e-2)
    assert torch.equal(through(CODECS.build("fp16"), x), x.half().float())
    assert torch.equal(through(CODECS.build("bf16"), x), x.bfloat16().float())


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(
    ("at", "large"), [(0, 65519.0), (BLOCK, 65520.0), (7, 1e5), (LONG - 1, 1e30), (BLOCK - 1, 3.4028234e38)]
)
def test_halves_scale_a_large_value_and_do_not_lose_it(large, at, sign):
    codec = CODECS.build("fp16")
    x = normal(LONG)
    x[at] = sign * large
    payload = codec.write(x, {}, CodecContext())
    assert (int(payload[-1]) > 0) == (large >= 65520)
    out = read(codec, payload, LONG, CodecContext())
    assert bool(out.isfinite().all())
    assert float(out[at]) == pytest.approx(sign * large, rel=2**-11)
    assert bool(((out - x).abs() <= codec.bound(x)).all())


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_the_largest_values_do_not_become_infinite_in_bf16(sign):
    codec = CODECS.build("bf16")
    x = torch.tensor([sign * 3.4028234e38, 1.0, -2.0])
    assert bool(x.bfloat16().isinf().any())
    out = through(codec, x)
    assert bool(out.isfinite().all())
    assert bool(((out - x).abs() <= codec.bound(x)).all())


# fixed -------------------------------------------------------------------------------------------


def test_fixed_is_exact_for_zero_and_the_range():
    x = torch.tensor([-3.0, 0.0, 3.0, 1.0])
    out = through(Fixed(bits=3), x)
    assert out.tolist() == pytest.approx([-3.0, 0.0, 3.0, 1.0], abs=1e-6)
    assert float(out[1]) == 0.0


def test_one_bit_of_fixed_point_is_the_range_with_a_sign():
    assert through(Fixed(bits=1), torch.tensor([0.1, -4.0, 2.0])).tolist() == [4.0, -4.0, 4.0]


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 16])
def test_stochastic_rounding_is_unbiased(bits):
    codec = Fixed(bits=bits, rounding="stochastic")
    x = torch.linspace(-1, 1, 41)
    times = 800
    mean = (
        torch.stack([through(codec, x, CodecContext(step=step)) for step in range(times)]).double().mean(0)
    )
    step = 2 / max(1, 2**bits - 2)
    # The deviation of a mean of n is at most half a step over sqrt(n); this is five deviations.
    assert float((mean - x).abs().max()) <= 5 * step / 2 / times**0.5


def test_nearest_rounding_is_biased():
    assert through(Fixed(bits=2), torch.tensor([1.0, 0.4])).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("bits", range(1, 17))
def test_the_largest_float32_stays_finite_in_fixed_point(bits):
    most = torch.finfo(torch.float32).max
    for largest in (most, 0.99 * most, 0.7 * most):
        out = through(Fixed(bits=bits), torch.tensor([-largest, largest, 1.0]))
        assert bool((out.abs() <= torch.tensor(largest)).all())


def test_sums_of_wide_numbers_of_many_workers_are_exact():
    codec, workers = Fixed(bits=16, range=32767.0), 300  # a step is one
    x = torch.tensor([32767.0, -32767.0, 1.0, 12345.0])
    payload = codec.merge([codec.write(x, {}, CodecContext())] * (workers - 1), x, {}, CodecContext())
    out = torch.empty(4)
    codec.read_total(payload, out, {}, CodecContext())
    assert torch.equal(out, x * workers)


def test_values_beyond_a_given_range_are_clamped_and_counted():
    codec = Fixed(range=0.5)
    state = codec.begin(6)
    x = torch.tensor([0.5, -0.5, 0.6, -1e38, 0.1, 0.0])
    out = read(codec, codec.encode(x, state, CodecContext()), 6, CodecContext())
    assert out[:4].tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5], rel=1e-6)
    assert int(state[SATURATED]) == 2
    codec.encode(x, state, CodecContext())
    assert int(state[SATURATED]) == 4
    codec.merge([], x, state, CodecContext())
    assert int(state[SATURATED]) == 6


def test_the_piece_range_clamps_nothing():
    assert Fixed().begin(6) == {}


@pytest.mark.parametrize("bits", [1, 2, 8, 16])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_total_on_a_given_range_takes_a_few_more_bits(bits, workers):
    codec, length = Fixed(bits=bits, range=1.0), 8000
    given = [normal(length, seed=rank) for rank in range(workers)]
    parts = [codec.write(x, {}, CodecContext()) for x in given]
    payload = codec.merge(parts[1:], given[0], {}, CodecContext(workers=workers))
    more = (workers - 1).bit_length()
    assert len(payload) <= 4 + length * (bits + more) // 8
    out = torch.empty(length)
    codec.read_total(payload, out, {}, CodecContext(workers=workers))
    each = torch.stack([read(codec, part, length, CodecContext()) for part in parts])
    assert torch.allclose(out, each.sum(0), rtol=1e-6, atol=1e-6)


def test_damaged_parts_and_totals_of_a_given_range_are_refused():
    codec, x = Fixed(range=1.0), normal(100)
    part = codec.write(x, {}, CodecContext())
    for wrong in (part[:-1], torch.cat([part, part[:1]]), torch.full_like(part, 255)):
        with pytest.raises(Corrupt):
            codec.merge([wrong], x, {}, CodecContext(workers=2))
    total = codec.merge([part], x, {}, CodecContext(workers=2))
    none = total.clone()
    none[:4] = 0
    for wrong in (total[:3], total[:-1], none, torch.cat([total, total[:1]])):
        with pytest.raises(Corrupt):
            codec.read_total(wrong, torch.empty(100), {}, CodecContext(workers=2))


# ternary -----------------------------------------------------------------------------------------


def test_ternary_is_unbiased():
    codec = Ternary(clip=0)
    x = torch.linspace(-1, 1, 41)
    times = 1500
    outs = torch.stack([through(codec, x, CodecContext(step=step)) for step in range(times)]).double()
    assert set(outs.unique().tolist()) == {-1.0, 0.0, 1.0}
    assert float((outs.mean(0) - x).abs().max()) <= 5 * 0.5 / times**0.5


def test_small_values_are_rounded_to_the_nearest_probability():
    x = torch.full((LONG,), 0.9 * 2.0**-16)
    x[0] = 1.0
    chosen = [
        int((through(Ternary(clip=0), x, CodecContext(step=step)) > 0).sum()) - 1 for step in range(4)
    ]
    assert 2 <= sum(chosen) <= 24  # about ten of 4 LONG; truncated to multiples of 2^-16, none


def test_ternary_clips_at_deviations_from_zero():
    x = torch.full((1000,), 0.1)
    x[7] = 100.0
    deviation = float(x.double().square().mean().sqrt())
    out = through(Ternary(clip=2.5), x)
    assert float(out.max()) == pytest.approx(2.5 * deviation, rel=1e-5)
    assert float(out[7]) == pytest.approx(2.5 * deviation, rel=1e-5)
    assert float(through(Ternary(clip=0), x).max()) == 100.0


@pytest.mark.parametrize("value", [1e-45, 1e-30, 1.0, 1e30, 3e38])
def test_equal_values_are_not_clipped(value):
    x = torch.full((500,), value)
    assert torch.equal(through(Ternary(), x), x)


# one-bit -----------------------------------------------------------------------------------------


def test_signs_are_read_as_the_means_of_their_elements():
    x = torch.tensor([1.0, 3.0, -1.0, -5.0, 0.0, -0.0])
    assert through(OneBit(), x).tolist() == [1.0, 1.0, -3.0, -3.0, 1.0, 1.0]


def test_means_of_huge_values_are_finite():
    x = torch.full((1000,), 3.4e38)
    x[::2] = -3.3e38
    assert torch.equal(through(OneBit(), x), x)


@pytest.mark.parametrize(
    ("start", "width"), [(0, 64), (13, 64), (64, 64), (0, 67), (13, 100), (64, 2000), (13, BLOCK + 5)]
)
def test_each_output_has_its_own_means_wherever_the_piece_begins(start, width):
    rows = 5
    whole = normal(rows * width) * torch.arange(1, rows + 1).repeat_interleave(width)
    piece = whole[start : 4 * width + 33].clone()
    context = CodecContext(start=start, shape=(rows, width))
    codec = OneBit(per="column")
    payload = codec.write(piece, {}, context)
    out = read(codec, payload, len(piece), context)
    row_of = (torch.arange(len(piece)) + start) // width
    touched = row_of.unique()
    assert len(payload) == 8 * len(touched) + -(-len(piece) // 8)
    for row in touched:
        for side in (piece < 0, piece >= 0):
            chosen = side & (row_of == row)
            if bool(chosen.any()):
                mean = piece[chosen].double().mean().expand(int(chosen.sum())).float()
                assert torch.allclose(out[chosen], mean, rtol=1e-5)


def test_short_outputs_share_the_means_of_the_piece():
    x = normal(63 * 10)
    context = CodecContext(shape=(10, 63))
    by_column = OneBit(per="column").write(x, {}, context)
    assert torch.equal(by_column, OneBit().write(x, {}, context))


# dynamic-fixed -----------------------------------------------------------------------------------


class Workers:
    """Workers that share a parameter, cut into one piece for each of them."""

    def __init__(self, codec: DynamicFixed, workers: int, length: int) -> None:
        self.codec, self.workers, self.length = codec, workers, length
        self.states: list[State] = [codec.begin(length) for _ in range(workers)]
        self.cuts = np.linspace(0, length, workers + 1).astype(int).tolist()
        self.step = 0

    def exponents(self) -> list[int]:
        return [int(state["exponent"]) for state in self.states]

    def saturated(self) -> int:
        return sum(int(state[SATURATED]) for state in self.states)

    def combine(self, given: list[torch.Tensor]) -> torch.Tensor:
        outs = [torch.empty(self.length) for _ in given]
        for owner in range(self.workers):
            begin, end = self.cuts[owner], self.cuts[owner + 1]
            contexts = [
                CodecContext(step=self.step, workers=self.workers, rank=rank, start=begin)
                for rank in range(self.workers)
            ]
            pieces = [self._cut(state, begin, end) for state in self.states]
            parts = [
                self.codec.encode(given[rank][begin:end], pieces[rank], contexts[rank])
                for rank in range(self.workers)
                if rank != owner
            ]
            payload = self.codec.merge(parts, given[owner][begin:end], pieces[owner], contexts[owner])
            for rank in range(self.workers):
                self.codec.read_total(payload, outs[rank][begin:end], self.states[rank], contexts[rank])
        for rank, state in enumerate(self.states):
            self.codec.settle(state, CodecContext(step=self.step, workers=self.workers, rank=rank))
        self.step += 1
        assert all(torch.equal(out, outs[0]) for out in outs)
        assert len(set(self.exponents())) == 1
        return outs[0]

    def _cut(self, state: State, begin: int, end: int) -> State:
        return {k: t[begin:end] if len(t) == self.length else t for k, t in state.items()}


def gradients(workers: int, length: int, scale: float, step: int) -> list[torch.Tensor]:
    return [normal(length, scale, seed=100 * step + rank) for rank in range(workers)]


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-3, 1.0, 1e10, 1e30])
@pytest.mark.parametrize("feedback", [False, True])
def test_the_scale_finds_any_gradients_within_a_few_steps(scale, feedback):
    cluster = Workers(DynamicFixed(feedback=feedback), 3, 5000)
    for step in range(8):
        given = gradients(3, 5000, scale, step)
        before = [state[RESIDUAL].clone() for state in cluster.states] if feedback else []
        out = cluster.combine(given)
    exact = sum(x.double() for x in [*given, *before])
    error = (out.double() - exact).abs()
    # Almost all values are within half a step of each of three workers.
    allowed = 3 * 0.5 * 2.0 ** (cluster.exponents()[0] + 1 - 11) * (1 + 1e-6)
    assert float((error <= allowed).double().mean()) > 0.998
    assert allowed < 0.02 * scale


def test_overflow_stays_below_its_limit_with_the_smallest_range():
    codec, length = DynamicFixed(bits=8, most_overflow=0.1, feedback=False), 4000
    cluster = Workers(codec, 2, length)
    shares = []
    for step in range(10):
        before = cluster.saturated()
        cluster.combine(gradients(2, length, 1e-4, step))
        shares.append((cluster.saturated() - before) / (2 * length))
    assert max(shares[1:]) <= 0.1
    # The largest values need exponent -11. 1.5 % are beyond this range; 22 % are beyond half of it.
    assert cluster.exponents() == [-12, -12]


def test_the_scale_jumps_once_and_then_changes_by_one():
    cluster = Workers(DynamicFixed(feedback=False), 2, 100)
    few, half = torch.full((100,), 0.01), torch.full((100,), 0.004)
    few[:10] = 0.1
    cluster.combine([torch.full((100,), 0.01)] * 2)
    assert cluster.exponents() == [-6, -6]  # 0.01 is below 2^-6
    for exponent in (-5, -4, -3, -3):  # a tenth of the values is out of range
        cluster.combine([few] * 2)
        assert cluster.exponents() == [exponent] * 2
    for exponent in (-4, -5, -6, -7, -7):
        cluster.combine([half] * 2)
        assert cluster.exponents() == [exponent] * 2


def test_scale_depends_on_the_values_of_all_workers():
    cluster = Workers(DynamicFixed(feedback=False), 2, 100)
    small, large, few = torch.full((100,), 0.01), torch.full((100,), 0.01), torch.full((100,), 0.01)
    large[:3], few[:3] = 5.0, 9.0  # in the piece owned by worker 0, which has none
    cluster.combine([small, large])
    assert cluster.exponents() == [3, 3]
    cluster.combine([small, few])
    assert cluster.exponents() == [4, 4]
    assert [int(state[SATURATED]) for state in cluster.states] == [0, 6]


def test_the_scale_follows_gradients_that_grow_and_shrink():
    cluster = Workers(DynamicFixed(feedback=False), 2, 3000)
    seen = []
    for step, scale in enumerate([1.0] * 5 + [1e6] * 3 + [1e-9] * 3):
        cluster.combine(gradients(2, 3000, scale, step))
        seen.append(cluster.exponents()[0])
    assert 1 <= seen[4] <= 3
    assert 20 <= seen[7] <= 24
    assert -29 <= seen[10] <= -26


def test_zeros_do_not_change_the_scale():
    cluster = Workers(DynamicFixed(), 2, 100)
    for _ in range(5):
        assert float(cluster.combine([torch.zeros(100)] * 2).abs().max()) == 0
    assert cluster.exponents() == [0, 0]


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_parameters_with_fewer_elements_than_workers_work(length):
    cluster = Workers(DynamicFixed(feedback=False), 3, length)
    for _ in range(4):
        out = cluster.combine([torch.full((length,), 0.25)] * 3)
    assert out.tolist() == pytest.approx([0.75] * length, rel=2e-3)


def test_saturated_values_are_counted_by_the_writer_and_kept():
    codec = DynamicFixed()
    state = codec.begin(3)
    codec.encode(torch.tensor([0.5, 7.0, -9.0]), state, CodecContext())
    assert int(state[SATURATED]) == 2
    assert state[RESIDUAL].tolist() == pytest.approx([0.0, 6.0, -8.0], abs=1e-3)


def test_a_worker_with_another_scale_is_named():
    codec, x = DynamicFixed(), normal(50)
    others = codec.begin(50)
    others["exponent"].fill_(3)
    parts = [
        codec.encode(x, codec.begin(50), CodecContext(rank=0)),
        codec.encode(x, others, CodecContext(rank=2)),
    ]
    with pytest.raises(Corrupt, match="worker 2") as caught:
        codec.merge(parts, x, codec.begin(50), CodecContext(rank=1, workers=3))
    assert caught.value.ranks == (2,)
    total = codec.merge(parts[:1], x, codec.begin(50), CodecContext(rank=1, workers=2))
    with pytest.raises(Corrupt, match="exponent"):
        codec.read_total(total, torch.empty(50), others, CodecContext())
