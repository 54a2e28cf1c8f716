"""Decides whether a codec pays on these links: by formula, from measured links and codec speeds.

For n bytes of gradients, P workers, beta seconds per byte, alpha seconds per message, and a codec that
makes n bytes r times smaller and needs e and d seconds per byte of gradient to encode and decode it:

    dense    the cheapest collective (`comm/schedule/cost.py`), about 2 (P-1)/P n beta
    gather   2 alpha + (P-1) n/r beta                    + n e + P n d
    scatter  4 alpha + 2 (P-1)/P n/r beta                + n e + (1 + (P-1)/P) n d
    sum      the cheapest collective for n/r bytes       + n e + n d

Between sites, gradients are summed inside first, at the rate of the links there: 2 (g-1)/g n beta' more.
The workers of a site share its uplink, which carries n bytes for each site.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from echelon.codec.codec import Codec, CodecContext, Summed, Travels
from echelon.comm.meet.links import Links
from echelon.comm.schedule.cost import LinkCost, choose
from echelon.config.units import show_seconds

_SAMPLE = 1 << 18
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpeed:
    """How much smaller a codec makes a gradient on this machine, and how fast."""

    travels: Travels
    smaller: float
    encode_s_per_byte: float
    read_s_per_byte: float
    rounds: int = 1
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """The chosen codec or "none", between sites only or everywhere, and the reason."""

    codec: str
    between: bool
    reason: str


def measure(codec: Codec) -> CodecSpeed:
    """Encode and decode a sample of a megabyte; takes milliseconds for most codecs."""
    values = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(values)
    state = codec.begin(_SAMPLE)
    encode_s, read_s, size_bytes = [], [], values.numel() * 4
    for step in range(_ROUNDS):
        context = CodecContext(step=step, shape=(512, _SAMPLE // 512))
        begun = time.perf_counter()
        if isinstance(codec, Summed):
            numbers = codec.first(values, state, context)
            sent = numbers.numel() * 4
            for _ in range(codec.rounds - 1):
                numbers = codec.further(numbers, state, context)
                sent += numbers.numel() * 4
        else:
            payload = codec.encode(values, state, context)
            sent = payload.numel()
        written = time.perf_counter()
        if isinstance(codec, Summed):
            codec.finish(numbers, out, state, context)
        else:
            codec.read(payload, out, context)
        encode_s.append(written - begun)
        read_s.append(time.perf_counter() - written)
    return CodecSpeed(
        travels=codec.travels,
        smaller=size_bytes / max(1, sent),
        encode_s_per_byte=min(encode_s) / size_bytes,
        read_s_per_byte=min(read_s) / size_bytes,
        rounds=codec.rounds if isinstance(codec, Summed) else 1,
        whole=codec.whole,
    )


def seconds(speed: CodecSpeed, workers: int, length_bytes: float, link: LinkCost) -> float:
    """The seconds that workers need to exchange gradients of so many bytes with a codec."""
    if workers == 1:
        return 0.0
    small = length_bytes / speed.smaller
    encode_s = length_bytes * speed.encode_s_per_byte
    read_s = length_bytes * speed.read_s_per_byte
    if speed.travels == "gather":
        wire_s = 2 * link.latency_s + (workers - 1) * small * link.seconds_per_byte
        return wire_s + encode_s + workers * read_s
    others = (workers - 1) / workers
    if speed.travels == "scatter":
        wire_s = 4 * link.latency_s + 2 * others * small * link.seconds_per_byte
        return wire_s + encode_s + (1 + others) * read_s
    each_s = dense_seconds(workers, small / speed.rounds, link)
    return speed.rounds * each_s + encode_s + read_s


def dense_seconds(workers: int, length_bytes: float, link: LinkCost) -> float:
    """The seconds of the cheapest collective."""
    name, costs, _ = choose(workers, max(1, int(length_bytes)), link)
    return costs[name]


def decide(
    speeds: Mapping[str, CodecSpeed],
    *,
    length_bytes: int,
    links: Links,
    sites: Sequence[Sequence[int]] = (),
    margin: float = 1.0,
) -> CodecChoice:
    """The cheapest of none and the codecs, everywhere or between sites; a codec must win by the margin."""
    slowest = links.slowest
    dense_s = dense_seconds(links.size, length_bytes, slowest)
    costs = {
        (text, False): seconds(speed, links.size, length_bytes, slowest) for text, speed in speeds.items()
    }
    if len(sites) > 1:
        inside_s = max(dense_seconds(len(site), length_bytes, _within(links, site)) for site in sites)
        dense_s = min(dense_s, inside_s + dense_seconds(len(sites), length_bytes, slowest))
        parts = {text: speed for text, speed in speeds.items() if not speed.whole}
        for text, speed in parts.items():
            costs[text, True] = inside_s + seconds(speed, len(sites), length_bytes, slowest)
    if not costs:
        return CodecChoice(codec="none", between=False, reason="none: there are no codecs to choose from")
    (text, between), best_s = min(costs.items(), key=lambda item: item[1])
    name = f"between({text})" if between else text
    against = f"{show_seconds(best_s)} a step with {name}, {show_seconds(dense_s)} without any codec"
    if best_s * margin < dense_s:
        return CodecChoice(codec=text, between=between, reason=f"{name}: {against}, as measured")
    return CodecChoice(codec="none", between=False, reason=f"none: {against}, as measured")


def _within(links: Links, site: Sequence[int]) -> LinkCost:
    """The slowest measured link inside a site; the slowest of all if none was measured there."""
    pairs = [pair for pair in links.bytes_per_s if pair[0] in site and pair[1] in site]
    if not pairs:
        return links.slowest
    return LinkCost(
        latency_s=max(links.latency_s[pair] for pair in pairs),
        seconds_per_byte=max(1 / links.bytes_per_s[pair] for pair in pairs),
    )
