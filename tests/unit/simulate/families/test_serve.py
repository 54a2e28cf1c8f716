"""The virtual server and its workers, with rules written for each test."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from echelon.errors import ConfigError
from echelon.observe.events import Arrived, Decided
from echelon.simulate.learner import Learner
from echelon.simulate.profile import Costs, Profile, VirtualLink
from echelon.sync.families.serve import Apply, Drop, Invite, Release, Rule, ServePolicy, Wake, WeightedPush


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(ServePolicy):
    """Decides by a function of the arrival and of the number of arrivals."""

    name: ClassVar[str] = "told"
    decide: object
    at_tick: object = None

    def check(self, cluster):
        return None

    def rule(self, cluster):
        return _Told(self.decide, self.at_tick)


class _Told(Rule):
    def __init__(self, decide, at_tick):
        self.decide, self.at_tick, self.seen = decide, at_tick, []

    def arrive(self, arrival):
        self.seen.append(arrival)
        return self.decide(arrival)

    def tick(self, t):
        return self.at_tick(self.seen, t)


def part(arrival):
    return Apply((WeightedPush(arrival.worker, arrival.step, 1.0),))


def test_the_server_handles_one_message_at_a_time_and_each_takes_time(with_profile, free, play):
    costs = Costs(queue_s=0.1, apply_s=0.2, hand_s=0.3)
    setting = with_profile(replace(free, costs=costs), workers=2, seconds=3.5, evaluate_every_s=3.5)
    arrivals = play(setting, "async").of(Arrived)
    assert [arrival.worker for arrival in arrivals] == [0, 1, 0, 1]
    # The second waits 0.6 s for the first; the first is back at 1.6 s and computes until 2.6 s.
    assert [arrival.t for arrival in arrivals] == pytest.approx([1.1, 1.7, 2.7, 3.3])


def test_transfer_times_include_latency_and_bytes_and_are_reported(with_profile, problem, play):
    size_bytes = Learner(problem, 0).size_bytes
    link = VirtualLink(latency_s=0.25, bytes_per_s=size_bytes / 0.5)
    profile = Profile(compute_s=1.0, link=link)
    setting = with_profile(profile, workers=2, seconds=5, links=(size_bytes / 0.5, size_bytes / 2.0))
    arrivals = play(setting, "async").of(Arrived)
    first = [arrival for arrival in arrivals if arrival.worker == 0]
    assert [arrival.t for arrival in first] == pytest.approx([1.75, 4.25])
    assert [arrival.transfer_s for arrival in first] == pytest.approx([0.75, 1.5])
    assert [arrival.t for arrival in arrivals if arrival.worker == 1] == pytest.approx([3.25])


def test_slow_and_delayed_workers_arrive_later_and_report_their_compute_time(with_profile, free, play):
    setting = with_profile(free, workers=2, seconds=5, speeds=(0.5, 1.0), delay="constant(0.25)")
    arrivals = play(setting, "async").of(Arrived)
    assert {arrival.compute_s for arrival in arrivals if arrival.worker == 0} == {2.0}
    assert {arrival.compute_s for arrival in arrivals if arrival.worker == 1} == {1.25}  # the highest rank
    assert [arrival.t for arrival in arrivals if arrival.worker == 0] == [2.0, 4.0]


def test_staleness_counts_the_updates_since_weights_were_read(with_profile, free, play):
    totals = play(with_profile(free, workers=3, seconds=1.5), "async").totals
    assert totals.staleness_max == 2
    assert totals.staleness_mean == 1.0  # 0, 1 and 2


def test_waiting_share_is_the_time_in_which_workers_do_not_compute(with_profile, free, play):
    setting = with_profile(free, workers=2, seconds=7, speeds=(1.0, 0.5))
    assert play(setting, "async").totals.waiting_share == pytest.approx(0)
    # In lockstep the fast one computes for 4 s of the 7; the slow one is in the midst of a step at the end.
    assert play(setting, "backup(0)").totals.waiting_share == pytest.approx(3 / 14)


def test_worker_with_local_steps_pushes_its_delta_and_no_gradient_is_lost(
    with_profile, free, play, plainly
):
    def decide(arrival):
        if arrival.kind != "ask":
            return [part(arrival), Release(0, ask=True)]
        return [Invite(0)] if arrival.step % 3 == 0 else [Release(0, fresh=False, ask=True)]

    setting = with_profile(free, workers=1, seconds=20.5)
    played = play(setting, Told(decide=decide))
    kinds = [(arrival.step, arrival.kind) for arrival in played.of(Arrived)[:6]]
    assert kinds == [(0, "gradient"), (1, "ask"), (2, "ask"), (3, "ask"), (3, "delta"), (4, "ask")]
    assert played.totals.applied == 19
    assert torch.allclose(played.weights[0], plainly(setting, 4, 19), atol=1e-5)


def test_worker_that_continues_locally_applies_its_dropped_gradient(with_profile, free, play, plainly):
    def decide(arrival):
        if arrival.kind == "ask":
            return [Invite(0)]
        if arrival.kind == "delta":
            return [part(arrival), Release(0)]
        return [Drop(0, arrival.step, "too late"), Release(0, fresh=False, ask=True)]

    setting = with_profile(free, workers=1, seconds=10.5)
    played = play(setting, Told(decide=decide))
    assert played.totals.gradients == played.totals.applied == 10
    assert played.totals.dropped == 0
    assert torch.allclose(played.weights[0], plainly(setting, 4, 10), atol=1e-5)


def test_an_applied_gradient_is_not_part_of_a_later_delta(with_profile, free, play, plainly):
    def decide(arrival):
        return [part(arrival), Release(0, fresh=False)]

    setting = with_profile(free, workers=1, seconds=6.5)
    played = play(setting, Told(decide=decide))
    assert [arrival.kind for arrival in played.of(Arrived)] == ["gradient"] + ["delta"] * 5
    assert torch.allclose(played.weights[0], plainly(setting, 4, 6), atol=1e-5)


def test_a_gradient_is_lost_if_an_ask_is_answered_with_fresh_weights(with_profile, free, play, plainly):
    def decide(arrival):
        if arrival.kind == "ask":
            return [Release(0)]
        return [part(arrival), Release(0, ask=True)]

    played = play(with_profile(free, workers=1, seconds=6.5), Told(decide=decide))
    assert (played.totals.gradients, played.totals.applied, played.totals.dropped) == (6, 3, 3)


def test_pulls_between_pushes_keep_gradients_that_are_not_pushed_yet(with_profile, free, play, problem):
    setting = with_profile(free, workers=1, seconds=13.5)
    played = play(setting, "downpour(push=2, pull=3)")
    learner = Learner(problem, 0)
    server, own = learner.initial(), learner.initial()
    unsent = torch.zeros_like(own)
    for number, indices in enumerate(played.begun[0][:12], start=1):
        gradient, _ = learner.gradient_at(own, indices)
        unsent += gradient
        own = own - setting.lr * gradient
        if number % 2 == 0:
            server, unsent = server - setting.lr * unsent, torch.zeros_like(own)
        if number % 3 == 0:
            own = server.clone()
    assert played.totals.updates == 6
    assert torch.allclose(played.weights[0], server, atol=1e-6)


def test_a_rule_is_woken_at_the_time_it_set(with_profile, free, play):
    def at_tick(seen, t):
        return [part(seen[-1]), Release(0)]

    told = Told(decide=lambda arrival: [Wake(arrival.t + 0.5)], at_tick=at_tick)
    played = play(with_profile(free, workers=1, seconds=4), told)
    ticks = [event.t for event in played.of(Arrived) if event.kind == "tick"]
    assert ticks == [1.5, 3.0]
    assert [event.at for event in played.of(Decided) if event.what == "wake"] == [1.5, 3.0]
    assert played.totals.applied == 2


def test_dropped_gradients_are_counted_and_change_nothing(with_profile, free, play, problem):
    def decide(arrival):
        return [Drop(arrival.worker, arrival.step, "no"), Release(arrival.worker)]

    played = play(with_profile(free, workers=2, seconds=3.5), Told(decide=decide))
    assert (played.totals.gradients, played.totals.dropped, played.totals.applied) == (6, 6, 0)
    assert torch.equal(played.weights[0], Learner(problem, 0).initial())


def test_a_rule_that_never_answers_is_an_error(with_profile, free, play):
    with pytest.raises(ConfigError, match="after 1 s all workers wait"):
        play(with_profile(free, workers=2, seconds=9), Told(decide=lambda arrival: []))


def test_a_rule_that_answers_twice_is_an_error(with_profile, free, play):
    def decide(arrival):
        return [part(arrival), Release(arrival.worker), Release(arrival.worker)]

    with pytest.raises(ConfigError, match="which is not waiting"):
        play(with_profile(free, workers=1, seconds=2), Told(decide=decide))
