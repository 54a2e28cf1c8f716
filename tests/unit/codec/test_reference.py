"""The reference group, with tiny codecs, one for each way to combine gradients."""

from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.codec.codec import RESIDUAL, Codec, CodecContext, Summed, owners, seed_of
from echelon.codec.reference import ReferenceGroup, part_of, ring_bytes
from echelon.errors import ConfigError, ModelError


class Plain(Codec):
    """Unencoded numbers, four bytes each; records the contexts of its writes."""

    contexts: ClassVar[list[CodecContext]] = []

    def write(self, values, state, context, rest=None):
        self.contexts.append(context)
        payload = values.clone().view(torch.uint8)
        if rest is not None:
            rest.zero_()
        return payload

    def read(self, payload, out, context, *, add=False):
        values = payload.view(torch.float32)
        out.add_(values) if add else out.copy_(values)

    def bound(self, values):
        return torch.zeros_like(values)


class Gathered(Plain):
    name = "gathered"
    travels = "gather"


class Scattered(Plain):
    name = "scattered"
    travels = "scatter"


class Rough(Codec):
    """Integers in a byte, with feedback; counts the totals that it reads."""

    feedback = True

    def begin(self, length):
        return {RESIDUAL: torch.zeros(length), "totals": torch.zeros(2, dtype=torch.int64)}

    def write(self, values, state, context, rest=None):
        whole = values.round().clamp(-127, 127)
        if rest is not None:
            torch.sub(values, whole, out=rest)
        return whole.to(torch.int8).view(torch.uint8)

    def read(self, payload, out, context, *, add=False):
        values = payload.view(torch.int8).float()
        out.add_(values) if add else out.copy_(values)

    def read_total(self, payload, out, state, context):
        state["totals"][0] += 1
        self.read(payload, out, context)

    def settle(self, state, context):
        state["totals"][1] += 1

    def bound(self, values):
        return torch.full_like(values, 0.5)


class RoughGathered(Rough):
    name = "rough-gathered"
    travels = "gather"


class RoughScattered(Rough):
    name = "rough-scattered"
    travels = "scatter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Halving(Summed):
    """One half of the values in each round; overwrites the totals that it is given."""

    name: ClassVar[str] = "halving"
    rounds: ClassVar[int] = 2

    def first(self, values, state, context):
        state["kept"] = values.clone()
        return values[: len(values) // 2].clone()

    def further(self, total, state, context):
        state["half"] = total.clone()
        total.fill_(torch.nan)
        return state["kept"][len(total) :].clone()

    def finish(self, total, out, state, context):
        out[: len(state["half"])] = state["half"]
        out[len(state["half"]) :] = total
        total.fill_(torch.nan)

    def write(self, values, state, context, rest=None):
        raise NotImplementedError

    def read(self, payload, out, context, *, add=False):
        raise NotImplementedError

    def bound(self, values):
        return torch.zeros_like(values)


EXACT = [Gathered, Scattered, Halving]
ROUGH = [RoughGathered, RoughScattered]


def _gradients(workers, seed, lengths=(0, 1, 5, 6000), scale=1.0):
    torch.manual_seed(seed)
    return [{f"p{n}": scale * torch.randn(n) for n in lengths} for _ in range(workers)]


def _summed(gradients, name):
    total = torch.zeros_like(gradients[0][name])
    for mine in gradients:
        total += mine[name]
    return total


@pytest.mark.parametrize("kind", EXACT)
@given(workers=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_exact_codecs_give_the_sum(kind, workers, seed):
    gradients = _gradients(workers, seed)
    for found in ReferenceGroup(kind(), workers).outcomes(gradients):
        for name in gradients[0]:
            torch.testing.assert_close(found[name], _summed(gradients, name))


def test_totals_are_added_in_the_order_of_ranks():
    # In float32 only this order gives 1: the large values must cancel before the small one is added.
    gradients = [{"w": torch.tensor([value])} for value in (1e8, -1e8, 1.0)]
    for kind in (Gathered, Halving):
        assert ReferenceGroup(kind(), 3).combine(gradients)["w"].item() == 1.0
    assert ReferenceGroup(Gathered(), 3).combine(gradients[::-1])["w"].item() == 0.0


@pytest.mark.parametrize("kind", EXACT + ROUGH)
@given(workers=st.integers(1, 5), seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 3.0, 500.0]))
@settings(max_examples=10, deadline=None)
def test_every_worker_ends_with_the_same_bits(kind, workers, seed, scale):
    reference = ReferenceGroup(kind(), workers)
    for step in range(3):
        first, *others = reference.outcomes(_gradients(workers, seed + step, scale=scale))
        for other in others:
            for name, total in first.items():
                assert torch.equal(total.view(torch.int32), other[name].view(torch.int32))


