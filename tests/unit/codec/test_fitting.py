"""Unsupported combinations with a codec are refused, with a fix."""

from __future__ import annotations

import pytest

from echelon.codec import fitting
from echelon.codec.codec import CODECS
from echelon.errors import ConfigError


@pytest.mark.parametrize("text", ["top-k", "one-bit", "between(fp16)", "dgc"])
def test_summing_servers_refuse_codecs_that_write_bytes(text):
    with pytest.raises(ConfigError, match="can only add numbers") as refused:
        fitting.refuse_sums(CODECS.build(text), 1)
    assert "leave out --servers" in refused.value.fix


@pytest.mark.parametrize("text", ["none", "random-k", "power-sgd", "auto"])
def test_summing_servers_accept_codecs_that_write_numbers(text):
    fitting.refuse_sums(CODECS.build(text), 2)


def test_without_servers_nothing_is_refused():
    fitting.refuse_sums(CODECS.build("top-k"), 0)


@pytest.mark.parametrize("text", ["dgc", "between(dgc)", "chain(dgc, fp16)"])
def test_momentum_is_applied_once(text):
    codec = CODECS.build(text)
    fitting.refuse_momentum(codec, 0.0, "SGD")
    with pytest.raises(ConfigError, match="momentum would be applied twice") as refused:
        fitting.refuse_momentum(codec, 0.5, "SGD")
    assert "momentum=0" in refused.value.fix


def test_a_codec_between_sites_needs_two_sites_and_subgroups():
    fitting.check_sites([[0, 1], [2]])
    with pytest.raises(ConfigError, match="two sites or more"):
        fitting.check_sites([[0, 1, 2]])
    fitting.refuse_transport("tcp")
    with pytest.raises(ConfigError, match="own transports"):
        fitting.refuse_transport("c10d")


def test_weights_are_not_encoded():
    for text in ("none", "auto"):
        fitting.refuse_for_weights(text, "local")
    with pytest.raises(ConfigError, match="sync local averages weights"):
        fitting.refuse_for_weights("fp16", "local")


def test_codecs_that_a_server_cannot_read_push_by_push_are_refused():
    assert fitting.served_codec("none") is None
    assert fitting.served_codec("top-k(ratio=0.1)") == CODECS.build("top-k(ratio=0.1)")
    for text in ("random-k", "power-sgd", "auto", "between(fp16)"):
        with pytest.raises(ConfigError):
            fitting.served_codec(text)


def test_two_texts_of_one_codec_are_the_same_codec():
    assert fitting.same_codec("top-k(0.05)", "top-k(ratio=0.05)")
    assert fitting.same_codec("between(top-k(0.05))", "between(top-k(ratio=0.05))")
    assert not fitting.same_codec("top-k(0.05)", "between(top-k(0.05))")
    assert not fitting.same_codec("top-k", "somebodys-codec")
