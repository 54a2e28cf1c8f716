"""Whether a codec pays, by the formulas, on slow, fast and mixed links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.codec.codec import CODECS
from echelon.codec.codecs.auto import AutoCodec
from echelon.comm.meet.links import Links
from echelon.comm.schedule.cost import LinkCost
from echelon.reduce.encoded import cost
from echelon.reduce.encoded.cost import CodecSpeed, decide, dense_seconds, seconds

MB = 1_000_000
WAN = 10 * MB / 8  # 10 Mb/s, in bytes per second
LAN = 1000 * MB / 8
SPARSE = CodecSpeed(travels="gather", smaller=60.0, encode_s_per_byte=1e-9, read_s_per_byte=1e-10)
HALF = CodecSpeed(travels="scatter", smaller=2.0, encode_s_per_byte=2e-10, read_s_per_byte=2e-10)
THIN = CodecSpeed(travels="sum", smaller=30.0, encode_s_per_byte=3e-9, read_s_per_byte=1e-9)
SPEEDS = {"top-k(ratio=0.01)": SPARSE, "error-feedback(bf16)": HALF}


def links(size, bytes_per_s, *, inside=0.0, sites=(), latency_s=1e-4):
    """All pairs; those of one site have links of their own."""
    pairs = [(one, other) for one in range(size) for other in range(size) if one != other]
    near = [{one, other} <= set(site) for one, other in pairs for site in sites]
    rates = {}
    for at, pair in enumerate(pairs):
        together = any(near[at * len(sites) : (at + 1) * len(sites)])
        rates[pair] = inside if together else bytes_per_s
    return Links(size=size, latency_s=dict.fromkeys(pairs, latency_s), bytes_per_s=rates)


def link(bytes_per_s, latency_s=0.0):
    return LinkCost(latency_s=latency_s, seconds_per_byte=1 / bytes_per_s)


def test_single_worker_has_no_cost():
    assert all(seconds(speed, 1, MB, link(WAN)) == 0 for speed in (SPARSE, HALF, THIN))


@pytest.mark.parametrize(
    ("speed", "wanted_s"),
    [
        # (P-1) n/r beta + n e + P n d
        (SPARSE, 3 * 8 * MB / 60 / WAN + 8 * MB * 1e-9 + 4 * 8 * MB * 1e-10),
        # 2 (P-1)/P n/r beta + n e + (1 + (P-1)/P) n d
        (HALF, 1.5 * 8 * MB / 2 / WAN + 8 * MB * 2e-10 + 1.75 * 8 * MB * 2e-10),
        # the best all-reduce of n/r bytes + n e + n d
        (THIN, dense_seconds(4, 8 * MB / 30, link(WAN)) + 8 * MB * 4e-9),
    ],
)
def test_cost_of_each_way_of_combining_equals_its_formula(speed, wanted_s):
    assert seconds(speed, 4, 8 * MB, link(WAN)) == pytest.approx(wanted_s)


@given(
    workers=st.integers(2, 64),
    size_bytes=st.integers(1, 10**9),
    rate=st.floats(1e4, 1e10),
    latency_s=st.floats(0, 0.1),
)
@settings(max_examples=25, deadline=None)
def test_slower_links_and_longer_messages_never_take_less(workers, size_bytes, rate, latency_s):
    for speed in (SPARSE, HALF, THIN):
        now = seconds(speed, workers, size_bytes, link(rate, latency_s))
        assert seconds(speed, workers, size_bytes, link(rate / 2, latency_s)) >= now
        assert seconds(speed, workers, size_bytes * 2, link(rate, latency_s)) >= now
        assert now > 0


def test_on_a_thin_link_a_codec_is_chosen_and_the_reason_has_both_times():
    choice = decide(SPEEDS, length_bytes=8 * MB, links=links(4, WAN), margin=1.2)
    assert (choice.codec, choice.between) == ("top-k(ratio=0.01)", False)
    assert choice.reason.startswith("top-k(ratio=0.01): ")
    assert "a step with top-k(ratio=0.01)" in choice.reason
    assert "without any codec" in choice.reason


def test_on_a_fast_link_none_is_chosen():
    slow = {"top-k": CodecSpeed(travels="gather", smaller=60, encode_s_per_byte=1e-8, read_s_per_byte=1e-9)}
    choice = decide(slow, length_bytes=8 * MB, links=links(4, 10 * LAN), margin=1.2)
    assert (choice.codec, choice.between) == ("none", False)
    assert choice.reason.startswith("none: ")


def test_a_codec_has_to_win_by_the_margin():
    dense_s = dense_seconds(2, 8 * MB, link(LAN, 1e-4))
    half_s = seconds(HALF, 2, 8 * MB, link(LAN, 1e-4))
    ratio = dense_s / half_s
    assert 1 < ratio < 2
    for margin, wanted in ((ratio * 0.99, "error-feedback(bf16)"), (ratio * 1.01, "none")):
        choice = decide(
            {"error-feedback(bf16)": HALF}, length_bytes=8 * MB, links=links(2, LAN), margin=margin
        )
        assert choice.codec == wanted


SITES = ((0, 1, 2, 3), (4, 5, 6, 7))


def test_codec_is_used_between_sites_if_only_those_links_are_slow():
    found = links(8, WAN, inside=100 * LAN, sites=SITES)
    choice = decide(SPEEDS, length_bytes=8 * MB, links=found, sites=SITES)
    assert (choice.codec, choice.between) == ("top-k(ratio=0.01)", True)
    assert choice.reason.startswith("between(top-k(ratio=0.01)): ")


def test_codec_is_used_everywhere_if_all_links_are_slow():
    choice = decide(SPEEDS, length_bytes=8 * MB, links=links(8, WAN), sites=SITES)
    assert (choice.codec, choice.between) == ("top-k(ratio=0.01)", False)


def test_sites_of_one_worker_add_nothing_inside():
    lonely = ((0,), (1,))
    choice = decide(SPEEDS, length_bytes=8 * MB, links=links(2, WAN), sites=lonely)
    assert choice.codec == "top-k(ratio=0.01)"


def test_links_inside_a_site_that_were_not_measured_count_as_the_slowest():
    pairs = [(rank, (rank + 1) % 4) for rank in range(4)]
    ring = Links(size=4, latency_s=dict.fromkeys(pairs, 1e-4), bytes_per_s=dict.fromkeys(pairs, WAN))
    choice = decide(SPEEDS, length_bytes=8 * MB, links=ring, sites=((0, 2), (1, 3)))
    assert (choice.codec, choice.between) == ("top-k(ratio=0.01)", False)


def test_none_is_chosen_without_candidates():
    choice = decide({}, length_bytes=8 * MB, links=links(4, WAN))
    assert (choice.codec, choice.between) == ("none", False)


@pytest.mark.parametrize("text", [*AutoCodec().candidates, "power-sgd", "none", "dgc"])
def test_the_measured_size_is_that_of_the_codec(text):
    codec = CODECS.build(text)
    speed = cost.measure(codec)
    assert speed.travels == codec.travels
    assert min(speed.encode_s_per_byte, speed.read_s_per_byte) > 0
    least, most = {
        "error-feedback(bf16)": (1.9, 2.01),
        "one-bit": (30, 33),
        "top-k(ratio=0.01)": (60, 90),
        "power-sgd": (100, 140),
        "none": (1, 1),
        "dgc": (500, 1000),
    }[text]
    assert least <= speed.smaller <= most
