"""`echelon what-if` on a run's folder that is written by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from echelon.observe.events import BucketReduced, StepEnded, encode
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import write_summary
from echelon.plan.cluster_file import write_cluster
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.plan import Plan, PlannedUplink, WorkerPlan
from echelon.plan.topology import Node, Topology, Uplink
from echelon.simulate.recorded_cluster import recorded_run

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


def test_a_run_s_own_measurements_are_used_and_broken_ones_are_told(echelon, folder):
    plan = Plan.read(folder.plan)
    workers = tuple(replace(worker, link="", site="") for worker in plan.workers)
    folder.plan.write_text(replace(plan, workers=workers, uplinks=()).to_toml())
    nodes = tuple(
        Node(name=f"{site}-0", site=site, up_bytes_per_s=1e8, down_bytes_per_s=1e8)
        for site in ("east", "west")
    )
    measured = Topology(nodes=nodes, uplinks=(Uplink(between=("east", "west"), bytes_per_s=1e6),))
    layers = (Layer(name="first", size_bytes=20_000), Layer(name="last", size_bytes=30_000, ready_at=0.5))
    cost = ComputeCost(fixed_s=0.0, per_sample_s=0.001)
    job = JobProfile(name="job", batch=32, cost=cost, layers=layers, base_bytes=1e6)
    folder.cluster.write_text(write_cluster(measured, job))
    slow = recorded_run(folder)
    assert [node.site for node in slow.topology.nodes] == ["east", "west"]
    assert slow.topology.uplinks[0].bytes_per_s == 1e6
    assert [layer.name for layer in slow.job.layers] == ["first", "last"]
    assert slow.topology.node("west-0").speed == pytest.approx(0.5)
    ended = echelon("what-if", "latest", "--link", "east/west=1gbit")
    assert ended.code == 0, ended.err
    assert "times as fast" in ended.out
    planned = echelon("plan", "--run", "latest", "--runs", str(folder.path.parent))
    assert "in the run's cluster.toml" in planned.out
    folder.cluster.write_text("nonsense [")
    assert "cluster.toml cannot be read" in recorded_run(folder).notes[-1]


def test_a_run_that_is_not_there_is_named(echelon):
    ended = echelon("what-if", "nothing", "--add", "a")
    assert ended.code == 2
    assert "there is no run 'nothing'" in ended.err


def test_the_summary_has_the_plan_s_prediction_beside_the_measured_step(folder):
    assert write_summary(folder).prediction is None
    plan = Plan.read(folder.plan)
    folder.plan.write_text(replace(plan, predicted_step_s=0.03).to_toml())
    score = write_summary(folder).prediction
    assert score is not None
    assert (score.predicted_step_s, score.measured_step_s) == pytest.approx((0.03, 0.06))
    assert score.ratio == pytest.approx(2.0)
    assert json.loads(folder.summary.read_text())["prediction"]["ratio"] == pytest.approx(2.0)
