"""For any order of losses, stops and messages: survivors agree, samples are drawn once, steps go on."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echelon.membership.messages import Exited
from members import World

NUMBER = st.integers(0, 10_000)


def act(world, kind, number):
    """One action; `number` chooses whom or what it happens to."""
    live = [one for one in world.workers.values() if one.runs]
    paused = [one for one in world.workers.values() if one.alive and one.stopped]
    one = live[number % len(live)] if live else None
    at = number % len(world.mail) if world.mail else None
    if kind == "deliver" and at is not None:
        world.deliver(at)
    elif kind == "deliver-first" and at is not None:
        for _ in range(1 + number % 8):
            if world.mail:
                world.deliver(0)
    elif kind == "drop" and at is not None:
        if not isinstance(world.mail[at][1], Exited):  # the launcher sees it for certain, if late
            world.drop(at)
    elif kind == "repeat" and at is not None:
        world.deliver(at, keep=True)
    elif kind == "tick":
        world.tick((0.05, 0.3, 1.2, 4.0)[number % 4])
    elif kind == "restart":
        world.restart_coordinator()
    elif kind == "continue" and paused:
        paused[number % len(paused)].stopped = False
    elif one is not None:
        act_on(world, kind, one, number, live)


def act_on(world, kind, one, number, live):
    if kind == "train":
        world.begin(one)
        world.send(one)
        world.land(one)
    elif kind == "all-train":
        for each in live:
            world.begin(each)
            world.send(each)
        for each in live[number % len(live) :]:  # it lands on some of them only
            world.land(each)
    elif kind == "overwrite":
        world.spoil(one)
    elif kind == "lose-kept":
        if one.machine.healing is not None and one.machine.overwriting():
            one.history = None
    elif kind == "report":
        world.report(one)
    elif kind == "kill":
        world.kill(one)
    elif kind == "raise":
        world.kill(one, failure=f"ValueError: {number % 2}")
    elif kind == "stop":
        one.stopped = True
    elif kind == "accuse":
        world.accuse(one, live[(number // 7) % len(live)].machine.member)
    elif kind == "leave":
        world.leave(one)


FAULTS = (
    "drop",
    "repeat",
    "kill",
    "raise",
    "stop",
    "continue",
    "overwrite",
    "lose-kept",
    "accuse",
    "leave",
    "restart",
)
WORK = ("deliver", "deliver-first", "tick", "train", "all-train", "report")


class Members(RuleBasedStateMachine):
    """Hypothesis chooses what happens."""

    @initialize(workers=st.integers(1, 5))
    def start(self, workers):
        self.world = World(workers)

    @rule(kind=st.sampled_from(WORK), number=NUMBER)
    def work(self, kind, number):
        act(self.world, kind, number)

    @rule(kind=st.sampled_from(WORK), number=NUMBER)
    def more_work(self, kind, number):
        act(self.world, kind, number)

    @rule()
    def steps(self):
        for _ in range(3):
            act(self.world, "deliver-first", 7)
            act(self.world, "all-train", 0)

    @precondition(lambda self: self.world.coordinator.view is not None)
    @rule(kind=st.sampled_from(FAULTS), number=NUMBER)
    def fault(self, kind, number):
        act(self.world, kind, number)

    @invariant()
    def survivors_agree(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.settle()


Members.TestCase.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
TestMembers = Members.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_members_agree_and_go_on_after_any_mix_of_faults(seed):
    rng = random.Random(seed)
    world = World(rng.randint(1, 6))
    for _ in range(rng.choice([20, 100, 400])):
        kind = rng.choice(WORK) if rng.random() < 0.85 else rng.choice(FAULTS)
        act(world, kind, rng.randrange(10_000))
        world.check()
    world.settle()