@pytest.mark.parametrize("kind", ROUGH)
@given(workers=st.integers(1, 5), seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 3.0, 500.0]))
@settings(max_examples=10, deadline=None)
def test_results_plus_residuals_are_the_sum_of_the_inputs(kind, workers, seed, scale):
    reference = ReferenceGroup(kind(), workers)
    names = list(_gradients(1, 0)[0])
    given_sum = dict.fromkeys(names, 0.0)
    read_sum = dict.fromkeys(names, 0.0)
    steps = 5
    for step in range(steps):
        gradients = _gradients(workers, seed + step, scale=scale)
        found = reference.combine(gradients)
        for name in names:
            given_sum[name] = given_sum[name] + sum(mine[name].double() for mine in gradients)
            read_sum[name] = read_sum[name] + found[name].double()
    for name in names:
        residuals = sum(mine[name][RESIDUAL].double() for mine in reference.states)
        # Each addition to a residual rounds once, by at most half a unit in its last place.
        rounding = 2**-23 * 5 * scale * steps * steps * workers * (workers + 1)
        torch.testing.assert_close(read_sum[name] + residuals, given_sum[name], rtol=0, atol=rounding)


def test_all_workers_add_pieces_of_a_large_parameter_and_one_worker_adds_a_small_one():
    reference = ReferenceGroup(RoughScattered(), 4)
    reference.combine(_gradients(4, 0, lengths=(0, 5, 9000)))
    for mine in reference.states:
        assert mine["p9000"]["totals"].tolist() == [4, 1]
        assert mine["p5"]["totals"].tolist() == [1, 1]
        assert mine["p0"]["totals"].tolist() == [0, 1]


def test_counters_as_long_as_the_parameter_are_not_cut():
    reference = ReferenceGroup(RoughScattered(), 3)
    reference.combine(_gradients(3, 0, lengths=(2,)))
    assert [mine["p2"]["totals"].tolist() for mine in reference.states] == [[1, 1]] * 3
    state = {"each": torch.arange(4.0), "counts": torch.arange(4), "few": torch.arange(3.0)}
    part = part_of(state, 4, 1, 3)
    assert (part["each"].tolist(), len(part["counts"]), len(part["few"])) == ([1, 2], 4, 3)
    part["each"].zero_()
    assert state["each"].tolist() == [0, 0, 0, 3]


def test_the_context_names_step_rank_and_piece():
    Plain.contexts.clear()
    reference = ReferenceGroup(Scattered(), 2)
    for _ in range(2):
        reference.combine([{"w": torch.ones(50, 80)}] * 2)
    assert {context.seed for context in Plain.contexts} == {seed_of("w")}
    assert {(context.workers, context.shape) for context in Plain.contexts} == {(2, (50, 80))}
    # In each step, rank 1 writes the first piece for rank 0, and rank 0 its total; then the other way
    # round.
    assert [(context.step, context.rank, context.start) for context in Plain.contexts] == [
        (step, rank, start) for step in (0, 1) for rank, start in ((1, 0), (0, 0), (0, 2000), (1, 2000))
    ]


