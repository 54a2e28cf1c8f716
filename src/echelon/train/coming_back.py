"""How does a session admit a worker that was started again, and how does that worker take its place?

Members admit it when their loops ask for a batch after a step, in the first pass of an epoch. The new
worker has run the script up to `session.epochs` by then. It gets weights, optimizer state, buffers, the
step, the epoch and the positions in the data, and continues the pass. Its random streams are its own: they
follow from the run's seed, its slot and the view.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echelon.membership.survival import SurvivorView
from echelon.plan.shares import ShareTable
from echelon.train import streams
from echelon.train.auto_shares import AutoShares
from echelon.train.changes import MemberChanges
from echelon.train.clock import StepClock
from echelon.train.families.synchronizer import Synchronizer
from echelon.train.guard import Guard
from echelon.train.loader import SharedLoader
from echelon.train.run_state import Prepared
from echelon.train.script_checkpoints import SavesByItself


@dataclass(slots=True, kw_only=True)
class ComingBack:
    """What both sides see of a session.

    leads   tells whether this worker is the first member
    saving  when the session saves by itself; None if it does not
    """

    changes: MemberChanges
    prepared: Prepared
    shares: ShareTable
    synchronizer: Synchronizer
    clock: StepClock
    guard: Guard
    seed: int
    leads: Callable[[], bool]
    saving: Callable[[], SavesByItself | None]
    auto_shares: AutoShares | None = None
    in_pass: SharedLoader | None = None  # the first pass of the epoch
    asked_at: int = -1  # the step at which the loop asked for a batch last
    _state: dict[str, Any] | None = None

    def epoch_begins(self) -> None:
        """An epoch of `session.epochs` begins."""
        self.in_pass = None
        self.changes.epoch_begins(self.clock.epoch)

    def pass_begins(self, loader: SharedLoader) -> None:
        """A pass over a loader begins."""
        if self.in_pass is None:
            self.in_pass = loader

    def asked(self, loader: SharedLoader) -> None:
        """The loop asks for a batch: admit those who wait, or take the place among those who admit."""
        if loader is not self.in_pass:
            return
        if self._state is not None:
            self._take_place(self._state)
            return
        self.changes.batch_asked()
        stepped, self.asked_at = self.clock.step > self.asked_at, self.clock.step
        if loader.draws_again or not stepped or not self.changes.drawn.empty:
            return
        if not all(one.can_be_cut_anew for one in self.prepared.loaders):
            return
        if self.changes.due(leads=self.leads()):
            self.changes.admit(self._collect)

    def _collect(self) -> dict[str, Any]:
        """The state that a worker gets which comes back."""
        saving = self.saving()
        return {
            "saving": saving.place() if saving is not None else {},
            "models": [model.state_dict() for model in self.prepared.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.prepared.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.prepared.schedulers],
            "loaders": [loader.place() for loader in self.prepared.loaders],
            "in_pass": self.in_pass.index if self.in_pass is not None else -1,
            "synchronizer": self.synchronizer.shared_state(),
            "shares": self.shares.table(),
            "auto_shares": self.auto_shares.place() if self.auto_shares is not None else [],
            "step": self.clock.step,
            "epoch": self.clock.epoch,
            "guard": self.guard.place(),
        }

    def come_back(self) -> tuple[SurvivorView, int]:
        """Become a member again; the view, and the epoch to continue with."""
        view, state = self.changes.come_back()
        self._load(state)
        for optimizer, saved in zip(self.prepared.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.prepared.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        for loader, place in zip(self.prepared.loaders, state["loaders"], strict=True):
            loader.go_to(place, in_pass=loader.index == state["in_pass"])
        self.synchronizer.adopt_shared(state["synchronizer"])
        self.shares.adopt(state["shares"])
        if self.auto_shares is not None:
            self.auto_shares.go_to([float(number) for number in state["auto_shares"]])
        self.clock.step = state["step"]
        saving = self.saving()
        if saving is not None:
            saving.go_to(state["saving"], self.clock.step)
        self._state = state
        return view, int(state["epoch"])

    def go_on_with_the_others(self) -> SurvivorView:
        """Be a member again between two steps of the pass that this worker was left out of."""
        view, _ = self.come_back()
        assert self._state is not None
        assert self.in_pass is not None
        self._take_place(self._state)
        self.in_pass.moved()
        return view

    def _load(self, state: dict[str, Any]) -> None:
        for model, saved in zip(self.prepared.models, state["models"], strict=True):
            model.load_state_dict(saved)

    def _take_place(self, state: dict[str, Any]) -> None:
        """The pass goes on: this worker is where the others were when they admitted it."""
        self._state = None
        self.changes.caught_up()
        self._load(state)  # buffers were those of the pass' beginning meanwhile
        self.guard.go_to([int(number) for number in state["guard"]])
        self.asked_at = self.clock.step
        streams.begin(f"{self.seed}/{self.changes.slot}/{self.changes.number}")
