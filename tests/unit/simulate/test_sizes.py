"""A thousand virtual workers, and every parameter-server policy with twenty-five."""

from collections import Counter
from dataclasses import replace

import pytest

from echelon.observe.events import Arrived, Decided
from echelon.simulate.profile import Costs, Profile, VirtualLink
from echelon.simulate.run import run_policy, simulate
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policy import POLICIES

MANY = 1000
OPTIONS = {"backup": "backup(5)", "bounded-delay": "bounded-delay(3)"}  # where something must be said
SERVED = [
    *(OPTIONS.get(name, name) for name in POLICIES.names() if issubclass(POLICIES.get(name), ServePolicy)),
    "elastic-averaging(asynchronous=true)",
]
PUSHES = ("gradient", "delta", "weights")


@pytest.fixture
def many(with_profile, free):
    """A thousand workers: ten need 1.5 s for a gradient, the others 1 s; nothing else takes time."""
    speeds = (1.0,) * (MANY - 10) + (1 / 1.5,) * 10
    return with_profile(free, workers=MANY, seconds=2.25, lr=0.0001, speeds=speeds)


def test_a_thousand_workers_take_their_steps_one_by_one(many, problem):
    run = run_policy(many, POLICIES.build("async"), problem, many.profile, 0)
    # By 2.25 s the fast ones have come twice, the slow ones once.
    assert run.totals.gradients == run.totals.applied == run.totals.updates == 2 * (MANY - 10) + 10
    assert run.totals.samples == 4 * run.totals.applied
    assert run.totals.dropped == 0
    # All began with the same weights, so the last of the slow ones meets what all others did since.
    assert run.totals.staleness_max == MANY - 1
    assert run.final.train_loss < run.curve[0].train_loss


def test_a_thousand_workers_take_their_steps_together(many, problem):
    run = run_policy(replace(many, lr=0.1), POLICIES.build("full"), problem, many.profile, 0)
    assert run.totals.updates == 1  # at 1.5 s, when the slow ones have come
    assert run.totals.gradients == run.totals.applied == MANY
    assert (run.totals.dropped, run.totals.staleness_max) == (0, 0)
    assert run.final.train_loss < run.curve[0].train_loss


@pytest.mark.parametrize("policy", SERVED)
def test_every_push_of_twenty_five_workers_is_applied_or_dropped_once(setting, policy):
    profile = Profile(
        compute_s=0.02,
        costs=Costs(queue_s=0.0001, apply_s=0.0001, hand_s=0.0001),
        link=VirtualLink(latency_s=1e-4, bytes_per_s=1e8),
    )
    workers = 25
    speeds = tuple(1.0 if rank % 5 else 0.3 for rank in range(workers))
    setting = replace(
        setting, workers=workers, speeds=speeds, seconds=1.0, gradients=False, profile=profile
    )
    heard = []
    simulate(setting, [policy], listen=lambda text, seed, event: heard.append(event))
    arrived = [event for event in heard if isinstance(event, Arrived)]
    decided = [event for event in heard if isinstance(event, Decided)]
    pushed = Counter((event.worker, event.step) for event in arrived if event.kind in PUSHES)
    settled = Counter(part[:2] for event in decided if event.what == "apply" for part in event.parts)
    settled += Counter((event.worker, event.step) for event in decided if event.what == "drop")
    assert {worker for worker, _ in pushed} == set(range(workers)), "each has pushed"
    assert max(pushed.values()) == max(settled.values()) == 1
    assert settled <= pushed
    # What is left is of those who were waiting when time was up: their last push.
    last = {worker: max(step for one, step in pushed if one == worker) for worker in range(workers)}
    assert all(step == last[worker] for worker, step in pushed - settled)
    assert max(event.t for event in arrived) > 0.9, "until the end"
