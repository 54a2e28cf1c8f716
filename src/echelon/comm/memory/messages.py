"""Messages between workers of one machine, as futures: point to point, and from each to each.

Positions are those among the workers of the machine; errors name ranks in the view.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from echelon.comm.future import CallerFuture, Future, Timing
from echelon.comm.group import Messages
from echelon.comm.memory.pairs import Incoming, Key, Outgoing, PairRings
from echelon.comm.memory.patience import Patience
from echelon.comm.memory.segment import Gather, share
from echelon.comm.wire.frames import CHANNEL_BITS
from echelon.comm.wire.loop import Loop
from echelon.comm.wire.mismatch import SAME_TENSORS
from echelon.comm.wire.watch import PAIR_CHANNELS
from echelon.errors import MismatchedCalls, RoundTimeout, WorkerError

_POLL_S = 1e-3
_PROBE_BYTES = 4096
_NUMBERS = 1 << 20  # waits are counted up to this
_SENT: Future[None] = Future.completed(None)  # of all messages that left at once


class MachineMessages:
    """The messages of this worker. `ranks` are those of its machine in the view, `pids` their processes."""

    def __init__(
        self,
        ranks: Sequence[int],
        pids: Sequence[int],
        loop: Loop,
        *,
        rank: int,
        gather: Gather,
        meanwhile: Callable[[], None],
        deadline_s: Callable[[], float],
    ) -> None:
        self._position = {one: at for at, one in enumerate(ranks)}
        me = self._position[rank]
        self._ranks = list(ranks)
        self._me = rank
        share(_PROBE_BYTES, me, pids, range(len(pids)), gather)  # can each map each one's blocks?
        (memory,) = share(PairRings.size_bytes(len(ranks)), me, pids, [0], gather)
        self.rings = PairRings(me, pids, memory)
        self._loop = loop
        self._deadline_s = deadline_s
        names = [loop.names[one] for one in ranks]
        self._patience = Patience(ranks, names, names[me], bells=self.rings.bells, check=loop.check)
        self._patience.watch = loop.watch
        self._patience.meanwhile = meanwhile
        self._waits = 0

    def reaches(self, rank: int) -> bool:
        """Whether that worker is on this machine."""
        return rank in self._position

    def send(self, tensor: Tensor, to: int, key: Key) -> Future[None]:
        """Send a contiguous tensor to a worker; it may change once the future is done."""
        self._begin()
        position = self._position[to]
        if self.rings.send_now(tensor.data_ptr(), tensor.nbytes, key, position):
            return _SENT
        message = Outgoing(tensor.detach(), key, [position])
        self.rings.send(message)
        return self._sending(message)

    def receive(self, into: Tensor, source: int, key: Key, result: Tensor) -> Future[Tensor]:
        """Receive into a contiguous tensor; the future gives `result`."""
        self._begin()
        incoming = Incoming(self._position[source], key, into)
        self.rings.want(incoming)

        def finish(timeout_s: float | None) -> Tensor:
            if not receive(incoming) or not incoming.fits:
                self._await([incoming], timeout_s)
            return result

        receive = self.rings.receive
        return CallerFuture(finish, lambda: receive(incoming), alarm=self.rings.bells)

    def all_to_all(self, outgoing: Sequence[Tensor], own: int, ranks: Sequence[int], key: Key) -> Messages:
        """Send `outgoing[n]` to `ranks[n]`; `own` is this worker's place among them."""
        self._begin()
        now = time.perf_counter()
        timing = Timing(begun=now)
        together: dict[int, list[int]] = {}
        for at, tensor in enumerate(outgoing):
            if at != own:
                together.setdefault(id(tensor), []).append(at)
        incoming = {
            at: Incoming(self._position[rank], key, None) for at, rank in enumerate(ranks) if at != own
        }
        messages = []
        for places in together.values():
            tensor = outgoing[places[0]].detach().contiguous()
            messages.append(Outgoing(tensor, key, [self._position[ranks[at]] for at in places]))
        for message in messages:
            self.rings.send(message)
        timing.sent = time.perf_counter()
        for one in incoming.values():
            self.rings.want(one)

        def received(timeout_s: float | None) -> list[Tensor]:
            self._await(list(incoming.values()), timeout_s)
            timing.ended = timing.ended or time.perf_counter()
            return [outgoing[own] if at == own else _found(incoming[at]) for at in range(len(ranks))]

        def arrived() -> bool:
            return all([self.rings.receive(one) for one in incoming.values()])  # noqa: C419 - all go on

        sent_bytes = sum(message.length * len(message.to) for message in messages)
        return Messages(
            CallerFuture(received, arrived, lambda: timing, alarm=self.rings.bells),
            Future.all([self._sending(message) for message in messages], None),
            sent_bytes,
        )

    def finish_sending(self) -> None:
        """Before leaving without an error: wait until the others have what was sent to them."""
        until = time.monotonic() + self._deadline_s()
        others = [at for at in range(len(self._ranks)) if self._ranks[at] != self._me]
        while time.monotonic() < until:
            self.rings.take_all()
            if not any(self.rings.unread(at) and self._is_there(at) for at in others):
                break
            time.sleep(_POLL_S)

    def _is_there(self, at: int) -> bool:
        try:
            self._loop.check([self._ranks[at]])
        except WorkerError:
            return False
        return True

    def _begin(self) -> None:
        if self._loop.watch.beginner != threading.get_ident():
            self._loop.watch.begins(threading.get_ident())

    def _sending(self, message: Outgoing) -> Future[None]:
        if message.done and message.error is None:
            return _SENT

        def finish(timeout_s: float | None) -> None:
            def behind() -> list[int]:
                if not message.done:
                    self.rings.advance()
                return [] if message.done else sorted(message.left)

            self._wait(behind, timeout_s)
            if message.error is not None:
                raise message.error

        return CallerFuture(finish, lambda: message.done)

    def _await(self, incoming: Sequence[Incoming], timeout_s: float | None) -> None:
        """Wait for messages; raise if one has another length than was asked for."""

        receive = self.rings.receive

        def behind() -> list[int]:
            return [one.source for one in incoming if not one.done and not receive(one)]

        self._wait(behind, timeout_s)
        for one in incoming:
            if not one.fits:
                source = self._ranks[one.source]
                raise MismatchedCalls(
                    f"rank {source} sent {one.sent_length} bytes, and rank {self._me} expects {one.length}",
                    ranks=(source, self._me),
                    where=self._loop.me,
                    fix=SAME_TENSORS,
                )

    def _wait(self, behind: Callable[[], list[int]], timeout_s: float | None) -> None:
        late = behind()
        if not late:
            return
        self._waits = (self._waits + 1) % _NUMBERS
        number = self._me * _NUMBERS + self._waits
        try:
            self._patience.until_none(
                behind,
                tag=PAIR_CHANNELS << CHANNEL_BITS | number,
                limit_s=self._deadline_s() if timeout_s is None else timeout_s,
                endless=timeout_s is None,
                required=late,
            )
        except RoundTimeout as error:
            if timeout_s is None:
                self._loop.note(error)
            raise


def _found(incoming: Incoming) -> Tensor:
    assert incoming.tensor is not None
    return incoming.tensor
