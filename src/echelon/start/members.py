"""Who is still in the run? The launcher's service for runs that go on when workers are lost.

The launcher tells it which processes have ended. Workers tell it where they stand when an operation has
failed, and get the next view, as membership/survival.py decides. Only processes with the run's token are
answered. Workers that step without losses ask nothing.

A lost worker is started again, as membership/respawn.py says. It waits here until the others admit it.
A further worker that is to join waits here, too. A worker that is to leave, because the user or SIGTERM
says so, does so between two steps, like those that are admitted.
One that holds the others up, as membership/stuck.py says, is left out: its process is killed.
One that is too slow, as membership/slow.py says, is left out between two steps: its process goes on alone,
tells here what its steps take, and comes back when it is well.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from echelon.config.exit_codes import SAVED_AND_STOPPED
from echelon.membership.respawn import RespawnRule
from echelon.membership.slow import SlowRule
from echelon.membership.survival import Survival, SurvivorState
from echelon.membership.view import MemberId
from echelon.observe.events import LAUNCHER, MembersChanged
from echelon.observe.stall import ranks
from echelon.start.member_board import MemberBoard
from echelon.start.stuck_watch import StuckWatch
from echelon.train.service import EPOCHS_KEY, MOST_KEY, TOKEN_VARIABLE, UNFIT_ROUNDS

_GET_S = 0.1
_NOBODY_S = 5.0
_SETTLE_S = 20.0
_MOST_BYTES = 1 << 26


class Members:
    """The members of one run, in a thread for each worker.

    limit_s  how long survivors wait for one that has not come to the operation that failed, if nothing
             shows earlier that it is stuck
    tries    how often in a row a lost worker is started again
    board    how launcher and members see each other
    slow     says which members are too slow; None if nobody is left out for that
    """

    def __init__(
        self,
        workers: int,
        fewest: int,
        *,
        limit_s: float,
        tries: int,
        board: MemberBoard,
        slow: SlowRule | None = None,
    ) -> None:
        self._survival = Survival(workers, fewest)
        self._limit_s = limit_s
        self._tries = tries
        self._rule = RespawnRule(tries)
        self._changed = threading.Condition()
        self._values: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._ended: dict[int, int] = {}
        self._lost_at: dict[int, float] = {}
        self._to_start: list[int] = []
        self._to_add: list[int] = []
        self._slots = workers  # so many have been given to workers
        self._joining: set[int] = set()  # further workers that were no members yet
        self._returning: set[int] = set()  # started again, and no members yet
        self._came_back: set[int] = set()  # members again
        self._fresh: set[int] = set()  # of these, without a step yet
        self._to_end: set[int] = set()
        self._left_out: dict[int, str] = {}  # and why, until their processes have ended
        self._out_of_reach: dict[int, str] = {}  # whose machines are gone, and why
        self._differing: set[int] = set()  # came back, and made other calls than the others
        self._why_left: dict[int, str] = {}  # who is to leave, or has left, and why
        self._departed: set[int] = set()
        self._news: list[str] = []
        self._happened: list[MembersChanged] = []
        self._raised = False  # a worker has raised an error, which ends the run
        self._after_round = 0  # after which members admit who waits; 0: that is not decided
        self._out: dict[int, int] = {}  # who is left out as too slow, and the epoch it is in
        self._anew: set[int] = set()  # of these, whose processes end so that others come back
        self._epoch = 0
        self._board = board
        self._stuck = StuckWatch(board, limit_s, slow)
        self._token = secrets.token_hex(16)
        board.open(self._serve)

    @property
    def environment(self) -> dict[str, str]:
        """What workers need to find it."""
        return {TOKEN_VARIABLE: self._token, **self._board.environment}

    @property
    def leader(self) -> int:
        """The slot of the first worker that is there."""
        with self._changed:
            return next(iter(self._survival.living), 0)

    @property
    def gone(self) -> frozenset[int]:
        """The slots without a member: lost, or starting again."""
        with self._changed:
            return self._survival.gone

    @property
    def excused(self) -> frozenset[int]:
        """The slots whose failures do not end the run: lost, starting again, back, or left in order."""
        with self._changed:
            return self._survival.gone | self._came_back | self._departed

    @property
    def absent(self) -> frozenset[int]:
        """The slots that are not in the run any more, or not yet: of them nothing is expected."""
        with self._changed:
            return self._survival.gone | self._departed

    @property
    def awaits(self) -> bool:
        """Whether a worker was started again and has not taken part in a step yet."""
        with self._changed:
            return bool(self._returning or self._fresh)

    def look(self) -> None:
        """Leave out the members that hold the others up, if enough are left then."""
        with self._changed:
            for late in self._stuck.late(self._survival.living):
                if self._survival.can_lose({late.slot, *self._left_out}):
                    self._left_out[late.slot] = str(late)
                    self._to_end.add(late.slot)
            for slow in self._stuck.slow(self._survival.living):
                fits = self._survival.may_leave([slow.slot]) and f"-1/{EPOCHS_KEY}" in self._values
                if fits and slow.slot not in self._why_left:
                    self._survival.leave(slow.slot, comes_back=True)
                    self._why_left[slow.slot] = str(slow)
                    self._mark()

    def ended(self, slot: int, code: int, machine_gone: str = "") -> None:
        """A process has ended with this code. The others go on without it after a signal.

        One that has raised would raise again, on any worker: that ends the run, unless it was started
        again. Then it is left out: its script may do something else than the others' do.
        `machine_gone`: why its machine is out of reach, where nothing can be started again.
        """
        with self._changed:
            if slot in self._ended:
                return
            code = 0 if code == SAVED_AND_STOPPED else code
            self._ended[slot] = code
            if machine_gone:
                self._out_of_reach[slot] = machine_gone
            late = self._left_out.pop(slot, None)
            if slot in self._joining:
                self._joining.discard(slot)
                self._returning.discard(slot)
                self._survival.give_up(slot)
                self._mark()
                self._not_joined(slot, code)
            elif slot in self._returning:
                self._returning.discard(slot)
                self._survival.give_up(slot)
                self._mark()
                was_out = self._out.pop(slot, None) is not None
                if slot in self._anew:
                    self._anew.discard(slot)
                    self._news.append(f"rank {slot} is well, and is started again for this epoch")
                    self._start_again(slot, "")
                else:
                    self._lost(slot, code, None, returns=True, alone=was_out)
            elif code < 0 or (code and slot in self._came_back):
                if self._survival.lose(slot):
                    self._lost_at[slot] = time.monotonic()
                    self._lost(slot, code, late, returns=slot in self._fresh)
                self._fresh.discard(slot)
                self._came_back.discard(slot)
            self._follow()
            self._changed.notify_all()

    def _lost(self, slot: int, code: int, late: str | None, *, returns: bool, alone: bool = False) -> None:
        left = len(self._survival.living)
        how = self._how(slot, code)
        what = "left out" if late is not None else "did not come back" if returns else "lost"
        self._note(slot, what, late if late is not None else how)
        if late is not None:
            self._news.append(f"rank {slot} was left out: {late}; {left} workers go on")
            self._rule.left_out(MemberId("", slot), self._stuck.rounds(slot))
        elif returns:
            self._news.append(f"rank {slot} did not come back ({how}); {left} workers go on")
        elif code < 0:
            self._news.append(f"rank {slot} was lost ({how}); {left} workers go on")
        else:
            self._news.append(f"rank {slot} failed after it had come back ({how}); {left} workers go on")
        self._start_again(slot, "" if code < 0 or alone else how)

    def _not_joined(self, slot: int, code: int) -> None:
        how = self._how(slot, code)
        left = len(self._survival.living)
        self._note(slot, "did not join", how)
        self._news.append(f"rank {slot} did not join ({how}); {left} workers go on")

    def _how(self, slot: int, code: int) -> str:
        how = _signal(code) if code < 0 else f"exit code {code}"
        return self._out_of_reach.get(slot, how)

    def add(self, count: int, *, elsewhere: bool = False) -> tuple[list[int], str]:
        """Let so many further workers join; their slots, or why they do not, in a sentence.

        `elsewhere`: another machine starts them by itself.
        """
        with self._changed:
            if f"-1/{EPOCHS_KEY}" not in self._values:
                return [], "nobody can join before the script trains in `for epoch in session.epochs(n)`"
            most = int(self._values.get(f"-1/{MOST_KEY}", "0"))
            there = len(self._survival.living) + len(self._returning) + len(self._to_add)
            there += len(self._to_start) - len(self._survival.leaving)
            if there + count > most:
                return [], (
                    f"{there + count} workers cannot share every batch of this run: {there} train now, "
                    f"and at most {most} can"
                )
            slots = list(range(self._slots, self._slots + count))
            self._slots += count
            for slot in slots:
                self._survival.expect(slot)
                self._lost_at[slot] = time.monotonic()
            self._joining |= set(slots)
            if elsewhere:
                self._returning |= set(slots)
            else:
                self._to_add += slots
        return slots, ""

    def to_add(self) -> list[int]:
        """The slots for which a first process is to be started now."""
        with self._changed:
            slots, self._to_add = self._to_add, []
            self._returning |= set(slots)
        return slots

    def leave(self, slots: Sequence[int], why: str) -> str:
        """Let these workers leave between two steps; or why they do not, in a sentence."""
        with self._changed:
            living = self._survival.living
            fresh = [slot for slot in slots if slot not in self._why_left]
            unknown = [slot for slot in fresh if slot not in living]
            if unknown:
                return f"{ranks(unknown)} cannot leave: {ranks(living)} train now"
            if f"-1/{EPOCHS_KEY}" not in self._values:
                return "nobody can leave before the script trains in `for epoch in session.epochs(n)`"
            if not self._survival.may_leave(fresh):
                left = len(set(living) - {*fresh, *self._survival.leaving})
                return (
                    f"{ranks(fresh)} cannot leave: {left} would be left, and --min-workers is "
                    f"{self._survival.fewest}"
                )
            for slot in fresh:
                self._survival.leave(slot)
                self._why_left[slot] = why
            self._mark()
        return ""

    def whereabouts(self, slots: Sequence[int]) -> dict[int, str]:
        """Where these workers are on their way out of the run or into it."""
        with self._changed:
            return {slot: self._where(slot) for slot in slots}

    def _where(self, slot: int) -> str:
        if slot in self._departed:
            return "left"
        if slot in self._survival.leaving:
            return "leaving"
        if slot in self._survival.waiting:
            return "waiting"
        if slot in self._joining:
            return "joining"
        return "member" if slot in self._survival.living else "gone"

    def _start_again(self, slot: int, failure: str) -> None:
        """Start a new worker in the slot, unless that would fail again."""
        self._stuck.ended(slot)
        if slot in self._why_left:
            return
        if not self._tries:
            return
        member = MemberId("", slot)
        self._rule.failed(member, failure, 0)
        refusal = f"its script ended with {failure}" if failure else self._rule.refusal(member)
        if slot in self._differing:
            refusal = "after it had come back, its script made other calls than the others'"
        if f"-1/{EPOCHS_KEY}" not in self._values:
            refusal = "the script does not train in `for epoch in session.epochs(n)`"
        if slot in self._out_of_reach:
            refusal = "its machine is out of reach"
        if refusal:
            self._note(slot, "not started again", refusal)
            self._news.append(f"rank {slot} is not started again: {refusal}")
        else:
            self._to_start.append(slot)

    def _note(self, slot: int, what: str, reason: str = "") -> None:
        workers = len(self._survival.living)
        self._happened.append(
            MembersChanged(
                t=time.time(), rank=LAUNCHER, worker=slot, what=what, workers=workers, reason=reason
            )
        )

    def to_start(self) -> list[int]:
        """The slots for which a process is to be started now."""
        with self._changed:
            slots, self._to_start = self._to_start, []
            for slot in slots:
                del self._ended[slot]
                self._returning.add(slot)
        return slots

    def to_end(self) -> set[int]:
        """The slots whose processes are to be killed now, since the others go on without them."""
        with self._changed:
            slots, self._to_end = self._to_end, set()
        return slots

    def news(self) -> list[str]:
        """What is to be told since the last call."""
        with self._changed:
            told, self._news = self._news, []
        return told

    def happened(self) -> list[MembersChanged]:
        """What is to be recorded since the last call."""
        with self._changed:
            told, self._happened = self._happened, []
        return told

    def close(self) -> None:
        """Answer nobody any more."""
        self._board.close()

    def _mark(self) -> None:
        """Let the members see whether somebody waits."""
        waiting = len(self._survival.waiting) + len(self._survival.leaving)
        self._board.publish(waiting, self._after_round)

    def _follow(self) -> None:
        view = self._survival.follow()
        if view is None:
            return
        if view.joined or view.planned:
            self._after_round = 0  # all members stand, so none of them asks for another one meanwhile
        self._departed |= set(view.left) - set(view.out)
        for slot in [slot for slot in self._why_left if slot in view.members and view.planned]:
            del self._why_left[slot]
            self._news.append(
                f"rank {slot} stays: without it fewer than {self._survival.fewest} would be left"
            )
        if view.damage:
            self._note(view.members[0], "met again", view.damage)
            self._news.append(
                f"{view.damage}; {len(view.members)} workers met again, and repeat the exchange"
            )
        for slot in view.left:
            count = len(view.members)
            if slot in view.out:
                why = self._why_left.pop(slot)
                self._out[slot] = self._epoch
                self._returning.add(slot)
                self._came_back.discard(slot)
                self._fresh.discard(slot)
                self._lost_at[slot] = time.monotonic()
                self._stuck.begins_anew(slot)
                self._note(slot, "left out", why)
                self._news.append(f"rank {slot} was left out: {why}; {count} workers go on")
                continue
            self._note(slot, "left", self._why_left[slot])
            self._news.append(f"rank {slot} has left ({self._why_left[slot]}); {count} workers go on")
        for slot in view.joined:
            self._returning.discard(slot)
            self._out.pop(slot, None)
            self._stuck.begins_anew(slot)
            self._fresh.add(slot)
            self._came_back.add(slot)
            took_s = time.monotonic() - self._lost_at.get(slot, time.monotonic())
            count, joins = len(view.members), slot in self._joining
            self._joining.discard(slot)
            self._note(slot, "joined" if joins else "back", f"after {took_s:.1f} s")
            if joins:
                self._news.append(f"rank {slot} has joined after {took_s:.1f} s; {count} workers go on")
            else:
                self._news.append(f"rank {slot} is back after {took_s:.1f} s; {count} workers go on")
        self._mark()
        self._changed.notify_all()

    # One thread for each worker ------------------------------------------------------------------

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, msgspec.ValidationError), sock:
            file = sock.makefile("rwb")
            slot = -1
            while line := file.readline(_MOST_BYTES):
                request = json.loads(line)
                if slot < 0:
                    if not hmac.compare_digest(str(request.get("token")), self._token):
                        return
                    slot = int(request["slot"])
                    answer: dict[str, Any] = {}
                else:
                    answer = self._answer(slot, request)
                with self._changed:
                    answer["gone"] = sorted(self._survival.gone)
                file.write(json.dumps(answer).encode() + b"\n")
                file.flush()

    def _answer(self, slot: int, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "set":
                with self._changed:
                    self._values[request["key"]] = request["value"]
                    self._changed.notify_all()
                return {}
            case "get":
                key = request["key"]
                with self._changed:
                    self._changed.wait_for(lambda: key in self._values, _GET_S)
                    return {"value": self._values.get(key)}
            case "check":
                with self._changed:
                    known = self._values.keys() | self._counts.keys()
                    return {"value": set(request["keys"]) <= known}
            case "add":
                with self._changed:
                    count = self._counts.get(request["key"], 0) + int(request["count"])
                    self._counts[request["key"]] = count
                    return {"value": count}
            case "ready":
                with self._changed:
                    self._survival.ready(slot)
                return {}
            case "left":
                with self._changed:
                    failed = bool(request["failed"])
                    excused = slot in self._returning or slot in self._departed
                    if not excused and not (failed and slot in self._came_back):
                        self._survival.left(slot)
                        self._raised |= failed
                    self._follow()
                    self._changed.notify_all()
                return {}
            case "leave":
                return {"refusal": self.leave([slot], "SIGTERM")}
            case "admit":
                return self._admit(slot, int(request["round"]))
            case "stepped":
                with self._changed:
                    self._fresh.discard(slot)
                    self._rule.progressed(MemberId("", slot))
                return {}
            case "leave out":
                with self._changed:
                    found = set(request["slots"]) & self._came_back - self._differing
                    self._differing |= found
                    self._to_end |= found
                return {}
            case "return":
                return self._return(slot)
            case "unfit":
                return self._leave_out_unfit(request["slots"])
            case "epoch":
                return self._begin_epoch(int(request["epoch"]))
            case "well":
                return self._well(slot, float(request["cycle_s"]), int(request["share"]))
            case "stand":
                return self._stand(msgspec.convert(request["standing"], SurvivorState, strict=False))
        return {}

    def _admit(self, slot: int, after_round: int) -> dict[str, Any]:
        """The first member lets all admit who waits after this round, which it takes part in after this."""
        with self._changed:
            if slot != next(iter(self._survival.living), None):
                return {}  # it was lost meanwhile, and others may have gone on without its word
            self._after_round = after_round
            self._mark()
        self._board.settle(_SETTLE_S)
        return {}

    def _leave_out_unfit(self, slots: Sequence[int]) -> dict[str, Any]:
        """End members whose gradients are not finite again and again, if enough are left then."""
        with self._changed:
            for slot in slots:
                if slot not in self._left_out and self._survival.can_lose({slot, *self._left_out}):
                    self._left_out[slot] = f"its gradients were not finite in {UNFIT_ROUNDS} steps in a row"
                    self._to_end.add(slot)
        return {}

    def _begin_epoch(self, epoch: int) -> dict[str, Any]:
        """The members are in this epoch from now on; who is out can come back to an earlier one no more."""
        with self._changed:
            if epoch > self._epoch:
                self._epoch = epoch
                for slot in self._out:
                    self._survival.give_up(slot)
                self._mark()
        return {}

    def _well(self, slot: int, cycle_s: float, share: int) -> dict[str, Any]:
        """Whether a worker that is out may come back; a new process does, if the others' epoch is another.

        Its script would have to come to that epoch, and exchange what belongs to the one it is in.
        """
        with self._changed:
            well = self._stuck.is_well(slot, cycle_s, share, self._survival.living)
            if well and self._out.get(slot) != self._epoch:
                self._end_to_begin_anew(slot)
                return {"well": False}
            return {"well": well}

    def _end_to_begin_anew(self, slot: int) -> None:
        self._anew.add(slot)
        self._to_end.add(slot)

    def _return(self, slot: int) -> dict[str, Any]:
        """Wait a moment until the new worker of a lost slot is a member; then its first view."""
        with self._changed:
            if self._out.get(slot, self._epoch) != self._epoch:
                self._end_to_begin_anew(slot)
                self._changed.wait(_GET_S)
                return {}
            self._survival.wait(slot)
            self._mark()
            self._changed.wait_for(lambda: slot not in self._survival.gone, 1.0)
            view = self._survival.view
            if slot in self._survival.gone or slot not in view.joined:
                return {}
            return {"view": msgspec.to_builtins(view, str_keys=True)}

    def _stand(self, standing: SurvivorState) -> dict[str, Any]:
        """Wait for the view after the one that the worker is in."""
        began = time.monotonic()
        with self._changed:
            self._survival.stand(standing)
            self._follow()
            while self._survival.view.number <= standing.view:
                waited_s = time.monotonic() - began
                known = self._survival.broken or standing.admits
                if waited_s > (self._limit_s if known else _NOBODY_S):
                    return {}
                if self._failed():
                    return {}
                self._changed.wait(_GET_S)
            view = self._survival.view
            if standing.slot not in (*view.members, *view.left):
                return {}
            return {"view": msgspec.to_builtins(view, str_keys=True)}

    def _failed(self) -> bool:
        """Whether a process has ended, or will, so that the run ends."""
        return self._raised or any(
            code and slot not in self._survival.gone | self._departed for slot, code in self._ended.items()
        )


def _signal(code: int) -> str:
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
