from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cluster.lab.spec import read_lab
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError
from echelon.start.planned import by_plan, in_order_of_plan

_PLAN = """\
batch = 60
codec = "one-bit"
seed = 7
workers = [
    { node = "west-1", weight = 20 },
    { node = "east-0", weight = 30, threads = 3 },
    { node = "east-2", weight = 10 },
]
groups = [[0], [1, 2]]
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(_PLAN)
    return path


def _settled(file: Path, schema: type[RunSettings] = TrainSettings, **given):
    resolved: Resolved[RunSettings] = resolve(schema, {"plan": str(file), "lab": "two-sites", **given})
    spec = read_lab("two-sites")
    settled, plan = by_plan(resolved, spec, (), threads_on={}, cores=8)
    return settled.settings, plan


def test_workers_nodes_shares_and_groups_come_from_the_file(file):
    settings, plan = _settled(file)
    assert [(w.rank, w.node, w.weight, w.threads) for w in plan.workers] == [
        (0, "west-1", 20, 1),
        (1, "east-0", 30, 3),
        (2, "east-2", 10, 1),
    ]
    assert plan.groups == ((0,), (1, 2))
    assert (settings.workers, settings.shares, settings.groups) == (3, "20,30,10", "0;1,2")
    assert (settings.batch, settings.codec, settings.seed) == (60, "one-bit", 7)


def test_shares_of_a_plan_that_adapts_are_those_of_the_first_steps(file):
    file.write_text("adapt_shares = true\n" + _PLAN)
    settings, plan = _settled(file)
    assert (settings.shares, plan.adapt_shares) == ("auto", True)
    assert plan.weights == [20, 30, 10]


def test_the_command_line_wins_over_the_choices_of_the_file(file):
    settings, plan = _settled(file, codec="none", threads=2)
    assert (settings.codec, plan.codec) == ("none", "none")
    assert [worker.threads for worker in plan.workers] == [2, 2, 2]


def test_another_batch_keeps_proportions_and_drops_the_prediction(file):
    file.write_text(_PLAN + "predicted_step_s = 0.1\n")
    settings, plan = _settled(file, batch=120)
    assert settings.batch == 120
    assert (plan.batch, plan.predicted_step_s) == (None, None)
    assert plan.weights == [20, 30, 10]
    _, same = _settled(file, batch=60)
    assert same.predicted_step_s == 0.1


@pytest.mark.parametrize(
    "given", [{"workers": 4}, {"shares": "1,2,3"}, {"speed": "1,1,1"}, {"groups": "1,2"}, {"servers": 1}]
)
def test_an_option_that_contradicts_the_file_is_refused_by_name(file, given):
    with pytest.raises(ConfigError) as error:
        _settled(file, **given)
    assert error.value.where == f"--{next(iter(given))}"
    assert "plan.toml" in str(error.value)


def test_an_option_that_says_the_same_is_not_refused(file):
    assert len(_settled(file, workers=3)[1].workers) == 3


def test_a_plan_for_another_lab_is_refused_with_the_lines(file):
    resolved = resolve(RunSettings, {"plan": str(file), "lab": "four-unequal"})
    with pytest.raises(ConfigError, match="line 5: there is no node 'west-1' in lab four-unequal"):
        by_plan(resolved, read_lab("four-unequal"), (), threads_on={}, cores=8)


def test_a_plan_for_workers_of_one_machine_runs_on_this_one(file):
    file.write_text('workers = [{ node = "worker-0" }, { node = "worker-1" }]\n')
    resolved = resolve(RunSettings, {"plan": str(file)})
    settled, plan = by_plan(resolved, None, (), threads_on={}, cores=8)
    assert [(w.node, w.threads) for w in plan.workers] == [(socket.gethostname(), 4)] * 2
    assert settled.settings.workers == 2


def test_hosts_are_in_the_order_of_the_plan_with_as_many_slots_as_it_uses(file):
    file.write_text('workers = [{ node = "b" }, { node = "a" }, { node = "b" }]\n')
    resolved = resolve(RunSettings, {"plan": str(file), "hosts": "a:2,b:4,c:1"})
    assert in_order_of_plan(resolved).settings.hosts == "b:2,a:1"
    settled = replace(resolved.settings, hosts="a:2,b:1")
    with pytest.raises(ConfigError, match="b has place for 1 worker"):
        in_order_of_plan(Resolved(settled, resolved.origins))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the plan"):
        _settled(tmp_path / "nothing.toml")
