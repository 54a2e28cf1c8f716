"""What a codec saved is told in a sentence, from the events of buckets."""

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


def test_nothing_is_told_where_gradients_travel_as_they_are():
    found = CodecTally()
    found.bucket(bucket(0, 0, sent=4_000_000, how="dense"))
    found.bucket(bucket(0, 0, sent=1_000_000, how="factors"))
    assert found.coding() is None


def test_what_was_sent_is_compared_with_a_ring():
    found = CodecTally()
    for step in range(3):
        for rank in range(4):
            found.bucket(bucket(rank, step, sent=15_000, how="dgc"))
            found.bucket(bucket(rank, step, sent=15_000, how="dgc"))
            found.bucket(bucket(rank, step, sent=9_999_999, how="dense"))
    coding = found.coding()
    assert coding is not None
    assert (coding.workers, coding.rounds, coding.sent_bytes) == (4, 12, 360_000)
    assert coding.dense_bytes == 2 * 3 / 4 * 24 * 4_000_000
    assert coding.sentence == (
        "Codec dgc: a worker sent 30.0 kB a step where a ring sends 12.0 MB, 400.0 times less; "
        "it took 12.0 ms to write and read."
    )


def test_between_sites_what_travels_inside_is_told_apart():
    found = CodecTally()
    for rank in range(4):
        found.bucket(bucket(rank, 0, sent=2_010_000, coded=10_000, how="between(top-k)"))
    coding = found.coding()
    assert coding is not None
    assert coding.sentence == (
        "Codec between(top-k): a worker sent 10.0 kB a step to other sites, encoded, and 2.0 MB inside "
        "its own; it took 6.0 ms to write and read."
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


def test_with_servers_pushes_and_pulls_are_told():
    found = CodecTally()
    found.server(server(4, codec="top-k", pushed=2_000_000, pulled=3_000_000))
    found.server(server(5, codec="top-k", pushed=3_000_000, pulled=6_000_000))
    coding = found.coding()
    assert coding is not None
    assert coding.sentence == (
        "Codec top-k: a worker pushed 50.0 kB where a gradient has 2.0 MB, 40.0 times less; "
        "weights that it was handed took 20.0 times less."
    )


def test_servers_without_a_codec_have_nothing_to_tell():
    found = CodecTally()
    found.server(server(4, codec="none", pushed=100_000_000, pulled=90_000_000))
    assert found.coding() is None
