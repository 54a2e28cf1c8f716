"""What a worker does at a step and at each answer of the coordinator. Pure: no sockets, tensors or clocks.

`ServerClient` tells the rule what happens (a step begins, a push was sent, an answer has arrived) and
performs the actions that the rule returns, in their order.

    phase       the worker            is ended by
    computing   computes              ask_sent, push_sent
    asked       waits for an answer   invited, released
    pushed      waits for an answer   released

A policy is steady if every step pushes a gradient and gets weights. With any other policy the worker takes
all steps with its own optimizer and, at some of them, pushes its summed gradients or its weights, and
pulls.

Invariant: every gradient is pushed exactly once: by itself, in a sum, or as a part of a delta, which is how
the weights have changed since the worker last got some. `merge` pushes whatever is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from echelon.errors import WorkerError

Pushed = Literal["gradient", "sum", "delta", "weights"]


@dataclass(frozen=True, slots=True)
class SendPush:
    """Push the gradient, the summed gradients, the delta or the weights, all of it.

    `wants_weights` asks for weights in return. With `exact`, no codec is used.
    """

    what: Pushed
    wants_weights: bool = True
    exact: bool = False


class Action(Enum):
    """An action without options."""

    ADD_TO_SUM = "add the gradients to the sum"
    STEP_ALONE = "take a step with the worker's own optimizer"
    ASK = "ask the coordinator whether to push"
    AWAIT_ANSWER = "wait for the coordinator's answer and tell the rule"
    INSTALL_WEIGHTS = "wait for the weights of all servers and install them"
    DEFER_WEIGHTS = "install each parameter's weights when it is used"
    PULL = "ask for the current weights, wait for them and install them"


class Phase(Enum):
    """What a worker is doing."""

    COMPUTING = "computing"
    ASKED = "waiting for the answer to a question"
    PUSHED = "waiting for the answer to a push"


Actions = list[SendPush | Action]


class WorkerRule:
    """One worker's state machine for one optimizer; `defers`: weights are installed when they are used."""

    def __init__(
        self,
        *,
        push_every: int = 1,
        pull_every: int = 1,
        pushes: Literal["gradient", "weights"] = "gradient",
        defers: bool = False,
    ) -> None:
        self._push_every = push_every
        self._pull_every = pull_every
        self._pushes = pushes
        self._each_step = push_every == pull_every == 1
        self.steady = self._each_step and pushes == "gradient"
        self.defers = defers and self.steady
        self.phase = Phase.COMPUTING
        self.steps = 0
        self.arrivals = 0  # at the servers; the number of the next push or ask
        self.must_ask = False  # before the next push
        self.alone = False  # the weights hold steps of its own that were not pushed
        self.has_sum = False  # of gradients that were not pushed
        self._may_step_alone = False

    @property
    def sends_early(self) -> bool:
        """Whether gradients may leave before `step`: the step will push them."""
        return self.steady and not self.must_ask and not self.alone

    @property
    def trains_on_own_weights(self) -> bool:
        """Whether the worker is in the middle of training with weights that differ from the server's."""
        return self.steps > 0 and (self.alone or not self.steady)

    # What begins ---------------------------------------------------------------------------------

    def step(self) -> Actions:
        """The script takes a step."""
        self._check(Phase.COMPUTING, "step")
        self.steps += 1
        self._may_step_alone = self.steady
        if not self.steady:
            return self._step_locally()
        if self.must_ask:
            return [Action.ASK, Action.AWAIT_ANSWER]
        if self.defers:
            return [SendPush("gradient"), Action.DEFER_WEIGHTS]
        return self._push()

    def _push(self) -> Actions:
        if not self.alone:
            return [SendPush("gradient"), Action.AWAIT_ANSWER]
        self._may_step_alone = False  # this step is a part of the delta
        return [Action.STEP_ALONE, SendPush("delta"), Action.AWAIT_ANSWER]

    def _step_locally(self) -> Actions:
        pulls = self.steps % self._pull_every == 0
        actions: Actions = [Action.STEP_ALONE]
        if self._pushes == "gradient":
            actions.insert(0, Action.ADD_TO_SUM)
        if self.steps % self._push_every == 0:
            what: Pushed = "sum" if self._pushes == "gradient" else "weights"
            actions += [SendPush(what, wants_weights=pulls), Action.AWAIT_ANSWER]
        elif pulls:
            actions.append(Action.PULL)
        return actions

    def merge(self) -> Actions:
        """The worker stops training: push what it has done by itself."""
        if not self.alone and not self.has_sum:
            return []
        self._check(Phase.COMPUTING, "merge")
        self._may_step_alone = False
        return [SendPush("sum" if self.has_sum else "delta", exact=True), Action.AWAIT_ANSWER]

    # What was done -------------------------------------------------------------------------------

    def summed(self) -> None:
        """The gradients were added to the sum."""
        self.has_sum = True

    def ask_sent(self) -> None:
        """The worker has asked whether to push."""
        self._check(Phase.COMPUTING, "ask")
        self.phase = Phase.ASKED

    def push_sent(self, what: Pushed) -> None:
        """All of a push was sent."""
        self._check(Phase.COMPUTING, "push")
        self.phase = Phase.PUSHED
        self.arrivals += 1
        if what == "sum":
            self.has_sum = False

    def push_refused(self, what: Pushed) -> None:
        """A push was not sent, for a value of it is not finite. A refused gradient is no step."""
        if what == "gradient":
            self.steps -= 1
        elif what == "sum":
            self.has_sum = False  # it would be refused for ever

    def pulled(self) -> None:
        """The server's weights were installed."""
        self.alone = False

    # Answers -------------------------------------------------------------------------------------

    def invited(self) -> Actions:
        """The coordinator invites the worker to push."""
        self._check(Phase.ASKED, "be invited")
        self.phase = Phase.COMPUTING
        return self._push()

    def released(self, *, fresh: bool, ask: bool) -> Actions:
        """The coordinator lets the worker go on: with `fresh` weights, or with its own."""
        if self.phase is Phase.COMPUTING:
            self._check(Phase.PUSHED, "be released")
        if self.phase is Phase.ASKED:
            self.arrivals += 1  # an ask that is not followed by a push
        self.phase = Phase.COMPUTING
        if self.defers:
            return []
        self.must_ask = ask
        if fresh:
            self.alone = False
            return [Action.INSTALL_WEIGHTS]
        if not self._each_step:
            return []
        self.alone = True
        return [Action.STEP_ALONE] if self._may_step_alone else []

    def _check(self, phase: Phase, what: str) -> None:
        if self.phase is not phase:
            raise WorkerError(
                f"a worker that is {self.phase.value} cannot {what}",
                where="parameter server",
                fix="end the run after a step has failed; otherwise report this as a defect",
            )
