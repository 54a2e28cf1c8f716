"""Codecs in refused rounds, in further rounds of a step, and with totals beyond float32."""

from __future__ import annotations

import pytest
import torch

from echelon.codec.codec import CODECS, RESIDUAL, CodecContext
from echelon.codec.codecs.chain import Chain
from echelon.errors import ConfigError


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_of_several_backward_passes_applies_momentum_to_their_sum(nesterov):
    codec = CODECS.build(f"dgc(ratio=1, momentum=0.9, nesterov={str(nesterov).lower()})")
    state = codec.begin(40)
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9, nesterov=nesterov)
    made = torch.Generator().manual_seed(1)
    for step in range(6):
        parts = [torch.randn(40, generator=made) for _ in range(3)]
        total = torch.zeros(40)
        for index, part in enumerate(parts):
            context = CodecContext(step=3 * step + index, further=index > 0)
            codec.read(codec.encode(part, state, context), total, context, add=True)
        before = p.detach().clone()
        p.grad = sum(parts)
        optimizer.step()
        torch.testing.assert_close(total, before - p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text", ["top-k(ratio=0.1)", "one-bit", "error-feedback(fp16)", "threshold(value=0.5)"]
)
def test_a_refused_round_restores_the_residual(text):
    codec = CODECS.build(text)
    state = codec.begin(500)
    made = torch.Generator().manual_seed(2)
    codec.encode(torch.randn(500, generator=made), state, CodecContext())
    residuals = state[RESIDUAL].clone()
    assert residuals.any()
    values = torch.randn(500, generator=made)
    payload = codec.encode(values, state, CodecContext(step=1))
    assert not torch.allclose(state[RESIDUAL], residuals)
    codec.take_back(payload, values, state, CodecContext(step=1))
    torch.testing.assert_close(state[RESIDUAL], residuals, rtol=0, atol=1e-6)


def test_a_codec_without_feedback_has_nothing_to_take_back():
    codec = CODECS.build("fp16")
    values = torch.ones(10)
    codec.take_back(codec.encode(values, {}, CodecContext()), values, {}, CodecContext())


@pytest.mark.parametrize("text", ["fp16", "bf16", "one-bit", "fixed(bits=8)", "ternary"])
def test_a_total_beyond_float32_is_refused_not_clipped(text):
    codec = CODECS.build(text)
    values = torch.full((50,), 3e38)
    part = codec.encode(values, codec.begin(50), CodecContext(rank=1))
    with pytest.raises(OverflowError):
        codec.merge([part], values, codec.begin(50), CodecContext(workers=2))


def test_a_chain_cannot_end_in_a_codec_that_depends_on_totals():
    with pytest.raises(ConfigError, match="depends on the totals of all workers"):
        Chain(first="top-k(ratio=0.05)", then="dynamic-fixed")


def test_codecs_with_large_errors_are_not_contractions():
    grows = ["ternary", "error-feedback(ternary)", "fixed(bits=1)", "fixed(bits=8, rounding=stochastic)"]
    grows.append("chain(top-k(ratio=0.1), ternary)")
    assert not any(CODECS.build(text).contracts for text in grows)
    assert all(CODECS.build(text).contracts for text in ("top-k", "one-bit", "fixed(bits=2)", "bf16"))
