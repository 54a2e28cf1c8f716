"""What a probe's raw data say: speeds, sites, the job's costs, notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.cluster.allowance import Allowance, ReduceSpeed
from echelon.comm.meet.clocks import ClockOffset
from echelon.comm.meet.flows import FlowRates, Together
from echelon.plan.cluster_file import read_cluster, write_cluster
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.start import probe as probing
from echelon.start.known_links import cached_topology, cluster_key
from echelon.start.probe import ProbeAsked
from echelon.start.probe_result import Probed, conclude, node_names
from echelon.train.probe_job import (
    ModelAsked,
    NodeProbe,
    cached_profile,
    keep_profile,
    missing_memory,
    profile_key,
)
from echelon.zoo.dataset import SampleSpec

ALLOWED = Allowance(cpu="a", cores=0.5, quota=0.5, memory_bytes=1e9, cache_bytes=1 << 20, workers_here=1)
SAMPLE = SampleSpec(shape=(1, 8, 8), dtype="float32", classes=10, task="classify")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))


def _flows(sites: str, *, inside: float = 125e6, between: float = 12.5e6) -> FlowRates:
    """Members in sites, by letter: a flow alone has the rate of its way, all across share it."""
    size = len(sites)
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    rates = {(a, b): inside if sites[a] == sites[b] else between for a, b in pairs}
    across = tuple((a, b) for a, b in zip(range(size), reversed(range(size)), strict=True) if a < b)
    return FlowRates(
        size=size,
        latency_s=dict.fromkeys(pairs, 1e-4),
        bytes_per_s=rates,
        together=(Together(flows=across, bytes_per_s=(between / len(across),) * len(across)),),
    )


def _node(rank: int, flows: FlowRates, **given: object) -> NodeProbe:
    return NodeProbe(
        **{  # type: ignore[arg-type]
            "rank": rank,
            "node": f"n{rank}",
            "allowed": ALLOWED,
            "threads": 1,
            "reduce": ReduceSpeed(bytes_per_s={1024: 2e9, 4096: 5e9}),
            "clock": ClockOffset(offset_s=rank * 0.1),
            "flows": flows,
            "step_s": 0.01,
            **given,
        }
    )


def _profile(per_sample_s: float) -> JobProfile:
    return JobProfile(
        name="net",
        batch=40,
        cost=ComputeCost(fixed_s=0.0, per_sample_s=per_sample_s),
        layers=(Layer(name="w", size_bytes=400),),
    )


def test_sites_are_found_in_mixed_order_and_speeds_are_relative_to_the_fastest() -> None:
    flows = _flows("ababab"[:4] + "ba")
    found = conclude([_node(rank, flows, step_s=0.01 * (1 + rank)) for rank in range(6)], known="k")
    sites = [node.site for node in found.topology.nodes]
    assert len(set(sites)) == 2
    assert [site == sites[0] for site in sites] == [letter == "a" for letter in "ababba"]
    assert [node.speed for node in found.topology.nodes] == pytest.approx(
        [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6]
    )
    first = found.topology.nodes[1]
    assert (first.cores, first.cache_bytes, first.reduce_bytes_per_s) == (0.5, 1 << 20, 5e9)
    assert first.clock_offset_s == pytest.approx(0.1)
    assert found.reasons
    assert found.job is None
    assert found.topology.known == "k"
    read_cluster(write_cluster(found.topology, found.job, measured=found.measured()), "c.toml")


def test_job_has_the_cost_of_every_node_and_is_that_of_the_fastest() -> None:
    flows = _flows("aa")
    found = conclude(
        [_node(0, flows, profile=_profile(2e-3)), _node(1, flows, profile=_profile(1e-3))], known=""
    )
    assert found.job is not None
    assert found.job.cost == _profile(1e-3).cost
    assert found.job.costs == {"n0": _profile(2e-3).cost, "n1": _profile(1e-3).cost}
    assert [node.speed for node in found.topology.nodes] == pytest.approx([0.5, 1.0])


def test_node_that_the_model_does_not_fit_is_noted() -> None:
    flows = _flows("aa")
    found = conclude(
        [_node(0, flows, profile=_profile(1e-3)), _node(1, flows, misfit="1 GB are missing")], known=""
    )
    assert found.job is not None
    assert list(found.job.costs) == ["n0"]
    assert found.notes == ("n1: 1 GB are missing",)
    nowhere = conclude([_node(0, FlowRates(size=1), step_s=0.0, misfit="too large")], known="")
    assert nowhere.job is None


def test_pairs_that_were_left_out_are_noted() -> None:
    flows = FlowRates(size=3, latency_s={(0, 1): 1e-4, (1, 2): 1e-4, (2, 0): 1e-4},
                      bytes_per_s={(0, 1): 1e8, (1, 2): 1e8, (2, 0): 1e8})  # fmt: skip
    found = conclude([_node(rank, flows) for rank in range(3)], known="")
    assert found.notes == ("3 of 6 directed pairs were measured, in the time that there was",)
    assert len(found.topology.nodes) == 3


def test_workers_of_one_node_are_numbered() -> None:
    assert node_names(["a", "b", "a"]) == ["a-0", "b", "a-1"]


def test_profile_is_kept_for_the_same_machine_quota_and_model_only() -> None:
    asked = ModelAsked(model="lenet", sample=SAMPLE, batch=40)
    key = profile_key(asked, ALLOWED, threads=1)
    keep_profile(key, _profile(1e-3))
    found = cached_profile(key)
    assert found is not None
    assert found[0] == _profile(1e-3)
    others = [
        profile_key(asked, ALLOWED, threads=2),
        profile_key(ModelAsked(model="mlp", sample=SAMPLE, batch=40), ALLOWED, threads=1),
        profile_key(ModelAsked(model="lenet", sample=SAMPLE, batch=41), ALLOWED, threads=1),
        profile_key(
            asked,
            Allowance(cpu="a", cores=1, quota=None, memory_bytes=1, cache_bytes=0, workers_here=1),
            threads=1,
        ),
        key.replace("profile on ", "profile on another-"),
    ]
    assert len({key, *others}) == 6
    assert not any(cached_profile(other) for other in others)


def test_model_that_does_not_fit_says_how_much_is_missing() -> None:
    asked = ModelAsked(model="mlp(width=1000)", sample=SAMPLE, batch=8)
    assert missing_memory(asked, 1e12) == ""
    assert "are missing" in missing_memory(asked, 1000.0)


def test_topology_is_found_again_for_the_same_nodes_and_launcher() -> None:
    asked = ProbeAsked(hosts="a,b")
    found = conclude([_node(rank, _flows("aa")) for rank in range(2)], known="k")
    assert isinstance(found, Probed)
    assert cached_topology(asked, ["n0", "n1"]) is None
    probing.probe_cache.keep(cluster_key(asked, ["n0", "n1"]), write_cluster(found.topology))
    again = cached_topology(asked, ["n0", "n1"])
    assert again is not None
    assert [node.name for node in again.nodes] == ["n0", "n1"]
    assert cached_topology(ProbeAsked(hosts="a,c"), ["n0", "n1"]) is None
    assert cached_topology(ProbeAsked(lab="two-sites"), ["n0", "n1"]) is None
