"""`echelon simulate` as it is called: tiny models, given times, one process unless that is the matter."""

import json
import os
import subprocess
import sys
import webbrowser
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.observe.events import Arrived, Decided, Evaluated, LinkMeasured, decode_line, encode
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import PlanRequest, make_plan
from echelon.simulate.profile import Costs, Profile
from echelon.simulate.recorded import cluster_of
from echelon.simulate.run import simulate
from echelon.simulate.setting import Setting

TINY = [
    "--model", "mlp(8, 1)", "--data", "digits", "--batch", "4", "--lr", "0.05", "--seconds", "0.2",
    "--test-samples", "50", "--train-samples", "50", "--every", "0.1",
]  # fmt: skip
GIVEN = ["--compute", "10ms", "--server-costs", "0.5ms,1ms,1ms"]
ONE = ["--jobs", "1"]


@pytest.fixture
def called(echelon):
    """A tiny simulation, with these options besides."""
    return lambda *words: echelon("simulate", *TINY, *GIVEN, *ONE, *words)


def _assert_refused(ended, where):
    assert ended.code == 2, ended
    assert ended.out == ""
    lines = ended.err.splitlines()
    assert len(lines) == 3, ended.err
    assert lines[1] == f"  where: {where}"
    assert lines[2].startswith("  fix:   ")


def test_output_has_the_profile_the_figures_and_their_comparison(called):
    ended = called(
        "--sync", "full", "--sync", "async", "--seeds", "2", "--until-accuracy", "0.01", "--out", "a.html"
    )
    assert ended.code == 0, ended.err
    assert "a gradient: 10.0 ms (given)" in ended.out
    assert "the server: push 500 µs, update 1.0 ms, pull 1.0 ms (given)" in ended.out
    assert "a link:     125.0 MB/s, latency 100 µs (assumed)" in ended.out
    for word in ("test accuracy %", "test loss", "train loss", "at the end", "difference", "±"):
        assert word in ended.out
    for word in ("gradients", "applied", "dropped", "updates", "staleness", "waiting", "to 1 %"):
        assert word in ended.out
    assert any(line.startswith("async is ") and "full" in line for line in ended.out.splitlines())
    assert ended.out.splitlines()[-1] == "picture: a.html"
    assert "async" in Path("a.html").read_text(encoding="utf-8")
    assert max(map(len, ended.out.splitlines()[:-4])) <= 80


def test_the_page_has_a_new_name_unless_it_is_given(called):
    ended = called("--sync", "async", "--no-gradients")
    (page,) = Path().glob("simulate-*-mlp-digits.html")
    assert ended.out.splitlines()[-1] == f"picture: {page}"


def test_json_is_all_that_is_printed_and_has_curves_and_figures(called):
    ended = called("--sync", "async", "--sync", "local(2)", "--json")
    assert ended.err == ""
    found = json.loads(ended.out)
    assert [one["policy"] for one in found["policies"]] == ["async", "local(2)"]
    assert [point["t"] for point in found["runs"][0]["curve"]] == [0.0, 0.1, 0.2]
    assert found["profile"]["compute_s"] == 0.01
    assert found["known"] == {"compute": "given", "costs": "given", "link": "assumed"}
    assert found["setting"]["batch"] == 4
    assert len(found["says"]) == 1
    assert not list(Path().iterdir())


def test_options_reach_the_setting(called):
    found = json.loads(
        called(
            "--workers", "4", "--groups", "2,2", "--speed", "1,1,1,0.5", "--delay", "normal(0, 0.01)",
            "--delayed", "0.25", "--link", "1gbit,1gbit,1gbit,8mbit", "--latency", "5ms", "--seed", "7",
            "--optimizer", "adamw", "--momentum", "0.5", "--no-gradients", "--json",
        ).out
    )  # fmt: skip
    setting = found["setting"]
    assert setting["groups"] == [[0, 1], [2, 3]]
    assert setting["speeds"] == [1, 1, 1, 0.5]
    assert (setting["delay"], setting["delayed"]) == ("normal(0, 0.01)", 0.25)
    assert setting["links"] == [125e6] * 3 + [1e6]
    assert found["profile"]["link"]["latency_s"] == 0.005
    assert (setting["optimizer"], setting["momentum"], setting["gradients"]) == ("adamw", 0.5, False)
    assert [run["seed"] for run in found["runs"]] == [7]
    assert [run["policy"] for run in found["runs"]] == ["full"]


