import math
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec
import pytest
import torch

from echelon.errors import ConfigError
from echelon.observe.events import Arrived, Decided, Evaluated, RunEnded
from echelon.simulate import profile as profiles
from echelon.simulate.outcome import Point, Run, SimulationResult, Totals
from echelon.simulate.profile import Costs, Profile, VirtualLink
from echelon.simulate.replay import replay
from echelon.simulate.run import run_policy, simulate
from echelon.simulate.setting import Setting
from echelon.simulate.virtual import cluster_of
from echelon.sync.policy import POLICIES, Policy

SOME = ["full", "async", "smooth-switch(step=20)", "local(3)", "hogwild", "flexible"]


@pytest.fixture(scope="module")
def outcome(setting):
    return simulate(replace(setting, delay="normal(0, 0.02)", seeds=2), SOME)


def test_the_same_setting_gives_the_same_bits(setting, outcome):
    torch.manual_seed(99)  # nobody else's random numbers matter
    again = simulate(replace(setting, delay="normal(0, 0.02)", seeds=2), SOME)
    assert again == outcome
    assert msgspec.json.encode(again) == msgspec.json.encode(outcome)


def test_all_policies_start_with_the_same_figures_and_seeds_differ(outcome):
    for seed in (0, 1):
        assert len({run.curve[0].test_loss for run in outcome.runs if run.seed == seed}) == 1
    assert outcome.of("full")[0].curve[0] != outcome.of("full")[1].curve[0]


def test_a_policys_result_does_not_depend_on_other_policies(setting, outcome):
    alone = simulate(replace(setting, delay="normal(0, 0.02)", seed=1), ["local(3)"])
    assert alone.runs[0] == outcome.of("local(3)")[1]


def test_curves_reach_from_the_start_to_the_end(outcome):
    for run in outcome.runs:
        assert [point.t for point in run.curve] == [0.0, 0.25, 0.5]
        assert run.final.gradients == run.totals.gradients
        assert run.final.updates == run.totals.updates


def test_training_lowers_the_loss(outcome):
    for run in outcome.runs:
        assert run.final.train_loss < run.curve[0].train_loss, run.policy


def test_a_result_survives_json(outcome):
    assert msgspec.json.decode(msgspec.json.encode(outcome), type=SimulationResult) == outcome


def test_a_simulation_leaves_threads_and_random_state_unchanged(setting):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        state = torch.random.get_rng_state()
        simulate(setting, ["async"])
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.random.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_without_gradients_the_times_are_the_same_and_nothing_is_learned(setting):
    for policy in SOME:
        learned = simulate(setting, [policy]).runs[0]
        timed = simulate(replace(setting, gradients=False), [policy]).runs[0]
        assert timed.totals == learned.totals
        assert timed.final.test_loss is None


@pytest.mark.parametrize("policy", ["delay-compensated", "elastic-averaging", "gossip", "downpour"])
def test_policies_that_compute_with_tensors_run_without_gradients_too(setting, policy):
    assert simulate(replace(setting, gradients=False), [policy]).runs[0].totals.gradients > 50


@pytest.mark.parametrize(
    "policy",
    [
        "none",
        "percentage",
        "backup(1)",
        "bounded-delay(2)",
        "delay-compensated",
        "elastic-averaging",
        "elastic-averaging(asynchronous=true)",
        "gossip",
        "gossip(random)",
        "local(periods=[2, 4])",
        "downpour",
    ],
)
def test_policies_of_other_families_learn_too(setting, policy):
    run = simulate(replace(setting, lr=0.01, groups=((0, 1), (2, 3))), [policy]).runs[0]
    assert run.totals.applied > 20
    assert run.final.train_loss < run.curve[0].train_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Unheard(Policy):
    """A policy without a runner."""

    name: ClassVar[str] = "unheard"
    family: ClassVar[str] = "levels"

    def check(self, cluster):
        return None


