"""`echelon what-if` on a run's folder that is written by hand."""

from __future__ import annotations

import json

import pytest

from echelon.observe.events import BucketReduced, StepEnded, encode
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan, PlannedUplink, WorkerPlan

_PER_SAMPLE_S = (0.001, 0.002)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """Two workers on two sites, twenty steps of 60 ms."""
    folder = RunFolder(tmp_path / "runs" / "2025-demo").with_subfolders()
    sites = ("east", "west")
    plan = Plan(
        run="2025-demo",
        workers=tuple(
            WorkerPlan(rank=rank, node=f"{site}-0", site=site, link="1gbit")
            for rank, site in enumerate(sites)
        ),
        uplinks=(PlannedUplink(between=("east", "west"), rate="10mbit"),),
    )
    folder.plan.write_text(plan.to_toml())
    for rank in range(2):
        lines = []
        for step in range(20):
            share = 16 if step % 5 else 8
            compute_s = _PER_SAMPLE_S[rank] * (4 + share)
            at = step * 0.06
            lines.append(
                BucketReduced(
                    t=at,
                    rank=rank,
                    step=step,
                    index=0,
                    size_bytes=50_000,
                    sent_bytes=50_000,
                    start=at + compute_s,
                    encode_s=0.0,
                    begun=0.0,
                    sent=0.0,
                    ended=0.0,
                    adding_s=0.0,
                    wait_s=0.0,
                )
            )
            lines.append(
                StepEnded(
                    t=at,
                    rank=rank,
                    step=step,
                    epoch=0,
                    start=at,
                    data_s=0.0,
                    compute_s=compute_s,
                    arrival=at + compute_s,
                    wait_s=0.01,
                    apply_s=0.0001,
                    share=share,
                    batch=32,
                    sent_bytes=50_000,
                )
            )
        folder.events_of(rank).write_bytes(b"".join(encode(event) + b"\n" for event in lines))
    return folder


def test_both_runs_are_shown_with_the_difference_its_reason_and_the_calibration(echelon, folder):
    ended = echelon("what-if", "latest", "--link", "east/west=1gbit")
    assert ended.code == 0, ended.err
    for words in (
        "The recorded run took 60.0 ms for a step",
        "so predictions are multiplied by",
        "recorded",
        "changed",
        "not hidden",
        "A step is expected to take",
        "Why: communication that computing does not hide falls from",
    ):
        assert words in ended.out, words


def test_json_says_what_the_change_would_bring(echelon, folder):
    def expected_s(*args: str) -> float:
        values = json.loads(echelon("what-if", "2025-demo", *args, "--json").out)
        assert values["calibration"] == pytest.approx(0.06 / values["recorded"]["step_s"])
        return values["expected_s"]

    assert expected_s("--link", "east/west=1gbit") < 0.06
    assert expected_s("--link", "east/west=1mbit") > 0.06
    assert expected_s("--link", "east/west=1gbit", "--add", "east-0:2") < expected_s(
        "--link", "east/west=1gbit"
    )
    assert expected_s("--codec", "one-bit") < 0.06


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "nothing is changed"),
        (["--add", "east0"], "did you mean 'east-0'?"),
        (["--drop", "wst-0"], "did you mean 'west-0'?"),
        (["--link", "east/wst=1gbit"], "did you mean 'east/west'?"),
        (["--codec", "one-bits"], "did you mean 'one-bit'?"),
        (["--collective", "rang"], "did you mean 'ring'?"),
        (["--sync", "ful"], "did you mean 'full'?"),
        (["--overlap", "none"], "where: --overlap"),
    ],
)
def test_bad_input_is_named_with_the_nearest(echelon, folder, args, words):
    ended = echelon("what-if", "latest", *args)
    assert ended.code == 2
    assert words in ended.err


def test_a_run_that_is_not_there_is_named(echelon):
    ended = echelon("what-if", "nothing", "--add", "a")
    assert ended.code == 2
    assert "there is no run 'nothing'" in ended.err
