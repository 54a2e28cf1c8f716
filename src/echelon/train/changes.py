"""What does a worker do when others are lost? It asks who goes on, meets them, and repeats the operation.

All of it happens in the training thread, in the operation that has failed. Results of operations that other
members lack are given to them first; then all members are at the same operation.

A worker that was started again runs the script from its beginning. What the members exchanged before the
first epoch, and from the current epoch's beginning to its first batch, is repeated from logs. In between it
waits until it is a member, and gets the state of one of them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from echelon.comm.changing import LOST, ChangingGroup
from echelon.comm.group import Group
from echelon.comm.left_out import LeftOutGroup
from echelon.comm.meet.links import Links
from echelon.comm.meet.rendezvous import Member, Rendezvous
from echelon.errors import Corrupt, PeerLost, WorkerError
from echelon.membership.survival import SurvivorState, SurvivorView
from echelon.train import state_pieces
from echelon.train.admission import AdmissionFlag
from echelon.train.drawn import DrawnBatches
from echelon.train.progress import OwnProgress
from echelon.train.service import EPOCHS_KEY, MOST_KEY, UNFIT_ROUNDS, MemberService, ServiceStore

_SWITCH_S = 5e-4  # as in comm/wire/loop.py
_LARGE_BYTES = (
    1 << 16
)  # larger broadcasts of `prepare` are weights, which are sent again when they are needed
_MOST_LOGGED_BYTES = 32 << 20
_ADMITTED_S = 3600.0
STARTUP_KEY = "startup"
FIRST_KEY = "first"
LINKS_KEY = "links"


class MemberChanges:
    """The changes of one run's members, as one worker goes through them.

    first      the first meeting; a worker's rank there is its slot from then on
    open_view  connects the members of a meeting
    flag       says when workers that come back are admitted
    progress   tells the launcher how far this worker is
    returns    this worker was started again, and is no member yet
    """

    def __init__(
        self,
        service: MemberService,
        first: Rendezvous,
        open_view: Callable[[Rendezvous], Group],
        flag: AdmissionFlag | None = None,
        progress: OwnProgress | None = None,
        *,
        returns: bool = False,
    ) -> None:
        self.number = self._described = 0
        self.returns = returns
        self.rounds = 0
        self.preparing = False  # the session is in `prepare`
        self._flag = flag
        self.progress = progress if progress is not None else OwnProgress(None, 0)
        self._log: list[list[Tensor]] | None = []  # results since the start, or since the epoch began
        self._logs = not returns
        self._replayed: deque[list[Tensor]] | None = None
        self._in_epochs = self._fresh = False
        self._came_back: set[int] = set()
        self._losses: list[tuple[int, tuple[int, ...]]] = []  # by the number of the change
        self.slot = first.me.rank
        self.members = tuple(member.rank for member in first.members)
        self._views = {0: self.members}
        self.drawn = DrawnBatches()
        self.handed: Callable[[], Mapping[int, int]] = dict
        self.on_change: Callable[[SurvivorView], None] = _nothing
        self.settle: Callable[[], None] = _nobody_waits
        self._in_flight = 0  # rounds that have begun and are no operation yet
        self._before_flight: tuple[int, int] | None = None  # rounds and operations when the last ones began
        self.on_unfit: Callable[[Collection[int]], None] = _nothing
        self._unfit: dict[int, int] = {}  # whose gradients were not finite, in how many rounds in a row
        self._service = service
        self._first = first
        self._open_view = open_view
        self._groups: list[ChangingGroup] = []
        self._operation = 0
        self._kept: dict[int, list[Tensor]] = {}
        self._found: dict[int, list[Tensor]] = {}
        self._active = False
        self.has_left = False  # this worker has left the run in an orderly way
        self.is_out = False  # this worker is left out for a while, and goes on alone
        if returns:
            self._replayed = deque(_unpack_log(self.store().get(STARTUP_KEY).decode()))
            self.store().set(f"member/{self.slot}", msgspec.json.encode(first.me).decode())
        elif self.slot == 0:
            self.store().set(FIRST_KEY, msgspec.json.encode(list(first.members)).decode())

    def store(self) -> ServiceStore:
        """Values that stay whoever is lost."""
        return ServiceStore(self._service, -1, ())

    def keep_links(self, links: Links | None) -> None:
        """Keep what was measured at first: sizes of buckets follow from it, and must stay the same."""
        if self.slot == 0 and links is not None:
            latencies, rates = list(links.latency_s.items()), list(links.bytes_per_s.items())
            self.store().set(LINKS_KEY, json.dumps([links.size, latencies, rates]))

    def first_links(self) -> Links | None:
        """What was measured at first."""
        if not self.store().check([LINKS_KEY]):
            return None
        size, latencies, rates = json.loads(self.store().get(LINKS_KEY))
        return Links(
            size=size,
            latency_s={(a, b): value for (a, b), value in latencies},
            bytes_per_s={(a, b): value for (a, b), value in rates},
        )

    def described(self, mine: bytes) -> bytes | None:
        """What the first worker has prepared next, on one that is no member yet; else None."""
        self._described += 1
        key = f"described/{self._described}"
        if self.returns:
            return base64.b64decode(self.store().get(key)) if self.store().check([key]) else None
        if self.slot == 0 and self.number == 0:
            self.store().set(key, base64.b64encode(mine).decode())
        return None

    def opened(self, group: ChangingGroup) -> None:
        """Let a group follow the changes; the first one is that of all members, the others are forks."""
        self._groups.append(group)

    def ready(self) -> None:
        """From now on this worker can go on without others."""
        if not self._active:
            self._active = True
            self._service.ask(do="ready")

    def left(self, *, failed: bool) -> None:
        """This worker has done its part, or has raised an error: then nobody waits for a new view."""
        with contextlib.suppress(WorkerError):  # the launcher is gone, and so is the run
            self._service.ask(do="left", failed=failed)

    def lost(self, since: int, slots: Sequence[int]) -> Sequence[int]:
        """Which of these slots were lost after so many changes, also if members have not met since."""
        before = [slot for number, lost in list(self._losses) if number > since for slot in lost]
        with contextlib.suppress(WorkerError):  # the launcher is gone, and so is the run
            before += self._service.ask(do="look")["gone"]
        return sorted(set(slots) & set(before))

    def members_of(self, number: int) -> Sequence[int]:
        """The slots of the members after so many changes, by rank."""
        return self._views[number]

    @contextlib.contextmanager
    def unlogged(self) -> Iterator[None]:
        """What is exchanged in the block is not repeated by a worker that comes back."""
        logs, self._logs = self._logs, False
        try:
            yield
        finally:
            self._logs = logs

    # Operations ----------------------------------------------------------------------------------

    def begin(self) -> list[Tensor] | None:
        """The next operation begins; its result, if others have completed it in an earlier view."""
        if self.has_left:
            raise WorkerError(
                "this worker has left the run, and exchanges nothing any more",
                where=f"rank {self.slot}",
                fix="exchange nothing in `finally` or `except SystemExit`: see session.on_change",
            )
        if self.is_out:
            return None
        if self._replayed is not None:
            if not self._replayed:
                raise self._differs()
            return self._replayed.popleft()
        self._operation += 1
        self.progress.waits(self._operation)
        return self._found.pop(self._operation, None)

    def complete(self, result: Sequence[Tensor], *, full: bool) -> None:
        """Keep the result. If none can have it before all have begun it, all have those before."""
        if self._replayed is not None or self.is_out:
            return
        if self._logs and self._log is not None:
            weights = self.preparing and sum(one.nbytes for one in result) > _LARGE_BYTES and not full
            self._log.append([] if weights else list(result))
        self.progress.goes_on()
        if full:
            self._kept.clear()
        self._kept[self._operation] = list(result)

    def outdated(self) -> bool:
        """Whether lost workers counted when this worker's weight was given."""
        return not self.is_out and self.number > 0 and self.drawn.names_lost(self.members)

    def sent(self) -> None:
        """A round is in flight. So many operations were over before it on all members alike."""
        if self.is_out:
            return
        if not self._in_flight:
            self._before_flight = self.rounds, self._operation
        self._in_flight += 1
        self.drawn.sent()

    def _judge(self, refused: Collection[int]) -> None:
        """Say whose gradients are not finite; whose are so again and again is left out."""
        fresh = [slot for slot in refused if slot not in self._unfit]
        self._unfit = {slot: self._unfit.get(slot, 0) + 1 for slot in refused}
        fit = [slot for slot in self.members if slot not in refused]
        if not fit or self.slot != fit[0]:
            return
        if fresh:
            self.on_unfit(fresh)
        if lasting := [slot for slot, times in self._unfit.items() if times >= UNFIT_ROUNDS]:
            self._service.ask(do="unfit", slots=lasting)

    def reduced(
        self, slots: Collection[int], alone: Collection[int] = (), refused: Collection[int] = ()
    ) -> None:
        """A round is complete with all that these workers have drawn: their gradients or their weights.

        refused  the slots whose gradients were not in the sum, because they were not finite
        alone    members whose weights nobody else has got in it
        """
        if self.is_out:
            return
        self.drawn.refuse(refused)
        self.drawn.reduced(slots, alone)
        if refused or self._unfit:
            self._judge(refused)
        self.rounds += 1
        self._in_flight = max(0, self._in_flight - 1)
        self.progress.reduced()
        if self._logs:
            self._log = None  # sums are not logged, so nobody can come back here
        if self._fresh:
            self._fresh = False
            self._service.ask(do="stepped")

    def loss(self, error: Exception) -> WorkerError | None:
        """The loss that an error means: also if calls differ, and a member has come back.

        Its script may count steps itself, and so do something else than the others. The launcher ends it;
        if calls still differ then, all raise the error.
        """
        if isinstance(error, LOST):
            return error
        suspects = tuple(place for place, slot in enumerate(self.members) if slot in self._came_back)
        if not suspects or self.slot in self._came_back:
            return None
        self._service.ask(do="leave out", slots=sorted(self._came_back & set(self.members)))
        return PeerLost("a worker that has come back makes other calls than the others", ranks=suspects)

    def recover(self, error: WorkerError) -> list[Tensor] | None:
        """Go on without the lost workers; the result of the operation, if others have completed it."""
        while self._active:
            damage = error.message if isinstance(error, Corrupt) else ""
            view = self._stand(self._operation, damage=damage)
            if view is None:
                break
            try:
                self._adopt(view, self._operation)
                return self._found.pop(self._operation, None)
            except LOST as again:  # another one was lost meanwhile
                if self._operation in self._found:
                    return self._found.pop(self._operation)
                error = again
        raise error

    def _stand(self, operation: int, *, admits: bool = False, damage: str = "") -> SurvivorView | None:
        return self._service.stand(
            SurvivorState(
                slot=self.slot,
                view=self.number,
                operation=operation,
                handed=dict(self.handed()),
                admits=admits,
                damage=damage,
            )
        )

    def _adopt(self, view: SurvivorView, at: int) -> None:
        """Meet the others again, and give them what they lack; this worker is at operation `at`."""
        self.number, self.members = view.number, view.members
        self._views[view.number] = view.members
        self._came_back |= set(view.joined)
        self._losses.append((view.number, view.lost))
        if not view.damage:
            self.on_change(view)
        self._connect(view)
        inner = self._groups[0].inner
        for operation in view.behind:
            source = view.source(operation)
            mine = _packed(self._kept[operation]) if source == inner.rank else b""
            told = inner.broadcast_bytes(mine, source)
            if at <= operation:
                self._found[operation] = _unpacked(told)

    def _connect(self, view: SurvivorView) -> None:
        """Connect with the members of a view, and let all groups go on with these connections."""
        people = tuple(
            msgspec.structs.replace(self._member(slot), rank=place)
            for place, slot in enumerate(view.members)
        )
        me = people[view.members.index(self.slot)]
        root = self._groups[0]
        threading.Thread(target=_close, args=(root.inner,), name="echelon-closing", daemon=True).start()
        meeting = Rendezvous(
            ServiceStore(self._service, view.number, view.members),
            me,
            people,
            self._first.timeout_s,
            self._first.departure_causes,
            self._first.reasons,
        )
        inner = self._open_view(meeting)
        root.adopt(inner)
        for fork in self._groups[1:]:
            fork.adopt(inner.fork())

    def _member(self, slot: int) -> Member:
        """A member as it is now; its process may be another one than at first."""
        store, key = self.store(), f"member/{slot}"
        if store.check([key]):
            return msgspec.json.decode(store.get(key), type=Member)
        return self._first.members[slot]

    # Workers that leave --------------------------------------------------------------------------

    def ask_to_leave(self) -> str:
        """Let this worker leave between two steps; why that is refused, if it is."""
        return self._service.leave()

    # Workers that come back ----------------------------------------------------------------------

    def epochs_begin(self, most: int) -> None:
        """The script's epochs begin: let the launcher keep what was exchanged before them.

        most  how many workers can share a batch
        """
        if self._in_epochs:
            return
        self._in_epochs = True
        log, self._log, self._logs = self._log, None, False
        if self.slot == self.members[0] and log is not None:
            text = _pack_log(log)
            if len(text) <= _MOST_LOGGED_BYTES:
                self.store().set(STARTUP_KEY, text)
                self.store().set(MOST_KEY, str(most))
                self.store().set(EPOCHS_KEY, "1")

    def epoch_begins(self, epoch: int) -> None:
        """Log what is exchanged until the epoch's first batch."""
        if self._in_epochs and self._replayed is None:
            self._log, self._logs = [], True
            self._service.ask(do="epoch", epoch=epoch)

    def batch_asked(self) -> None:
        """The epoch's first pass asks for a batch: from now on nothing is logged."""
        self._logs = False

    def due(self, *, leads: bool) -> bool:
        """Whether workers that wait are admitted now; the leader decides it for the next round.

        Where rounds are in flight, one that is over before others begin: all have what the leader said.
        """
        if not self._in_epochs or self._flag is None or self._log is None:
            return False
        if leads and self._flag.undecided:
            self._service.ask(do="admit", round=self.rounds + self._in_flight + 1)
        return self._flag.due(self.rounds if self._before_flight is None else self._before_flight[0])

    def admit(self, state: Callable[[], dict[str, Any]]) -> None:
        """Meet the workers that wait, between two steps; the first member sends them the state."""
        following, again = self._operation + 1, False
        self.progress.waits(following)
        while again or self.due(leads=False):
            again = False
            view = self._stand(following, admits=True)
            if view is None:
                raise PeerLost("another worker did not come to admit one that comes back", ranks=())
            if self.slot in view.out:
                self._go_on_alone(view)
                return
            if self.slot in view.left:
                self.has_left, self._active = True, False
                return
            try:
                self._adopt(view, following)
                if view.joined and self.slot == view.members[0]:
                    self._send_state(view, state())
            except LOST:
                again = True
        self.progress.goes_on()

    def _send_state(self, view: SurvivorView, state: dict[str, Any]) -> None:
        assert self._log is not None
        own = {
            "operation": self._operation,
            "rounds": self.rounds,
            "came_back": sorted(self._came_back),
            "drawn": self.drawn.state(),
            "log": _pack_log(self._log),
        }
        places = [view.members.index(slot) for slot in view.joined]
        state_pieces.send(self._groups[0].inner, {**state, "changes": own}, places)

    def _go_on_alone(self, view: SurvivorView) -> None:
        """The others go on without this worker, which sees what its steps take."""
        self.is_out, self._active = True, False
        self.number = view.number
        self._views[view.number] = self.members
        root = self._groups[0]
        threading.Thread(target=_close, args=(root.inner,), name="echelon-closing", daemon=True).start()
        alone = LeftOutGroup(max(1, root.rank), max(2, root.size), root.names, root.deadline_s)
        for group in self._groups:
            group.adopt(alone)
        self._kept.clear()
        self._found.clear()
        self._log, self._logs = None, False

    def is_well(self, cycle_s: float, share: int) -> bool:
        """Tell what this worker's steps take while it is left out; whether it may come back."""
        return bool(self._service.ask(do="well", cycle_s=cycle_s, share=share)["well"])

    def come_back(self) -> tuple[SurvivorView, dict[str, Any]]:
        """Wait until this worker is a member again; its view, and the state of the first member.

        One that was left out is where the others are already, and repeats nothing.
        """
        if self._replayed:
            raise self._differs()
        view = self._service.come_back(_ADMITTED_S)
        repeats, self.is_out = not self.is_out, False
        self._in_flight, self._before_flight = 0, None
        self._active = self._in_epochs = self._fresh = True
        self.returns = False
        self.number, self.members = view.number, view.members
        self._views[view.number] = view.members
        self._connect(view)
        state = state_pieces.receive(self._groups[0].inner, 0)
        own = state["changes"]
        self._operation, self.rounds = int(own["operation"]), int(own["rounds"])
        self._came_back = set(own["came_back"])
        self.drawn.restore(own["drawn"])
        self._log = _unpack_log(own["log"])
        self._replayed = deque(self._log if repeats else ())
        return view, state

    @property
    def operation(self) -> int:
        """The number of the last operation that has begun, the same on all where the loop asks for a batch.

        With rounds in flight, which one member completes before another does: the last one before them.
        """
        return self._operation if self._before_flight is None else self._before_flight[1]

    @property
    def is_catching_up(self) -> bool:
        """Whether this worker still repeats what the others exchanged in this epoch."""
        return self._replayed is not None

    def caught_up(self) -> None:
        """This worker is where the others were when they admitted it."""
        if self._replayed:
            raise self._differs()
        self._replayed = None

    def _differs(self) -> WorkerError:
        return WorkerError(
            "the script exchanges something else than when it was started first",
            where=f"rank {self.slot}, which was started again",
            fix="let the script make the same session calls up to its first batch each time it starts",
        )


def _nobody_waits() -> None:
    """Nothing is in flight."""


def _nothing(told: object) -> None:
    """Nobody wants to know."""


def _close(group: Group) -> None:
    group.close()
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))


def _packed(tensors: Sequence[Tensor]) -> bytes:
    parts = [
        (
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for tensor in tensors
    ]
    return msgspec.msgpack.encode(parts)


def _unpacked(data: bytes) -> list[Tensor]:
    parts = msgspec.msgpack.decode(data, type=list[tuple[str, list[int], bytes]])
    return [
        torch.frombuffer(bytearray(raw or b"\0"), dtype=torch.uint8)[: len(raw)]
        .view(getattr(torch, kind))
        .view(shape)
        for kind, shape, raw in parts
    ]


def _pack_log(log: Sequence[Sequence[Tensor]]) -> str:
    return base64.b64encode(msgspec.msgpack.encode([_packed(result) for result in log])).decode()


def _unpack_log(text: str) -> list[list[Tensor]]:
    return [_unpacked(one) for one in msgspec.msgpack.decode(base64.b64decode(text), type=list[bytes])]