@given(workers=st.integers(1, 6), length=st.integers(0, 9000))
@settings(max_examples=30, deadline=None)
def test_sent_bytes_are_those_of_a_real_exchange(workers, length):
    gradients = [{"w": torch.ones(length)}] * workers

    def sent(codec):
        reference = ReferenceGroup(codec, workers)
        reference.combine(gradients)
        return reference.sent_bytes

    assert sent(Gathered()) == [4 * length * (workers - 1)] * workers
    pieces = [stop - start for start, stop in owners(length, workers, seed_of("w"))]
    assert sent(Scattered()) == [4 * (length - own) + 4 * own * (workers - 1) for own in pieces]
    assert sent(RoughScattered()) == [(length - own) + own * (workers - 1) for own in pieces]
    assert sum(sent(Halving())) == pytest.approx(2 * (workers - 1) * 4 * length, abs=workers)
    assert ring_bytes(4 * length, workers) == pytest.approx(8 * length * (workers - 1) / workers, abs=1)


def test_sent_bytes_count_only_the_last_exchange():
    reference = ReferenceGroup(Gathered(), 2)
    for length in (10, 3):
        reference.combine([{f"p{length}": torch.ones(length)}] * 2)
        assert reference.sent_bytes == [4 * length] * 2


def test_shapes_and_gradients_are_not_changed():
    given_ = [{"w": torch.ones(3, 4).t(), "b": torch.tensor(2.0)} for _ in range(2)]
    for kind in EXACT[:2] + ROUGH:
        found = ReferenceGroup(kind(), 2).combine(given_)
        assert (found["w"].shape, found["b"].shape) == ((4, 3), ())
        assert found["b"].item() == 4.0
    assert all(mine["w"].eq(1).all() and mine["b"] == 2 for mine in given_)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_tensors_that_are_not_float32_are_added_unencoded(dtype):
    reference = ReferenceGroup(RoughGathered(), 3)
    gradients = [{"w": torch.tensor([[2.5], [7.0]]).to(dtype)}] * 3
    for found in reference.outcomes(gradients):
        assert found["w"].dtype == dtype
        assert torch.equal(found["w"], gradients[0]["w"] * 3)
    assert reference.sent_bytes == [ring_bytes(2 * gradients[0]["w"].element_size(), 3)] * 3
    assert reference.states == [{}, {}, {}]


@pytest.mark.parametrize(
    ("kind", "encode_s", "decode_s"),
    [
        (Gathered, 1, 1),  # each worker writes once; all reads count once
        (Scattered, 3, 4),  # each worker writes two parts and a total, reads three totals, and settles
        (Halving, 2, 1),
    ],
)
def test_times_are_averages_per_worker_by_the_given_clock(kind, encode_s, decode_s):
    ticks = count()
    reference = ReferenceGroup(kind(), 3, now=lambda: float(next(ticks)))
    for _ in range(2):  # only the last exchange counts
        reference.combine([{"w": torch.ones(6000)}] * 3)
        assert (reference.encode_s, reference.decode_s) == pytest.approx((encode_s, decode_s))
    alone = ReferenceGroup(kind(), 3)
    alone.combine([{"w": torch.ones(6000)}] * 3)
    assert (alone.encode_s, alone.decode_s) == (0, 0)


def test_workers_that_differ_are_refused():
    with pytest.raises(ConfigError):
        ReferenceGroup(Gathered(), 0)
    reference = ReferenceGroup(Gathered(), 2)
    with pytest.raises(ModelError, match="1 workers"):
        reference.combine([{"w": torch.ones(2)}])
    for other in ({"v": torch.ones(2)}, {"w": torch.ones(3)}, {"w": torch.ones(2).double()}, {}):
        with pytest.raises(ModelError, match="ranks 0 and 1 differ"):
            reference.combine([{"w": torch.ones(2)}, other])
