"""The sentence on what a codec saved."""

from __future__ import annotations

from echelon.observe.encoding import CodecTally
from echelon.observe.events import BucketReduced, ServerEnded


def bucket(
    rank: int, step: int, *, size: int = 4_000_000, sent: int, how: str, coded: int | None = None
) -> BucketReduced:
    return BucketReduced(
        t=0.0,
        rank=rank,
        step=step,
        index=0,
        size_bytes=size,
        sent_bytes=sent,
        start=0.0,
        encode_s=0.004,
        begun=0.0,
        sent=0.0,
        ended=0.0,
        adding_s=0.002,
        wait_s=0.0,
        how=how,
        coded_bytes=sent if coded is None else coded,
    )


def test_there_are_no_figures_without_encoded_buckets():
    tally = CodecTally()
    tally.bucket(bucket(0, 0, sent=4_000_000, how="dense"))
    tally.bucket(bucket(0, 0, sent=1_000_000, how="factors"))
    assert tally.figures() is None


def test_sent_bytes_are_compared_with_a_ring():
    tally = CodecTally()
    for step in range(3):
        for rank in range(4):
            tally.bucket(bucket(rank, step, sent=15_000, how="dgc"))
            tally.bucket(bucket(rank, step, sent=15_000, how="dgc"))
            tally.bucket(bucket(rank, step, sent=9_999_999, how="dense"))
    figures = tally.figures()
    assert figures is not None
    assert (figures.workers, figures.rounds, figures.sent_bytes) == (4, 12, 360_000)
    assert figures.dense_bytes == 2 * 3 / 4 * 24 * 4_000_000
    assert figures.sentence == (
        "Codec dgc: per step, a worker sent 30.0 kB; a ring without a codec sends 12.0 MB, so it sent "
        "400.0 times fewer bytes; encoding and decoding took 12.0 ms."
    )


def test_bytes_inside_a_site_are_separate_from_encoded_bytes():
    tally = CodecTally()
    for rank in range(4):
        tally.bucket(bucket(rank, 0, sent=2_010_000, coded=10_000, how="between(top-k)"))
    figures = tally.figures()
    assert figures is not None
    assert figures.sentence == (
        "Codec between(top-k): per step, a worker sent 10.0 kB to other sites, encoded, and 2.0 MB inside "
        "its own site; encoding and decoding took 6.0 ms."
    )


def server(rank: int, *, codec: str, pushed: int, pulled: int) -> ServerEnded:
    return ServerEnded(
        t=0.0,
        rank=rank,
        queue_s=0.0,
        apply_s=0.0,
        hand_s=0.0,
        pushes=100,
        codec=codec,
        pushed_bytes=pushed,
        dense_pushed_bytes=100_000_000,
        pulled_bytes=pulled,
        dense_pulled_bytes=90_000_000,
    )


def test_with_servers_the_sentence_has_pushes_and_pulls():
    tally = CodecTally()
    tally.server(server(4, codec="top-k", pushed=2_000_000, pulled=3_000_000))
    tally.server(server(5, codec="top-k", pushed=3_000_000, pulled=6_000_000))
    figures = tally.figures()
    assert figures is not None
    assert figures.sentence == (
        "Codec top-k: a worker pushed 50.0 kB per step instead of 2.0 MB, 40.0 times fewer bytes; "
        "the weights it received took 20.0 times fewer bytes."
    )


def test_servers_without_a_codec_have_no_figures():
    tally = CodecTally()
    tally.server(server(4, codec="none", pushed=100_000_000, pulled=90_000_000))
    assert tally.figures() is None
