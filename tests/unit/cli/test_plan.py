"""`echelon plan` on cluster files: nothing is started, and nothing is measured."""

from __future__ import annotations

import json

import pytest

from echelon.plan.check_file import PlanSurroundings, contradictions
from echelon.plan.plan_file import parse_plan


def test_the_best_plan_is_explained_and_says_how_it_is_kept(echelon, cluster):
    ended = echelon("plan", "--cluster", cluster)
    assert ended.code == 0, ended.err
    for words in (
        "machines: 4 nodes on 2 sites, written by hand",
        "job:      lenet, batch 96",
        "predicted:",
        "samples/s, efficiency",
        "bottleneck: computing on east",
        "3 workers, batch 96",
        "32 samples  speed 1  1gbit",
        "east - west  10mbit, 5.0 ms",
        "old: it costs more than it brings",
        "best candidates",
        "equations (1) to (5)",
        "serial",
        "-o plan.toml",
    ):
        assert words in ended.out, words


def test_the_plan_that_is_written_is_right_and_is_the_one_that_was_shown(echelon, cluster, tmp_path):
    ended = echelon("plan", "--cluster", cluster, "-o", "plan.toml")
    assert "to follow it: echelon run --plan plan.toml SCRIPT" in ended.out
    text = (tmp_path / "plan.toml").read_text()
    nodes = dict.fromkeys(["east-0", "east-1", "east-2", "old"], 1.0)
    assert contradictions(text, PlanSurroundings(nodes=nodes)) == ()
    plan = parse_plan(text)
    assert [(worker.node, worker.weight) for worker in plan.workers] == [
        ("east-0", 32),
        ("east-1", 32),
        ("east-2", 32),
    ]
    assert [out.node for out in plan.left_out] == ["old"]
    assert plan.predicted is not None
    assert plan.uplinks[0].rate == "10mbit"
    assert plan.adapt_shares  # the shares are those of the first steps


def test_json_has_plan_prediction_candidates_and_equations(echelon, cluster):
    ended = echelon("plan", "--cluster", cluster, "--json", "--keep", "2", "--batch", "30")
    values = json.loads(ended.out)
    assert values["plan"]["batch"] == 30
    assert values["predicted"]["step_s"] > 0
    assert len(values["candidates"]) == 2
    assert [row["groups"] for row in values["equations"]] == ["serial", "M1", "M1 M2"]
    assert all(row["predicted_s"] > 0 for row in values["equations"])


def test_only_what_is_allowed_is_chosen(echelon, cluster):
    given = ("--cluster", cluster, "--json", "--most-workers", "2")
    plan = json.loads(echelon("plan", *given, "--collective", "butterfly").out)["plan"]
    assert (plan["collective"], plan["codec"], len(plan["workers"])) == ("butterfly", "none", 2)
    plan = json.loads(echelon("plan", *given, "--codec", "one-bit").out)["plan"]
    assert plan["codec"] == "one-bit"


def test_groups_are_those_that_were_asked_for(echelon, cluster):
    given = ("--cluster", cluster, "--json")
    values = json.loads(echelon("plan", *given, "--groups", "equal-power(2)").out)
    assert "2 groups of equal power" in values["notes"][-1]
    grouped = [one["strategy"] for one in values["candidates"] if len(one["strategy"]["nodes"]) == 4]
    assert all(len(one["groups"]) == 2 for one in grouped)


def test_a_plan_names_the_collective_that_was_predicted(echelon, cluster):
    values = json.loads(echelon("plan", "--cluster", cluster, "--json", "--collective", "auto").out)
    assert values["predicted"]["collectives"] == [values["plan"]["collective"]]
    assert values["plan"]["collective"] != "auto"
    assert "which auto becomes here" in values["plan"]["reasons"]["collective"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cluster", "x", "--groups", "equal-powr"], "did you mean equal-power?"),
        (["--cluster", "x", "--groups", "2", "--collective", "ring"], "both say how workers sum"),
        ([], "no machines are given"),
        (["--cluster", "nothing.toml"], "cannot read the cluster file"),
        (["--cluster", "x", "--lab", "two-sites"], "--cluster and --lab both say"),
        (["--lab", "two-sites"], "no job is given"),
        (["--lab", "two-sits", "--model", "lenet"], "did you mean 'two-sites'?"),
        (["--lab", "two-sites", "--model", "lnet"], "did you mean 'lenet'?"),
        (["--lab", "two-sites", "nothing.py"], "there is no script nothing.py"),
        (["--cluster", "x", "--codec", "one-bits"], "did you mean 'one-bit'?"),
        (["--run", "nothing"], "there is no run 'nothing'"),
    ],
)
def test_bad_input_is_named_with_the_way_out(echelon, args, words):
    ended = echelon("plan", *args)
    assert ended.code == 2
    assert words in ended.err
    assert "fix:" in ended.err
    assert "Traceback" not in ended.err


def test_a_cluster_without_a_job_says_what_to_give(echelon, cluster_text, tmp_path):
    (tmp_path / "bare.toml").write_text(cluster_text.partition("[job]")[0])
    ended = echelon("plan", "--cluster", "bare.toml")
    assert ended.code == 2
    assert "give a script, --model M" in ended.err


def test_a_cluster_file_cannot_be_timed(echelon, cluster):
    ended = echelon("plan", "--cluster", cluster, "--time-best")
    assert ended.code == 2
    assert "where: --time-best" in ended.err
