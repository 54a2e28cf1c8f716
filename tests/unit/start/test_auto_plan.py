"""A run plans by itself only where machines and job are known, and never fails because of it."""

from __future__ import annotations

import pytest

from echelon.cluster import probe_cache
from echelon.cluster.lab.spec import parse_lab
from echelon.config.resolve import resolve
from echelon.config.schema import RunSettings, TrainSettings
from echelon.plan.cluster_file import write_cluster
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.plan import PlanRequest, make_plan
from echelon.plan.topology import Node, Topology
from echelon.start.auto_plan import planned_by_itself
from echelon.start.earlier_run import ScriptJob, known_job, script_job
from echelon.start.known_links import cluster_key

NODES = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))


def _job(costs=None):
    return JobProfile(
        name="job",
        batch=70,
        cost=ComputeCost(fixed_s=0.0, per_sample_s=0.01),
        layers=(Layer(name="all", size_bytes=10_000),),
        costs=costs or {},
    )


def _topology(speeds=(1.0, 0.5, 0.25)):
    return Topology(
        nodes=tuple(
            Node(name=name, speed=speed, cores=2, up_bytes_per_s=1e8, down_bytes_per_s=1e8)
            for name, speed in zip(NODES, speeds, strict=True)
        )
    )


def _plan(nodes=NODES):
    return make_plan("", nodes, PlanRequest(), cores=3)


def _knows(script, plan, topology=None, *, settings=None):
    probe_cache.keep(script.key(plan), write_cluster(topology or _topology(), _job()))
    nodes = [worker.node for worker in plan.workers]
    probe_cache.keep(cluster_key(settings or RunSettings(), nodes), write_cluster(topology or _topology()))


def _planned(plan, given=None, spec=None):
    return planned_by_itself(resolve(RunSettings, given or {}), plan, spec, ScriptJob(text="x"))


def test_with_machines_and_job_known_shares_are_planned_and_one_line_says_so():
    plan, script = _plan(), ScriptJob(text="x")
    _knows(script, plan)
    made, notes = _planned(plan)
    assert [worker.weight for worker in made.workers] == [40, 20, 10]
    assert [worker.node for worker in made.workers] == NODES
    assert made.adapt_shares
    assert made.predicted_step_s is not None
    assert (made.codec, made.sync, made.overlap) == (plan.codec, plan.sync, plan.overlap)
    assert len(notes) == 1
    for words in ("an earlier probe", "an earlier run", "40,20,10", "--plan none"):
        assert words in notes[0]


def test_without_a_job_or_without_machines_a_run_starts_as_it_is():
    plan, script = _plan(), ScriptJob(text="x")
    assert _planned(plan) == (plan, [])
    probe_cache.keep(script.key(plan), write_cluster(_topology(), _job()))
    assert _planned(plan) == (plan, [])


@pytest.mark.parametrize(
    "given",
    [
        {"shares": "auto"},
        {"shares": "equal"},
        {"groups": "2,1"},
        {"codec": "one-bit"},
        {"sync": "local(8)"},
    ],
)
def test_what_the_user_said_is_not_planned(given):
    plan = _plan()
    _knows(ScriptJob(text="x"), plan)
    assert _planned(plan, given) == (plan, [])


def test_a_collective_that_the_user_gave_stays():
    plan = _plan()
    _knows(ScriptJob(text="x"), plan)
    made, _ = _planned(plan, {"collective": "butterfly"})
    assert made.collective == "butterfly"


def test_a_machine_that_costs_more_than_it_brings_stays_and_is_named():
    plan = _plan()
    _knows(ScriptJob(text="x"), plan, _topology((1.0, 1.0, 0.001)))
    made, notes = _planned(plan, {"hosts": None})
    assert [worker.node for worker in made.workers] == NODES
    assert len(notes) == 2
    assert "faster without c" in notes[1]
    assert "echelon plan" in notes[1]


@pytest.mark.parametrize("text", ["nonsense [", "known = 3", ""])
def test_a_broken_cache_ends_no_run(text):
    plan, script = _plan(), ScriptJob(text="x")
    _knows(script, plan)
    probe_cache.keep(script.key(plan), text)
    made, notes = _planned(plan)
    assert made == plan
    assert all("cannot be read" in note for note in notes)
    assert known_job(script, plan) == (None, "")  # and it is not read again


def test_a_lab_tells_its_machines_itself():
    cpus = {"a": 0.5, "b": 0.25, "c": 0.25}
    text = "".join(f'[[node]]\nname = "{name}"\ncpu = {cpu}\n' for name, cpu in cpus.items())
    spec = parse_lab(text, file="small.toml", name="small")
    plan = _plan()
    script = ScriptJob(text="x")
    probe_cache.keep(script.key(plan), write_cluster(_topology(), _job()))
    made, notes = _planned(plan, spec=spec)
    assert "the file of lab small" in notes[0]
    assert sum(made.weights) == 70
    assert made.weights[0] > made.weights[1]


def test_another_text_or_argument_of_a_script_is_another_job(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("one")
    first = script_job(RunSettings(), [str(script)])
    assert first is not None
    assert script_job(RunSettings(), [str(script)]) == first
    assert script_job(RunSettings(), [str(script), "--lr"]) != first
    script.write_text("two")
    assert script_job(RunSettings(), [str(script)]) != first
    assert script_job(RunSettings(), ["-m", "package.train"]) is None
    assert script_job(TrainSettings(), []) != script_job(TrainSettings(batch=32), [])