def test_policy_of_an_unknown_family_is_refused(setting, problem):
    with pytest.raises(ConfigError, match="unheard cannot be simulated"):
        run_policy(setting, Unheard(), problem, setting.profile, 0)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ([], "no policy"),
        (["async", "async"], "given twice"),
        (["asink"], "unknown sync 'asink'"),
        (["async", "backup(4)"], "nobody to wait for"),
    ],
)
def test_invalid_policies_are_refused_before_any_runs(setting, policies, message):
    with pytest.raises(ConfigError, match=message):
        simulate(replace(setting, data="nowhere"), policies)


@pytest.mark.parametrize(
    "fields",
    [
        {"workers": 0},
        {"batch": 0},
        {"lr": 0.0},
        {"lr": math.nan},
        {"seconds": 0.0},
        {"seconds": math.inf},
        {"momentum": -1.0},
        {"evaluate_every_s": 0.0},
        {"seeds": 0},
        {"links": (1.0, 2.0)},
        {"links": (1.0, 2.0, 3.0, 0.0)},
    ],
)
def test_invalid_settings_are_refused(fields):
    with pytest.raises(ConfigError):
        Setting(**fields)


@pytest.mark.parametrize("fields", [{"speeds": (1.0,)}, {"delay": "normal(0, 1)", "delayed": 2.0}])
def test_settings_that_cannot_be_planned_are_refused(setting, fields):
    with pytest.raises(ConfigError):
        simulate(replace(setting, **fields), ["full"])


# Events and replays


def _heard(setting, policy):
    events = []
    simulate(setting, [policy], listen=lambda text, seed, event: events.append(event))
    return events


def test_events_are_those_of_a_server(setting):
    events = _heard(setting, "async")
    kinds = {type(event) for event in events}
    assert kinds == {Arrived, Decided, Evaluated}
    times = [event.t for event in events]
    assert times == sorted(times)
    assert {event.rank for event in events if isinstance(event, Arrived)} == {4}
    applied = [event.version for event in events if isinstance(event, Decided) and event.what == "apply"]
    assert applied == list(range(1, len(applied) + 1))


@pytest.mark.parametrize(
    "policy", ["async", "backup(1)", "bounded-delay(1)", "smooth-switch(step=10)", "percentage", "flexible"]
)
def test_replay_of_a_run_finds_no_difference(setting, policy):
    setting = replace(setting, delay="sometimes(0.3, 0.1)")
    events = [msgspec.json.decode(msgspec.json.encode(e), type=type(e)) for e in _heard(setting, policy)]
    events.append(RunEnded(t=1.0, rank=0, outcome="completed"))
    assert replay(events, POLICIES.build(policy).resolved(), cluster_of(setting, 0)) is None


def test_replay_reports_the_first_decision_that_differs(setting):
    events = _heard(setting, "backup(1)")
    arrivals = [at for at, event in enumerate(events) if isinstance(event, Arrived)]
    applied = [at for at, event in enumerate(events) if isinstance(event, Decided) and event.parts]
    changed = msgspec.structs.replace(events[applied[3]], parts=[(0, 0, 0.5)])
    events[applied[3]] = changed
    found = replay(events, POLICIES.build("backup(1)").resolved(), setting.cluster)
    assert found is not None
    assert found.recorded == changed
    assert found.now.what == "apply"
    assert found.arrival == events[arrivals[found.index]]
    assert "recorded apply 0.5 x step 0 of 0, now apply" in str(found)


def test_replay_reports_missing_and_additional_decisions(setting):
    policy = POLICIES.build("async").resolved()
    events = _heard(setting, "async")
    last = max(at for at, event in enumerate(events) if isinstance(event, Decided))
    short = replay(events[:last], policy, setting.cluster)
    assert short.recorded is None
    assert short.now.what == "release"
    more = replay([*events[: last + 1], events[last]], policy, setting.cluster)
    assert more.now is None
    assert "now nothing" in str(more)


def test_replay_with_another_policy_differs(setting):
    events = _heard(setting, "async")
    assert replay(events, POLICIES.build("backup(0)").resolved(), setting.cluster).index == 0


def test_replay_needs_the_events_from_the_start(setting):
    decision = Decided(t=0.0, rank=4, what="apply", version=1)
    with pytest.raises(ConfigError, match="begins with a decision"):
        replay([decision], POLICIES.build("async").resolved(), setting.cluster)


