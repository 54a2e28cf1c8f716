"""With any cluster and policy, the virtual clock loses no gradient and is reproducible."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.events import Arrived, Decided
from echelon.simulate.clock import Clock
from echelon.simulate.profile import Costs, Profile, VirtualLink
from echelon.simulate.replay import replay
from echelon.simulate.run import simulate
from echelon.simulate.setting import Setting
from echelon.simulate.virtual import cluster_of
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policy import POLICIES

SERVED = [
    "async",
    "backup(1)",
    "bounded-delay(0)",
    "bounded-delay(2)",
    "smooth-switch(step=7, combine=sum)",
    "smooth-switch(step=7, waiting=true)",
    "downpour(3, 2)",
    "percentage(0.4)",
    "flexible",
    "elastic-averaging(asynchronous=true)",
]
OTHERS = ["full", "none", "local(3)", "gossip", "gossip(random)", "elastic-averaging", "hogwild"]

seconds = st.floats(0.0, 0.02)
profiles = st.builds(
    Profile,
    compute_s=st.floats(0.01, 0.05),
    costs=st.builds(Costs, queue_s=seconds, apply_s=seconds, hand_s=seconds),
    link=st.builds(VirtualLink, latency_s=seconds, bytes_per_s=st.floats(1e6, 1e9)),
)
clusters = st.builds(
    Setting,
    workers=st.integers(3, 7),
    model=st.just("mlp(4, 0)"),
    data=st.just("digits"),
    batch=st.integers(1, 3),
    delay=st.sampled_from(["", "normal(0, 0.05)", "sometimes(0.2, 0.3)", "constant(0.01)"]),
    delayed=st.sampled_from([0.0, 0.5, 1.0]),
    seconds=st.floats(0.3, 1.0),
    seed=st.integers(0, 1000),
    gradients=st.just(False),
    profile=profiles,
)


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), min_size=1, max_size=30))
def test_actions_run_by_time_and_then_in_the_order_of_scheduling(asked):
    clock, done = Clock(), []
    for number, (t, background) in enumerate([*asked, (10.5, False)]):
        clock.at(t, lambda t=t, number=number: done.append((t, number)), background=background)
    clock.run(11)
    assert done == sorted(done)
    assert len(done) == len(asked) + 1


@settings(max_examples=25, deadline=None)
@given(setting=clusters, policy=st.sampled_from(SERVED))
def test_every_push_is_applied_dropped_or_pending_and_a_replay_agrees(setting, policy):
    events = []
    totals = (
        simulate(setting, [policy], listen=lambda text, seed, event: events.append(event)).runs[0].totals
    )
    pushed = Counter(
        (e.worker, e.step) for e in events if isinstance(e, Arrived) and e.kind not in ("ask", "tick")
    )
    decided = [event for event in events if isinstance(event, Decided)]
    settled = Counter((worker, step) for e in decided for worker, step, _ in e.parts)
    settled += Counter((e.worker, e.step) for e in decided if e.what == "drop")
    assert set(pushed.values()) <= {1}
    assert settled <= pushed
    assert totals.applied + totals.dropped <= totals.gradients
    assert totals.updates == sum(event.what == "apply" for event in decided)
    assert 0 <= totals.waiting_share <= 1
    assert totals.staleness_max >= totals.staleness_mean >= 0
    built = POLICIES.build(policy).resolved()
    assert isinstance(built, ServePolicy)
    assert replay(events, built, cluster_of(setting, setting.seed)) is None


@settings(max_examples=15, deadline=None)
@given(setting=clusters, policy=st.sampled_from(SERVED + OTHERS))
def test_same_setting_gives_the_same_result_and_waiting_time_is_recorded(setting, policy):
    first = simulate(setting, [policy])
    assert simulate(setting, [policy]) == first
    totals = first.runs[0].totals
    assert setting.profile is not None
    # No worker computes faster than the profile says.
    assert totals.gradients <= setting.workers * (setting.seconds / setting.profile.compute_s + 1)
    counts = [point.gradients for point in first.runs[0].curve]
    assert counts == sorted(counts)
