"""`echelon.join` refuses unknown names, invalid numbers and conflicting options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import echelon
from echelon.errors import ConfigError, UnknownName
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import PlanRequest, make_plan


@pytest.mark.parametrize(
    ("argument", "value", "meant"),
    [
        ("overlap", "setp", "step"),
        ("transport", "tpc", "tcp"),
        ("factors", "alwasy", "always"),
        ("collective", "rng", "ring"),
        ("sync", "ful", "full"),
        ("codec", "topk", "top-k"),
    ],
)
def test_unknown_name_is_refused_on_a_single_worker_with_the_nearest_name(argument, value, meant):
    with pytest.raises(ConfigError) as refused:
        echelon.join(record=False, **{argument: value})
    assert f"did you mean {meant!r}?" in refused.value.fix
    assert refused.value.where == f"join({argument}={value!r})"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("seed", -1),
        ("seed", "one"),
        ("seed", 2**63),
        ("timeout_s", 0),
        ("timeout_s", "60"),
        ("round_timeout_s", float("inf")),
        ("overlap", 3),
        ("collective", 3),
        ("shares", "by-speed"),
        ("shares", (1, 2)),
        ("shares", (0,)),
        ("shares", 2),
        ("shares", ("fast",)),
    ],
)
def test_a_value_out_of_range_or_of_the_wrong_type_is_refused_naming_the_argument(argument, value):
    with pytest.raises(ConfigError) as refused:
        echelon.join(record=False, **{argument: value})
    assert refused.value.where == f"join({argument}={value!r})"
    assert refused.value.fix


def test_conflicting_options_are_refused():
    with pytest.raises(ConfigError, match="a gradient is sent either as factors or by codec top-k"):
        echelon.join(record=False, factors="always", codec="top-k")


def test_script_options_take_precedence_over_the_launchers(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path).with_subfolders()
    asked = PlanRequest(overlap="step", seed=5, round_timeout_s=7)
    folder.plan.write_text(make_plan("run", ["here"], asked, cores=1).to_toml())
    monkeypatch.setenv("ECHELON_RUN", str(tmp_path))
    with echelon.join(seed=0, factors="never") as session:
        plan = session._plan
    assert (plan.seed, plan.factors) == (0, "never"), "0 is a seed, not the absence of one"
    assert (plan.overlap, plan.round_timeout_s) == ("step", 7)


def test_plan_for_another_number_of_workers_is_refused(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path).with_subfolders()
    folder.plan.write_text(make_plan("run", ["here"] * 3, PlanRequest(), cores=1).to_toml())
    monkeypatch.setenv("ECHELON_RUN", str(tmp_path))
    with pytest.raises(ConfigError, match="the plan is for 3 workers, but 1 were started"):
        echelon.join()


def test_plan_with_an_invalid_value_is_refused_naming_the_file(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path).with_subfolders()
    text = make_plan("run", ["here"], PlanRequest(), cores=1).to_toml()
    folder.plan.write_text(text.replace("seed = 0", "seed = -3"))
    monkeypatch.setenv("ECHELON_RUN", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot read the plan: seed is -3") as refused:
        echelon.join()
    assert refused.value.where == str(folder.plan)


def test_policy_without_required_servers_is_refused_before_any_worker_waits(monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refused:
        echelon.join(record=False, sync="async", timeout_s=600)
    assert not isinstance(refused.value, UnknownName)
    assert "join(servers=1)" in refused.value.fix, "the launcher of these variables has no --servers"


def test_a_script_that_asks_for_other_servers_than_echelon_run_started_is_refused(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path).with_subfolders()
    folder.plan.write_text(make_plan("run", ["here"] * 2, PlanRequest(), cores=1).to_toml())
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in {**place, "ECHELON_RUN": str(tmp_path), "ECHELON_SERVERS": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match="asks for 2 servers, but the run was started with 1 server"
    ) as no:
        echelon.join(sync="async", servers=2, timeout_s=600)
    assert no.value.where == "join(servers=2)"
    assert "--servers 2" in no.value.fix
    monkeypatch.setenv("ECHELON_SERVERS", "0")
    with pytest.raises(ConfigError, match="async needs a parameter server") as no:
        echelon.join(sync="async", timeout_s=600)
    assert no.value.fix == "start one with --servers 1"


@pytest.mark.parametrize(("servers", "left"), [(1, 1), (2, 0), (5, 0), (-1, None)])
def test_servers_that_leave_fewer_than_two_workers_are_refused(monkeypatch, servers, left):
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    words = "there cannot be -1 servers" if left is None else f"leave {left} as workers"
    with pytest.raises(ConfigError, match=words) as refused:
        echelon.join(sync="async", servers=servers, timeout_s=600)
    assert refused.value.where == f"join(servers={servers})"


def test_a_script_that_runs_alone_ignores_servers():
    with echelon.join(record=False, sync="async", servers=1) as session:
        assert session.world_size == 1


@pytest.mark.parametrize("module", ["echelon.train.checks", "echelon.sync.cluster", "echelon.start.run"])
def test_checking_a_plan_imports_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0