# Averages over the interval


def _run(policy, seed, points):
    totals = Totals(
        gradients=0, applied=0, dropped=0, updates=0, samples=0, staleness_mean=0.0, staleness_max=0,
        waiting_share=0.0,
    )  # fmt: skip
    curve = tuple(Point(t=t, gradients=0, updates=0, test_accuracy=accuracy) for t, accuracy in points)
    return Run(policy=policy, seed=seed, curve=curve, totals=totals)


@pytest.fixture
def compared():
    runs = (
        _run("a", 0, [(0, 0.0), (1, 1.0), (4, 1.0)]),  # (0.5 + 3) / 4
        _run("a", 1, [(0, 0.0), (1, 0.0), (4, 1.0)]),  # (0 + 1.5) / 4
        _run("b", 0, [(0, 0.5), (1, 0.5), (4, 0.5)]),
    )
    return SimulationResult(setting=Setting(), profile=Profile(compute_s=1.0), runs=runs)


def test_averages_are_over_time_and_then_over_seeds(compared):
    assert compared.average("a", "test_accuracy") == pytest.approx((0.875 + 0.375) / 2)
    assert compared.difference("a", "b", "test_accuracy") == pytest.approx(0.125)
    assert compared.final("a", "test_accuracy") == 1.0
    assert compared.policies == ("a", "b")
    assert compared.mean_curve("a", "test_accuracy") == [(0, 0.0), (1, 0.5), (4, 1.0)]


def test_the_average_of_unknown_values_is_nan(compared):
    assert math.isnan(compared.average("a", "train_loss"))


def test_unknown_policies_and_metrics_name_the_known_ones(compared):
    with pytest.raises(ConfigError, match="unknown policy 'c'"):
        compared.average("c", "test_accuracy")
    with pytest.raises(ConfigError, match="unknown metric 'accuracy'") as caught:
        compared.average("a", "accuracy")
    assert "test_accuracy" in caught.value.fix


# Profiles


def test_a_profile_is_measured_once_and_cached(setting, problem, tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    first = profiles.measure(setting, problem)
    assert first.compute_s > 0
    assert first.costs.apply_s > 0
    assert first.costs.hand_s > 0
    assert (tmp_path / "simulate.json").exists()
    assert profiles.measure(setting, problem) == first
    known = msgspec.json.decode((tmp_path / "simulate.json").read_bytes())
    assert [entry["compute_s"] for entry in known.values()] == [first.compute_s]
    profiles.measure(replace(setting, batch=2), problem)
    assert len(msgspec.json.decode((tmp_path / "simulate.json").read_bytes())) == 2


def test_a_profile_is_measured_again_if_the_cache_is_damaged(setting, problem, tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    (tmp_path / "simulate.json").write_bytes(b"{")
    assert profiles.measure(setting, problem).compute_s > 0


def test_link_of_a_measured_profile_can_be_given(setting, problem, tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    link = VirtualLink(latency_s=0.5, bytes_per_s=7.0)
    assert profiles.measure(setting, problem, link=link).link == link


def test_nothing_is_measured_if_everything_is_given(setting, tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    costs = Costs(queue_s=1.0)
    given = profiles.measure(replace(setting, data="nowhere"), compute_s=2.0, costs=costs)
    assert given == Profile(compute_s=2.0, costs=costs)
    assert list(tmp_path.iterdir()) == []


def test_a_simulation_without_a_profile_measures_one_and_returns_it(setting, tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    outcome = simulate(replace(setting, profile=None, seconds=0.01), ["full"])
    assert outcome.profile.compute_s > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: Profile(compute_s=0.0),
        lambda: Profile(compute_s=math.inf),
        lambda: Costs(apply_s=-1.0),
        lambda: Costs(hand_s=math.nan),
        lambda: VirtualLink(latency_s=-1.0),
        lambda: VirtualLink(bytes_per_s=0.0),
    ],
)
def test_profiles_with_impossible_durations_are_refused(make):
    with pytest.raises(ConfigError):
        make()
