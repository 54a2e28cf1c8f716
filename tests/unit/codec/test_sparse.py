"""The sparse codecs: which elements they choose and send, and what they keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echelon.codec.codec import CODECS, RESIDUAL, Codec, CodecContext, chosen
from echelon.codec.codecs.dgc import GATHERED, VELOCITY
from echelon.codec.codecs.random_k import RandomK
from echelon.codec.codecs.top_k import TopK
from echelon.codec.sparse import Source, _stride, largest
from echelon.errors import ConfigError, Corrupt


def _normal(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(seed))


def _back(
    codec: Codec, payload: torch.Tensor, length: int, context: CodecContext | None = None
) -> torch.Tensor:
    out = torch.full((length,), 7.0)
    codec.read(payload, out, context or CodecContext())
    return out


# Choosing ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.25])
def test_sampling_does_not_change_the_choice(ratio):
    values = _normal(300_000)
    exact = TopK(ratio=ratio, sample=0).choose(values, CodecContext())
    assert len(exact) == chosen(300_000, ratio)
    for step in (0, 1, 17):
        assert np.array_equal(TopK(ratio=ratio).choose(values, CodecContext(step=step)), exact)


def test_a_sample_of_only_the_largest_elements_still_gives_the_right_number():
    count, length = 1000, 1_000_000
    looks = []

    class Misleading(Source):
        def peek(self, cut: slice) -> np.ndarray:
            looks.append(cut.step)
            return np.full(len(self.values[cut]), 1e6, np.float32)

    values = _normal(length).numpy()
    found = largest(Misleading(values), count, sample=0.01)
    assert looks
    assert np.array_equal(found, largest(Source(values), count, sample=0))


def test_a_sample_of_only_zeros_still_gives_the_right_number():
    values = _normal(1_000_000).numpy()
    stride = _stride(1_000_000, 1000, 0.01)
    assert stride > 1
    values[::stride] = 0
    assert np.array_equal(
        largest(Source(values), 1000, sample=0.01), largest(Source(values), 1000, sample=0)
    )


def test_dgc_applies_momentum_once_even_if_it_samples_twice():
    values = _normal(1_000_000)
    values[:: _stride(1_000_000, 1000, 0.01)] *= 100  # all samples are large: threshold too high
    codec = CODECS.build("dgc(ratio=0.001)")
    state = codec.begin(1_000_000)
    out = _back(codec, codec.encode(values, state, CodecContext()), 1_000_000)
    assert int(out.count_nonzero()) == 1000
    assert torch.equal(out + state[GATHERED], values)


def test_first_of_equal_magnitudes_are_chosen():
    values = torch.tensor([1.0, -2.0, 2.0, 2.0, 3.0, -2.0])
    assert TopK(ratio=0.5).choose(values, CodecContext()).tolist() == [1, 2, 4]


def test_zeros_are_never_chosen():
    values = torch.tensor([0.0, 0.0, 1e-45, -0.0])
    for text in ("top-k(ratio=1)", "top-k(ratio=0.5)", "threshold(0)", "dgc(ratio=1)"):
        assert CODECS.build(text).choose(values, CodecContext()).tolist() == [2], text


def test_a_value_equal_to_the_threshold_is_not_sent():
    value = 0.1
    near = np.float32(value)  # which is larger than 0.1
    values = torch.tensor([float(np.nextafter(near, np.float32(0))), float(near), -1.0, 0.0])
    assert CODECS.build("threshold(0.1)").choose(values, CodecContext()).tolist() == [1, 2]
    values = torch.tensor([0.5, -0.5, 0.50001])
    assert CODECS.build("threshold(0.5)").choose(values, CodecContext()).tolist() == [2]


def test_below_the_threshold_nothing_is_sent_until_enough_accumulates():
    codec = CODECS.build("threshold(1e3)")
    values, state = torch.full((10,), 400.0), codec.begin(10)
    payloads = [codec.encode(values, state, CodecContext(step=step)) for step in range(3)]
    assert [len(payload) for payload in payloads] == [4, 4, 44]
    assert torch.equal(_back(codec, payloads[2], 10), torch.full((10,), 1200.0))
    assert not state[RESIDUAL].any()
    assert not len(CODECS.build("threshold(1e300)").choose(values, CodecContext()))


def test_sparse_binary_sends_the_sign_with_the_larger_mean():
    codec = CODECS.build("sparse-binary(ratio=0.25, feedback=false)")
    values = torch.tensor([5.0, 1.0, 0.5, 0.0, -4.0, -4.0, -0.1, 0.0])
    rest = torch.empty(8)
    out = _back(codec, codec.write(values, {}, CodecContext(), rest), 8)
    assert out.tolist() == [0, 0, 0, 0, -4, -4, 0, 0]
    assert torch.equal(values - rest, out)
    out = _back(codec, codec.write(-2 * values[:4], {}, CodecContext()), 4)
    assert out.tolist() == [-10, 0, 0, 0]


def test_sparse_binary_sends_one_value_for_all():
    codec = CODECS.build("sparse-binary(ratio=0.01)")
    payload = codec.encode(_normal(100_000), codec.begin(100_000), CodecContext())
    assert len(payload) < 1000 * (2 + np.log2(100)) / 8 + 16


# Sizes ---------------------------------------------------------------------------------------------


def test_dgc_is_hundreds_of_times_smaller_including_positions():
    length = 10_000_000
    codec = CODECS.build("dgc(ratio=0.001)")
    payload = codec.encode(_normal(length), codec.begin(length), CodecContext())
    assert 4 * length / len(payload) >= 450
    assert int(_back(codec, payload, length).count_nonzero()) == 10_000


def test_random_k_sends_no_positions():
    codec = CODECS.build("random-k(ratio=0.01)")
    assert len(codec.write(_normal(10_000), {}, CodecContext())) == 400
    assert len(codec.first(_normal(10_000), codec.begin(10_000), CodecContext())) == 100


# Feedback and momentum -----------------------------------------------------------------------------


def test_elements_that_are_not_chosen_are_sent_later():
    codec = CODECS.build("top-k(ratio=0.25)")
    state, values = codec.begin(4), torch.tensor([4.0, 3.0, 2.0, 1.5])
    sent = [_back(codec, codec.encode(values, state, CodecContext(step=step)), 4) for step in range(3)]
    assert [out.tolist() for out in sent] == [[4, 0, 0, 0], [0, 6, 0, 0], [8, 0, 0, 0]]
    assert state[RESIDUAL].tolist() == [0, 3, 6, 4.5]
    assert values.tolist() == [4, 3, 2, 1.5]


@pytest.mark.parametrize(
    ("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)]
)
@pytest.mark.parametrize("masking", [False, True])
def test_dgc_with_ratio_one_equals_momentum_sgd_to_the_bit(momentum, nesterov, masking):
    length, lr = 70_001, 0.03
    codec = CODECS.get("dgc")(ratio=1, momentum=momentum, nesterov=nesterov, masking=masking)
    theirs = torch.nn.Parameter(_normal(length, seed=1))
    ours = theirs.detach().clone()
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=nesterov)
    state, read = codec.begin(length), torch.empty(length)
    for step in range(6):
        gradient = _normal(length, seed=10 + step)
        theirs.grad = gradient.clone()
        optimizer.step()
        codec.read(codec.encode(gradient, state, CodecContext(step=step)), read, CodecContext(step=step))
        ours.add_(read, alpha=-lr)
        assert torch.equal(ours, theirs.detach())


def test_dgc_without_momentum_is_top_k():
    dgc, top = CODECS.build("dgc(ratio=0.01, momentum=0)"), CODECS.build("top-k(ratio=0.01)")
    mine, theirs = dgc.begin(5000), top.begin(5000)
    assert list(mine) == [GATHERED]
    for step in range(5):
        values = _normal(5000, seed=step)
        assert torch.equal(
            dgc.encode(values, mine, CodecContext(step=step)),
            top.encode(values, theirs, CodecContext(step=step)),
        )
    assert torch.equal(mine[GATHERED], theirs[RESIDUAL])


def test_dgc_accumulates_velocity_and_masks_sent_elements():
    codec = CODECS.build("dgc(ratio=0.25, momentum=0.5)")
    state, values = codec.begin(4), torch.tensor([8.0, 4.0, 0.0, 0.0])
    assert _back(codec, codec.encode(values, state, CodecContext()), 4).tolist() == [8, 0, 0, 0]
    assert state[VELOCITY].tolist() == [0, 4, 0, 0]
    nothing = torch.zeros(4)
    assert _back(codec, codec.encode(nothing, state, CodecContext(step=1)), 4).tolist() == [0, 6, 0, 0]
    assert not _back(codec, codec.encode(nothing, state, CodecContext(step=2)), 4).any()


def test_dgc_without_masking_keeps_the_velocity_of_sent_elements():
    codec = CODECS.build("dgc(ratio=0.25, momentum=0.5, masking=false)")
    state, values = codec.begin(4), torch.tensor([8.0, 0.0, 0.0, 0.0])
    sent = [
        codec.encode(values if step == 0 else 0 * values, state, CodecContext(step=step))
        for step in range(3)
    ]
    assert [_back(codec, payload, 4)[0].item() for payload in sent] == [8, 4, 2]


def test_dgc_clips_to_the_workers_part_of_the_norm():
    codec = CODECS.build("dgc(ratio=1, momentum=0, clip=2)")
    values = torch.tensor([3.0, 4.0])
    context = CodecContext(workers=4, shape=(2,))
    out = _back(codec, codec.encode(values, codec.begin(2), context), 2)
    torch.testing.assert_close(out, torch.tensor([0.6, 0.8]))
    small = torch.tensor([0.3, 0.4])
    assert torch.equal(_back(codec, codec.encode(small, codec.begin(2), context), 2), small)
    assert torch.equal(_back(codec, codec.encode(0 * small, codec.begin(2), context), 2), 0 * small)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_dgc_clips_gradients_whose_squares_overflow(scale):
    codec = CODECS.get("dgc")(ratio=1, momentum=0, clip=scale)
    out = _back(codec, codec.encode(torch.tensor([3.0, 4.0]) * scale, codec.begin(2), CodecContext()), 2)
    torch.testing.assert_close(out / scale, torch.tensor([0.6, 0.8]))


def test_dgc_clips_a_part_of_a_parameter_to_its_part_of_the_norm():
    codec = CODECS.build("dgc(ratio=1, momentum=0, clip=2)")
    out = _back(
        codec, codec.encode(torch.tensor([6.0, 8.0]), codec.begin(2), CodecContext(shape=(4, 2))), 2
    )
    torch.testing.assert_close(out, torch.tensor([0.6, 0.8]))


def test_dgc_warms_up_in_stages_of_equal_length():
    codec = CODECS.build("dgc(ratio=0.001, warmup=40)")
    ratios = [codec.ratio_at(step) for step in range(50)]
    assert ratios[::10] == [0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    assert all(ratios[step] == ratios[step // 10 * 10] for step in range(50))
    assert codec.stages == (0, 10, 20, 30, 40)
    state = codec.begin(10_000)
    sizes = {}
    for step in (0, 10, 40):
        sizes[step] = int(
            _back(
                codec, codec.encode(_normal(10_000), state, CodecContext(step=step)), 10_000
            ).count_nonzero()
        )
    assert sizes == {0: 2500, 10: 625, 40: 10}


def test_dgc_with_a_large_ratio_needs_no_warm_up():
    codec = CODECS.build("dgc(ratio=0.5, warmup=10)")
    assert {codec.ratio_at(step) for step in range(20)} == {0.5}
    assert codec.stages == (0,)


def test_a_very_short_warm_up_skips_stages():
    codec = CODECS.build("dgc(ratio=0.001, warmup=2)")
    assert [codec.ratio_at(step) for step in range(3)] == [0.25, 0.015625, 0.001]


def test_only_dgc_has_momentum():
    assert CODECS.build("dgc").momentum == 0.9
    assert CODECS.build("chain(dgc(momentum=0.5), fp16)").momentum == 0.5
    assert CODECS.build("top-k").momentum == 0


# Random-k ------------------------------------------------------------------------------------------


def test_random_positions_are_equal_on_all_workers_and_differ_between_steps():
    codec = RandomK(ratio=0.05)
    first, _ = codec.positions(1003, CodecContext(rank=0, step=3, seed=5, workers=4))
    second, _ = codec.positions(1003, CodecContext(rank=3, step=3, seed=5, workers=4))
    later, _ = codec.positions(1003, CodecContext(rank=0, step=4, seed=5, workers=4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, later)
    assert len(first) == chosen(1003, 0.05)
    assert (np.diff(first) > 0).all()


def test_random_k_of_several_workers_gives_the_sum_of_the_chosen_elements():
    codec = RandomK(ratio=0.1)
    gradients = [_normal(500, seed) for seed in range(3)]
    states = [codec.begin(500) for _ in gradients]
    contexts = [CodecContext(rank=rank, workers=3) for rank in range(3)]
    numbers = [codec.first(*given) for given in zip(gradients, states, contexts, strict=True)]
    out = torch.empty(500)
    codec.finish(torch.stack(numbers).sum(0), out, states[0], contexts[0])
    exact = torch.stack(gradients).sum(0)
    assert int(out.count_nonzero()) == 50
    torch.testing.assert_close(out[out != 0], exact[out != 0])
    left = torch.stack([state[RESIDUAL] for state in states]).sum(0)
    torch.testing.assert_close(out + left, exact)


def test_random_k_is_unbiased_without_feedback_and_does_not_scale_with_it():
    codec = RandomK(ratio=0.3, feedback=False)  # strata of 3 and of 4 elements
    values = _normal(20, seed=3) + 5
    total = torch.zeros(20, dtype=torch.float64)
    steps = 3000
    out = torch.empty(20)
    for step in range(steps):
        codec.read(codec.write(values, {}, CodecContext(step=step)), out, CodecContext(step=step))
        total += out
    spread = 2 * values.abs().max().item() / np.sqrt(steps)  # more than one standard deviation
    assert (total / steps - values).abs().max() < 5 * spread
    kept = RandomK(ratio=0.3)
    kept.read(kept.write(values, {}, CodecContext()), out, CodecContext())
    assert torch.equal(out[out != 0], values[out != 0])


# Codecs of codecs ----------------------------------------------------------------------------------


def test_a_chain_writes_the_chosen_values_with_the_second_codec():
    codec = CODECS.build("chain(top-k(ratio=0.01), fp16)")
    values, state = _normal(10_000), codec.begin(10_000)
    payload = codec.encode(values, state, CodecContext())
    top = CODECS.build("top-k(ratio=0.01)")
    exact = _back(top, top.write(values, {}, CodecContext()), 10_000)
    out = _back(codec, payload, 10_000)
    assert torch.equal(out != 0, exact != 0)
    torch.testing.assert_close(out, exact, rtol=2**-11, atol=0)
    assert not torch.equal(out, exact)
    torch.testing.assert_close(out + state[RESIDUAL], values, rtol=1e-7, atol=0)
    assert len(payload) < 100 * (2 + (2 + np.log2(100)) / 8) + 20


def test_a_chain_can_be_written_with_and_without_quotes():
    texts = ['chain("top-k(ratio=0.02)", "fp16")', "chain(first=top-k(ratio=0.02), then=fp16)"]
    assert len({CODECS.build(text) for text in [*texts, "chain(top-k(ratio=0.02), fp16)"]}) == 1


def test_chain_of_dgc_masks_sent_elements_and_keeps_the_error_of_the_second_codec():
    codec = CODECS.build("chain(dgc(ratio=0.01, momentum=0.5), fp16)")
    values, state = _normal(1000) * 1.001, codec.begin(1000)
    out = _back(codec, codec.encode(values, state, CodecContext()), 1000)
    assert not state[VELOCITY][out != 0].any()
    assert state[GATHERED][out != 0].any()
    torch.testing.assert_close(out + state[GATHERED], values, rtol=1e-7, atol=0)


def test_a_chain_of_a_codec_without_feedback_keeps_nothing():
    codec = CODECS.build("chain(top-k(feedback=false), fp16)")
    assert not codec.feedback
    assert codec.begin(10) == {}


@pytest.mark.parametrize("then", ["fixed(8, range=2.0)", "one-bit", "ternary", "fixed(4)", "bf16"])
def test_any_codec_of_values_can_write_a_chains_values(then):
    codec = CODECS.build(f"chain(top-k(ratio=0.05), {then})")
    given, sent, state, length = torch.zeros(1000), torch.zeros(1000), codec.begin(1000), 1000
    for step in range(20):
        values = _normal(length, seed=step)
        given += values
        payload = codec.encode(values, state, CodecContext(step=step, shape=(10, 100)))
        assert len(payload) < 4 + 50 * (2 + np.log2(20)) / 8 + 5 + 2 * 50 + 16
        codec.read(payload, sent, CodecContext(step=step, shape=(10, 100)), add=True)
    torch.testing.assert_close(sent + state[RESIDUAL], given, rtol=1e-5, atol=1e-4)


def test_error_feedback_keeps_the_error_of_the_inner_codec():
    codec = CODECS.build("error-feedback(top-k(ratio=0.1, feedback=false))")
    plain = CODECS.build("top-k(ratio=0.1)")
    mine, theirs = codec.begin(200), plain.begin(200)
    assert codec.feedback
    for step in range(5):
        context = CodecContext(step=step)
        assert torch.equal(
            codec.encode(_normal(200, step), mine, context),
            plain.encode(_normal(200, step), theirs, context),
        )
    assert torch.equal(mine[RESIDUAL], theirs[RESIDUAL])


def test_error_feedback_is_combined_like_its_inner_codec():
    assert CODECS.build("error-feedback(top-k(feedback=false))").travels == "gather"
    assert CODECS.build("error-feedback(fp16)").travels == "scatter"


@pytest.mark.parametrize("inner", ["fixed(4)", "fixed(4, range=1.0)", "ternary", "bf16"])
def test_error_feedback_conserves_totals_for_any_merge(inner):
    codec = CODECS.build(f"error-feedback({inner})")
    length, workers = 301, 3
    states = [codec.begin(length) for _ in range(workers)]
    given, read = torch.zeros(length), torch.zeros(length)
    out = torch.empty(length)
    for step in range(12):
        gradients = [_normal(length, seed=workers * step + rank) for rank in range(workers)]
        given += sum(gradients)
        contexts = [CodecContext(step=step, workers=workers, rank=rank) for rank in range(workers)]
        parts = [codec.encode(gradients[rank], states[rank], contexts[rank]) for rank in (0, 2)]
        total = codec.merge(parts, gradients[1], states[1], contexts[1])
        codec.read_total(total, out, states[0], contexts[1])
        read += out
    left = sum(state[RESIDUAL] for state in states)
    torch.testing.assert_close(read + left, given, rtol=1e-4, atol=1e-3)


# Refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "top-k(ratio=0)",
        "top-k(ratio=1.5)",
        "top-k(sample=-1)",
        "random-k(ratio=-0.1)",
        "sparse-binary(ratio=2)",
        "sparse-binary(sample=2)",
        "threshold(-1)",
        "dgc(ratio=0)",
        "dgc(momentum=1)",
        "dgc(momentum=0, nesterov=true)",
        "dgc(clip=-1)",
        "dgc(warmup=-1)",
        "dgc(sample=3)",
        "chain(fp16, fp16)",
        "chain(sparse-binary, fp16)",
        "chain(random-k, fp16)",
        "chain(top-k, none)",
        "chain(top-k, random-k)",
        "chain(top-k, dgc)",
        "chain(top-k, auto)",
        "chain(top-k, no-such-codec)",
        "error-feedback(none)",
        "error-feedback(top-k)",
        "error-feedback(one-bit)",
        "error-feedback(random-k(feedback=false))",
        "error-feedback(between)",
    ],
)
def test_meaningless_options_are_refused_with_a_fix(text):
    with pytest.raises(ConfigError) as refused:
        CODECS.build(text)
    assert refused.value.where
    assert refused.value.fix


def test_error_feedback_around_a_summed_codec_is_refused():
    with pytest.raises(ConfigError, match="feedback=true"):
        CODECS.build("error-feedback(random-k(feedback=false))")
    with pytest.raises(ConfigError, match="loses nothing"):
        CODECS.build('error-feedback("none")')


@pytest.mark.parametrize(
    "text", ["none", "top-k", "threshold", "random-k", "sparse-binary", "dgc", "chain(top-k, fp16)"]
)
def test_bytes_that_are_not_a_piece_of_that_length_are_refused(text):
    codec = CODECS.build(text)
    payload = codec.write(_normal(400), {}, CodecContext())
    for wrong in (payload[:-1], payload[:3], torch.cat([payload, payload[:1]])):
        with pytest.raises(Corrupt):
            _back(codec, wrong, 400)


def test_more_chosen_elements_than_elements_are_refused():
    codec = CODECS.build("top-k")
    payload = codec.write(_normal(400), {}, CodecContext())
    payload[1] = 255
    with pytest.raises(Corrupt, match="out of 400"):
        _back(codec, payload, 400)


def test_pieces_at_odd_addresses_can_be_read():
    for text in ("none", "top-k", "random-k", "sparse-binary", "chain(top-k, fp16)"):
        codec = CODECS.build(text)
        payload = codec.write(_normal(400), {}, CodecContext())
        moved = torch.cat([payload[:1], payload])[1:]
        assert torch.equal(_back(codec, moved, 400), _back(codec, payload, 400)), text
