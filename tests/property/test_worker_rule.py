"""For any answers of a coordinator, a worker pushes every gradient exactly once, in order."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.server.worker_rule import Action, Phase, SendPush, WorkerRule


class Worker:
    """Performs a rule's actions on sets of gradients, which are numbered by step.

    `mine` are the gradients in the worker's own weights since it last got some, `applied` those that the
    server has accepted. `draw` decides what the coordinator answers, within the contract of a Rule;
    a merge is never dropped.
    """

    def __init__(self, rule, draw):
        self.rule = rule
        self.draw = draw
        self.now = -1
        self.mine, self.summed, self.applied = [], [], []
        self.numbers = []
        self.pending = None
        self.wanted = True
        self.in_flight = False
        self.merging = False

    def step(self):
        self.land()
        self.now += 1
        self.perform(self.rule.step())

    def merge(self):
        self.land()
        self.merging = True
        self.perform(self.rule.merge())
        self.merging = False

    def pull(self):
        """Pull as between epochs: only after a merge."""
        self.merge()
        self.mine = []
        self.rule.pulled()

    def land(self):
        if self.in_flight:
            self.in_flight = False
            self.perform(self.answer())

    def perform(self, actions):
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case SendPush() as push:
                    self.push(push)
                case Action.ADD_TO_SUM:
                    self.summed.append(self.now)
                    self.rule.summed()
                case Action.STEP_ALONE:
                    self.mine.append(self.now)
                case Action.ASK:
                    self.numbers.append(("ask", self.rule.arrivals))
                    self.rule.ask_sent()
                case Action.AWAIT_ANSWER:
                    todo.extend(self.answer())
                case Action.INSTALL_WEIGHTS | Action.PULL as action:
                    self.mine = []
                    if action is Action.PULL:
                        self.rule.pulled()
                case Action.DEFER_WEIGHTS:
                    self.in_flight = True

    def push(self, push):
        self.numbers.append(("push", self.rule.arrivals))
        self.wanted = push.wants_weights
        if push.what == "sum":
            self.pending, self.summed = self.summed, []
        else:
            self.pending = [self.now] if push.what == "gradient" else list(self.mine)
        self.rule.push_sent(push.what)

    def answer(self):
        """Invite or release a worker that asked; apply or drop a push."""
        rule, draw = self.rule, self.draw
        ask = rule.steady and not rule.defers and draw(st.booleans())
        if rule.phase is Phase.ASKED:
            if draw(st.booleans()):
                return rule.invited()
            return rule.released(fresh=False, ask=ask)
        assert rule.phase is Phase.PUSHED
        pushed, self.pending = self.pending, None
        may_drop = rule.steady and not rule.defers and not self.merging
        if may_drop and draw(st.booleans()):
            return rule.released(fresh=False, ask=ask)
        self.applied += pushed
        return rule.released(fresh=self.wanted, ask=ask)


rules = st.one_of(
    st.just({}),
    st.just({"defers": True}),
    st.builds(
        lambda push, pull: {"push_every": push, "pull_every": pull}, st.integers(1, 4), st.integers(1, 4)
    ),
)
programmes = st.lists(st.sampled_from(["step", "step", "step", "merge", "pull"]), max_size=30)


@settings(max_examples=400, deadline=None)
@given(rules, programmes, st.data())
def test_every_gradient_is_applied_exactly_once_after_a_merge(options, programme, data):
    worker = Worker(WorkerRule(**options), data.draw)
    for what in programme:
        getattr(worker, what)()
        known = [*worker.applied, *(worker.mine if worker.rule.steady else worker.summed)]
        flying = worker.pending or []
        assert sorted([*known, *flying]) == list(range(worker.now + 1)), "none is lost, none counts twice"
    worker.merge()
    assert sorted(worker.applied) == list(range(worker.now + 1))
    assert worker.rule.phase is Phase.COMPUTING
    assert worker.rule.merge() == []


@settings(max_examples=200, deadline=None)
@given(rules, programmes, st.data())
def test_arrivals_are_numbered_consecutively_and_an_ask_shares_its_number_with_its_push(
    options, programme, data
):
    worker = Worker(WorkerRule(**options), data.draw)
    for what in programme:
        getattr(worker, what)()
    pushes = [number for what, number in worker.numbers if what == "push"]
    assert sorted(set(pushes)) == pushes
    arrivals = sorted({number for _, number in worker.numbers})
    assert arrivals == list(range(len(arrivals)))
    assert worker.rule.arrivals == len(arrivals)
