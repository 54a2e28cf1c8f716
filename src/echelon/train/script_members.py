"""What becomes of a session when its members change: some are lost, leave, join or come back?

The session inherits this. The members' side is in `changes.py`, how one comes back in `coming_back.py`, and
when the script's functions are told in `change_calls.py`. Without `--min-workers` nothing of it happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from echelon.errors import WorkerError
from echelon.membership.survival import SurvivorView
from echelon.train.auto_shares import AutoShares
from echelon.train.change_calls import ChangeCalls, MembersChange
from echelon.train.changes import MemberChanges
from echelon.train.coming_back import ComingBack
from echelon.train.leaving import LeaveSignal
from echelon.train.loader import SharedLoader
from echelon.train.own_cycles import OwnCycles
from echelon.train.script_checkpoints import ScriptCheckpoints

_log = logging.getLogger(__name__)


class ScriptMembers(ScriptCheckpoints):
    """The session's members; the session sets what is declared here."""

    _changes: MemberChanges | None
    _coming_back: ComingBack | None
    _change_calls: ChangeCalls
    _leave_signal: LeaveSignal
    _cycles: OwnCycles | None
    _first_workers: int
    _auto_shares: AutoShares | None

    def _end_here(self) -> NoReturn:
        """End the script: this worker has left the run."""
        raise NotImplementedError

    def _follow_members(self) -> None:
        """Be told of members that change, and be ready to admit some; what they need is in place."""
        if self._changes is None:
            return
        self._cycles = OwnCycles(self._changes, self._clock)
        self._shares.goes_back = True
        self._log_leads &= not self._changes.returns  # meanwhile another one leads
        self._changes.handed = lambda: {one.index: one.batches_handed for one in self._prepared.loaders}
        self._changes.on_change = self._members_changed
        self._changes.on_unfit = self._members_unfit
        self._coming_back = ComingBack(
            changes=self._changes,
            prepared=self._prepared,
            shares=self._shares,
            clock=self._clock,
            guard=self._guard,
            seed=self._plan.seed,
            leads=lambda: self.is_leader,
            saving=lambda: self._by_itself,
            auto_shares=self._auto_shares,
            synchronizer=self._synchronizer,
        )

    @property
    def is_left_out(self) -> bool:
        """Whether this worker is left out as too slow (`--leave-out`): then no step of it counts."""
        return self._is_out

    def on_change(self, function: Callable[[MembersChange], object]) -> None:
        """Call a function whenever members have changed: workers were lost, have left, joined or are back.

        function  gets `lost`, `left` and `joined`, and this worker's new `rank`, `world_size` and `step`

        It is called in the training thread, when the loop asks for a batch between two steps, on all
        members alike, so it may exchange values with the others. Without `--min-workers` members never
        change. Call it before `session.epochs`. Example:

            session.on_change(lambda change: session.print(f"{change.world_size} workers go on"))
        """
        self._change_calls.add(function)

    def _members_changed(self, view: SurvivorView) -> None:
        """Workers were lost or are back: the members share what is not drawn yet."""
        self._change_calls.changed(view)
        self._name_nodes(view)
        self._log_leads = self._changes is not None and self._changes.slot == view.members[0]
        first = {one.index: view.handed.get(one.index, 0) for one in self._prepared.loaders}
        self._shares.keep(view.members, first)
        if view.planned:
            self._shares.workers = len(view.members)
        text = self._synchronizer.lost((*view.lost, *view.left))
        if text and self._log_leads:
            self.note(text)
        for loader in self._prepared.loaders:
            loader.changed()

    def _members_unfit(self, slots: Collection[int]) -> None:
        """Gradients of these workers were not finite in this round."""
        names = ", ".join(f"rank {slot}" for slot in sorted(slots))
        self.warn(
            f"{names}: gradients held NaN or infinity in step {self.step}; they are in no sum, and their "
            "samples are drawn again at the end of the pass, once"
        )

    def _name_nodes(self, view: SurvivorView) -> None:
        planned = self._plan.workers[: self._first_workers]
        self._nodes[:] = [planned[min(slot, len(planned) - 1)].node for slot in view.members]

    @property
    def _comes_back(self) -> bool:
        return self._changes is not None and self._changes.returns

    @property
    def _is_out(self) -> bool:
        return self._changes is not None and self._changes.is_out

    def _unlogged(self) -> AbstractContextManager[None]:
        return self._changes.unlogged() if self._changes is not None else nullcontext()

    def _begin_epochs(self) -> None:
        """Where workers may be lost: one that was started again becomes a member here."""
        if self._changes is None or self._coming_back is None:
            return
        self._leave_signal.install()
        if not self._changes.returns:
            self._changes.epochs_begin(min((one.most_workers for one in self._prepared.loaders), default=0))
            return
        view, self._first_epoch = self._coming_back.come_back()
        self._change_calls.changed(view)
        self._name_nodes(view)

    def _batch_asked(self, loader: SharedLoader) -> None:
        """The loop asks for a batch."""
        cycle = self._cycles.ended(loader) if self._cycles is not None else None
        if self._is_out:
            self._asked_alone(cycle)
        else:
            self._asked(loader)
            self._asked_together(loader)
        if self._cycles is not None:
            self._cycles.begins(loader)

    def _asked_alone(self, cycle: tuple[float, int] | None) -> None:
        """The same, of a worker that is left out: it comes back if its steps are as quick as is normal."""
        assert self._changes is not None
        assert self._coming_back is not None
        if cycle is None or not self._changes.is_well(*cycle):
            return
        view = self._coming_back.go_on_with_the_others()
        self._clock.records = True
        self._change_calls.changed(view)
        self._name_nodes(view)
        self._log_leads = self.is_leader
        self._tell_changes()

    def _tell_changes(self) -> None:
        """Call the script's functions for changes that are due here."""
        assert self._changes is not None
        if self._changes.drawn.empty and not self._changes.is_catching_up:
            self._change_calls.call(
                self._changes.operation, rank=self.rank, world_size=self.world_size, step=self.step
            )

    def _has_left_pass(self) -> WorkerError:
        """The error of a worker that was left out, and whose script has not stayed in the pass."""
        return WorkerError(
            "this worker was left out, and its script has left the pass over the data",
            where=f"rank {self._log_rank}",
            fix="nothing is to be done: it is started again",
        )

    def _asked_together(self, loader: SharedLoader) -> None:
        if self._coming_back is None or self._changes is None:
            return
        self._changes.progress.goes_on()
        if self._leave_signal.received:
            self._leave_signal.remove()
            refusal = self._changes.ask_to_leave()
            if refusal:
                self.warn(f"SIGTERM: {refusal}; training goes on, and another SIGTERM ends this worker")
        self._coming_back.asked(loader)
        if self._changes.has_left:
            self._end_here()
        if self._changes.is_out:
            self._log_leads = self._clock.records = False
            return
        self._tell_changes()
