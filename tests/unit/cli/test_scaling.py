"""`echelon simulate --nodes`: many nodes like one of a cluster file."""

from __future__ import annotations

import json

import pytest

from echelon.cli.scaling import ScalingAsked, scaled
from echelon.plan.cluster_file import read_cluster


def test_the_curve_and_the_steps_of_many_nodes_are_shown(echelon, cluster, tmp_path):
    ended = echelon("simulate", "--nodes", "20", "--like", "east-1", "--cluster", cluster, "-o", "s.html")
    assert ended.code == 0, ended.err
    assert "20 nodes like east-1, lenet, batch 96" in ended.out
    assert "100 steps: median" in ended.out
    assert [line.split()[0] for line in ended.out.splitlines() if line.strip()[:1].isdigit()][-5:] == [
        "1",
        "2",
        "5",
        "10",
        "20",
    ]
    page = (tmp_path / "s.html").read_text()
    assert "samples per second by the number of nodes" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_the_simulated_steps_agree_with_the_last_point_of_the_curve(cluster_text):
    found = read_cluster(cluster_text, "x")
    assert found.job is not None
    without = scaled(found.topology, found.job, ScalingAsked(nodes=40, like="east-0", noise=0.0, steps=5))
    predicted = without.curve[-1][1].step_s
    assert without.step_s == pytest.approx([predicted] * 5, rel=0.02)
    noisy = scaled(found.topology, found.job, ScalingAsked(nodes=40, like="east-0", noise=0.3, steps=50))
    assert sum(noisy.step_s) / 50 > predicted


def test_a_growing_batch_keeps_every_node_busy(echelon, cluster):
    given = ("simulate", "--nodes", "500", "--cluster", cluster, "--json")
    ended = echelon(*given)
    assert ended.code == 2
    assert "--grow" in ended.err
    grown = json.loads(echelon(*given, "--grow", "--steps", "3").out)
    assert [point["nodes"] for point in grown["curve"]] == [1, 2, 5, 10, 20, 50, 100, 200, 500]
    assert grown["curve"][-1]["predicted"]["efficiency"] > 0.5
    assert len(grown["steps_s"]) == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nodes", "10", "--like", "est-1"], "did you mean 'east-1'?"),
        (["--nodes", "0"], "where: --nodes"),
        (["--nodes", "10001", "--grow"], "where: --nodes"),
        (["--nodes", "10", "--sync", "async"], "--sync is not for --nodes"),
        (["--nodes", "10", "--replay", "latest"], "--replay is not for --nodes"),
    ],
)
def test_bad_input_is_named(echelon, cluster, args, words):
    ended = echelon("simulate", "--cluster", cluster, *args)
    assert ended.code == 2
    assert words in ended.err


def test_options_of_many_nodes_need_their_number(echelon):
    ended = echelon("simulate", "--like", "node-a")
    assert ended.code == 2
    assert "--like is for --nodes" in ended.err