def test_costs_that_are_not_given_are_measured(echelon, monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    found = json.loads(echelon("simulate", *TINY, *ONE, "--compute", "10ms", "--json").out)
    assert found["known"]["costs"] == "measured on this machine"
    assert found["profile"]["compute_s"] == 0.01
    assert found["profile"]["costs"]["apply_s"] > 0


def test_number_of_processes_does_not_change_the_result(called):
    words = ["--sync", "full", "--sync", "async", "--sync", "smooth-switch(step=3)", "--json", "--events"]
    alone = called(*words, "one.jsonl")
    apart = called(*words, "two.jsonl", "--jobs", "2")
    assert apart.code == 0, apart.err
    assert apart.out == alone.out
    assert Path("one.jsonl").read_bytes() == Path("two.jsonl").read_bytes()
    assert sorted(path.name for path in Path().iterdir()) == ["one.jsonl", "two.jsonl"]


def test_error_in_another_process_is_reported_like_a_local_one(called, monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_DATA", str(tmp_path / "nowhere"))
    ended = called("--data", "mnist", "--sync", "async", "--seeds", "2", "--jobs", "2")
    assert ended.code == 2
    assert ended.err.startswith("DataError: ")
    assert "Traceback" not in ended.err


def test_events_name_their_policy_and_seed_and_are_those_of_a_run(called):
    called("--sync", "async", "--seeds", "2", "--events", "e.jsonl", "--json")
    lines = Path("e.jsonl").read_bytes().splitlines()
    raw = [json.loads(line) for line in lines]
    assert {(one["policy"], one["seed"]) for one in raw} == {("async", 0), ("async", 1)}
    assert [one["seed"] for one in raw] == sorted(one["seed"] for one in raw)
    assert {type(decode_line(line)) for line in lines} == {Arrived, Decided, Evaluated}


def test_events_that_cannot_be_written_are_refused(called):
    Path("taken").touch()
    _assert_refused(called("--events", "taken/e.jsonl"), "taken")


def test_the_page_is_shown_only_when_asked(called, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    called("--no-gradients", "--out", "a.html")
    assert opened == []
    ended = called("--no-gradients", "--out", "a.html", "--open")
    assert opened == [Path("a.html").resolve().as_uri()]
    assert "open the file by hand" in ended.out


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["--sync", "asynk"], "--sync"),
        (["--sync", "async", "--sync", "async"], "--sync"),
        (["--model", "lenett"], "--model"),
        (["--data", "digit"], "--data"),
        (["--delay", "norml(0, 1)"], "--delay"),
        (["--delayed", "2"], "--delayed"),
        (["--workers", "0"], "--workers"),
        (["--servers", "2"], "--servers"),
        (["--optimizer", "adam"], "--optimizer"),
        (["--speed", "1,fast"], "--speed"),
        (["--speed", "1,0.5"], "--speed"),
        (["--groups", "1,2"], "--groups"),
        (["--link", "fast"], "--link"),
        (["--link", "1gbit,1mbit"], "--link"),
        (["--latency", "soon"], "--latency"),
        (["--compute", "0"], "--compute"),
        (["--compute", "soon"], "--compute"),
        (["--server-costs", "1ms,1ms"], "--server-costs"),
        (["--every", "0"], "--every"),
        (["--until-accuracy", "95"], "--until-accuracy"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_invalid_values_are_refused_naming_the_option(called, words, where):
    _assert_refused(called(*words), where)


def test_errors_are_reported_before_torch_is_imported():
    program = (
        "import sys\n"
        "from echelon.cli import main\n"
        "for args in (['--help'], ['--sync', 'asynk'], ['--model', 'lenett'], ['--replay', 'none']):\n"
        "    sys.argv = ['echelon', 'simulate', *args]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit:\n"
        "        pass\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit('imported torch: ' + ' '.join(args))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=dict(os.environ), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_help_fits_80_columns_and_has_examples(echelon):
    ended = echelon("simulate", "--help")
    assert ended.code == 0
    assert max(map(len, ended.out.splitlines())) <= 80
    lines = [line.strip() for line in ended.out.splitlines()]
    examples = lines[lines.index("Examples:") + 1 :]
    examples = examples[: examples.index("")]
    assert len(examples) >= 3
    assert all(line.startswith("echelon simulate ") for line in examples)


# Replay


def _record(sync: str, change=list) -> None:
    """A run folder, ./runs/2025-demo, whose server recorded what a virtual one did; `change` it first."""
    folder = RunFolder(Path("runs") / "2025-demo").with_subfolders()
    setting = Setting(
        model="mlp(8, 1)", data="digits", workers=3, seconds=0.2, batch=4, gradients=False,
        profile=Profile(compute_s=0.01, costs=Costs(apply_s=0.001)),
    )  # fmt: skip
    events = []
    simulate(setting, [sync], listen=lambda _policy, _seed, event: events.append(event))
    folder.events_of(3).write_bytes(b"".join(encode(event) + b"\n" for event in change(events)))
    plan = replace(make_plan("2025-demo", ["here"] * 3, PlanRequest(sync=sync), cores=1), servers=("here",))
    folder.plan.write_text(plan.to_toml())
    folder.config.write_text("[run]\nworkers = 3\n[train]\nlr = 0.01\n")


def test_a_replay_finds_the_recorded_decisions(echelon):
    _record("smooth-switch(step_over_lr=0.1)")  # needs the learning rate, which is in the settings
    ended = echelon("simulate", "--replay", "latest")
    assert ended.code == 0, ended.err
    assert "all are decided as recorded" in ended.out
    found = json.loads(echelon("simulate", "--replay", "2025-demo", "--json").out)
    assert found["same"] is True
    assert found["arrivals"] > 10
    assert found["decisions"] > found["arrivals"]


def test_a_replay_names_the_first_decision_that_differs(echelon):
    def without_an_update(events):
        updates = [at for at, event in enumerate(events) if isinstance(event, Decided) and event.parts]
        return [event for at, event in enumerate(events) if at != updates[4]]

    _record("async", without_an_update)
    ended = echelon("simulate", "--replay", "latest")
    assert ended.code == 1
    assert "the first that differs: arrival 4 (gradient of worker" in ended.out
    ended = echelon("simulate", "--replay", "latest", "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["mismatch"].startswith("arrival 4 ")


def test_a_replay_imports_nothing_that_the_record_names(echelon, tmp_path, monkeypatch):
    _record("smooth-switch(step_over_lr=0.1)")
    plan = RunFolder(Path("runs") / "2025-demo").plan
    was = plan.read_text()
    plan.write_text(was.replace("step_over_lr=0.1", "threshold=function(a_replay_trap:grow)"))
    assert plan.read_text() != was
    (tmp_path / "a_replay_trap.py").write_text("open('marker', 'w').close()\ndef grow(n): return n + 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("echelon.config.allowed._given", set())
    monkeypatch.setenv("ECHELON_ALLOW", "")
    ended = echelon("simulate", "--replay", "latest")
    assert ended.code == 2
    assert "function a_replay_trap:grow is code outside of Echelon" in ended.err
    assert "echelon --allow a_replay_trap:grow" in ended.err
    assert not Path("marker").exists()
    ended = echelon("--allow", "a_replay_trap:grow", "simulate", "--replay", "latest")
    assert Path("marker").exists(), ended.err
    sys.modules.pop("a_replay_trap")


def test_a_run_whose_folder_is_named_as_a_function_imports_nothing_either(echelon, tmp_path, monkeypatch):
    _record("smooth-switch(step_over_lr=0.1)")
    folder = (Path("runs") / "2025-demo").rename(Path("runs") / "another_trap:grow")
    plan = RunFolder(folder).plan
    plan.write_text(plan.read_text().replace("step_over_lr=0.1", "threshold=function(another_trap:grow)"))
    monkeypatch.setattr("echelon.config.allowed._given", set())
    monkeypatch.setenv("ECHELON_ALLOW", "")
    for words in (["--replay", "another_trap:grow"], ["--replay", "runs/another_trap:grow"]):
        ended = echelon("simulate", *words)
        assert ended.code == 2
        assert "function another_trap:grow is code outside of Echelon" in ended.err


def test_a_run_without_a_servers_record_cannot_be_replayed(echelon):
    _record("async", lambda events: [])
    ended = echelon("simulate", "--replay", "latest")
    assert ended.code == 2
    assert "has no recorded decisions of a server" in ended.err


def test_a_policy_without_a_server_cannot_be_replayed(echelon):
    _record("full")
    ended = echelon("simulate", "--replay", "latest")
    assert ended.code == 2
    assert "sync full uses no parameter server" in ended.err


def test_options_of_a_simulation_are_not_for_a_replay(echelon):
    _record("async")
    for words in (["--workers", "3"], ["--sync", "full"], ["--no-gradients"]):
        _assert_refused(echelon("simulate", "--replay", "latest", *words), words[0])


def test_replay_gives_the_policy_the_links_that_workers_measured(tmp_path):
    folder = RunFolder(tmp_path / "run").with_subfolders()
    plan = make_plan("run", ["a", "b"], PlanRequest(), cores=1)
    for rank, rates in enumerate([(1e6, 3e6), (2e6,)]):
        links = [LinkMeasured(t=0.0, rank=rank, peer=9, latency_s=0.0, bytes_per_s=r) for r in rates]
        folder.events_of(rank).write_bytes(b"".join(encode(link) + b"\n" for link in links))
    assert cluster_of(folder, plan).links == (3e6, 2e6)
    folder.events_of(1).write_bytes(b"")
    assert cluster_of(folder, plan).links == ()
