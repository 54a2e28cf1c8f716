"""What does a worker do when others are lost? It asks who goes on, meets them, and repeats the operation.

All of it happens in the training thread, in the operation that has failed. Results of operations that other
members lack are given to them first; then all members are at the same operation.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from echelon.comm.changing import LOST, ChangingGroup
from echelon.comm.group import Group
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.errors import WorkerError
from echelon.membership.survival import SurvivorState, SurvivorView
from echelon.train.drawn import DrawnBatches
from echelon.train.service import MemberService, ServiceStore

_SWITCH_S = 5e-4  # as in comm/wire/loop.py


class MemberChanges:
    """The changes of one run's members, as one worker goes through them.

    first      the first meeting; a worker's rank there is its slot from then on
    open_view  connects the members of a meeting
    """

    def __init__(
        self, service: MemberService, first: Rendezvous, open_view: Callable[[Rendezvous], Group]
    ) -> None:
        self.number = 0
        self.slot = first.me.rank
        self.members = tuple(member.rank for member in first.members)
        self.drawn = DrawnBatches()
        self.handed: Callable[[], Mapping[int, int]] = dict
        self.on_change: Callable[[SurvivorView], None] = _nothing
        self._service = service
        self._first = first
        self._open_view = open_view
        self._groups: list[ChangingGroup] = []
        self._operation = 0
        self._kept: dict[int, list[Tensor]] = {}
        self._found: dict[int, list[Tensor]] = {}
        self._active = False

    def store(self) -> ServiceStore:
        """Values that stay whoever is lost."""
        return ServiceStore(self._service, -1, ())

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

    # Operations ----------------------------------------------------------------------------------

    def begin(self) -> list[Tensor] | None:
        """The next operation begins; its result, if others have completed it in an earlier view."""
        self._operation += 1
        return self._found.pop(self._operation, None)

    def complete(self, result: Sequence[Tensor], *, full: bool) -> None:
        """Keep the result. If none can have it before all have begun it, all have those before."""
        if full:
            self._kept.clear()
        self._kept[self._operation] = list(result)

    def outdated(self) -> bool:
        """Whether lost workers counted when this worker's weight was given."""
        return self.number > 0 and (self.drawn.empty or self.drawn.names_lost(self.members))

    def reduced(self, *, anew: bool) -> None:
        """A round is complete: of the members of now, or of those before the last change."""
        if anew:
            self.drawn.reduced(self.members)
        else:
            self.drawn.settle()

    def recover(self, error: WorkerError) -> list[Tensor] | None:
        """Go on without the lost workers; the result of the operation, if others have completed it."""
        while self._active:
            standing = SurvivorState(
                slot=self.slot, view=self.number, operation=self._operation, handed=dict(self.handed())
            )
            view = self._service.stand(standing)
            if view is None:
                break
            try:
                self._adopt(view)
                return self._found.pop(self._operation, None)
            except LOST as again:  # another one was lost meanwhile
                if self._operation in self._found:
                    return self._found.pop(self._operation)
                error = again
        raise error

    def _adopt(self, view: SurvivorView) -> None:
        """Meet the others again, and give them what they lack."""
        self.number, self.members = view.number, view.members
        self.on_change(view)
        people = tuple(
            msgspec.structs.replace(self._first.members[slot], rank=place)
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
        for operation in view.behind:
            source = view.source(operation)
            mine = _packed(self._kept[operation]) if source == me.rank else b""
            told = inner.broadcast_bytes(mine, source)
            if self._operation <= operation:
                self._found[operation] = _unpacked(told)


def _nothing(view: SurvivorView) -> None:
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
