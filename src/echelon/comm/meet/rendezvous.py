"""Workers meet over a small key-value store, and tell each other there why they failed.

The leader opens the store; everybody signs in, and waits, up to a deadline, for all the others. When a
worker fails it leaves the reason in the store; when a reduction breaks, each survivor reports that
it is still there and looks who else is, so that the error names the worker that is missing or the
reason that it left.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from echelon.cluster import interfaces
from echelon.comm.meet.place import Place
from echelon.comm.wire import blame
from echelon.errors import ConfigError, JoinTimeout, PeerLost, RoundTimeout, WorkerError

_POLL_S = 0.05
_ROLL_CALL_S = 1.5
_LINGER_S = 0.3


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the others know it. `leader_address` is where it reached the leader."""

    rank: int
    node: str
    host: str
    pid: int
    leader_address: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


class Farewell(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker leaves in the store when it goes: `cause` is empty if it ended well.

    `because` names the workers whose fault it is, where it is not its own; `late`, if they were late.
    """

    t: float
    cause: str = ""
    because: tuple[int, ...] = ()
    late: bool = False


@dataclass(frozen=True, slots=True)
class Meeting:
    """Workers that have met."""

    store: Store
    me: Member
    members: tuple[Member, ...]
    last_words: list[str] = field(default_factory=list)
    reasons: list[WorkerError] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """How errors call each worker, by rank."""
        return [str(member) for member in self.members]

    def tell(self, what: str, value: str) -> None:
        """Leave word for those who ask."""
        self.store.set(f"told/{what}", value)

    def told(self, what: str) -> str:
        """What somebody has left word of, when it is there."""
        try:
            said: str = self.store.get(f"told/{what}").decode()
        except (DistError, RuntimeError) as error:
            raise PeerLost(f"the leader never said {what!r}", where=str(self.me)) from error
        return said

    def say_goodbye(self, cause: str = "") -> None:
        """Leave word of why this worker goes; best effort, since the store may be gone."""
        self.last_words.append(cause)
        bye = Farewell(t=time.time(), cause=cause)
        for reason in self.reasons:
            if reason.message in cause:  # it goes because of another: all shall hear of the first
                late = isinstance(reason, RoundTimeout)
                bye = Farewell(t=bye.t, cause=reason.message, because=reason.ranks, late=late)
        try:
            _put(self.store, f"bye/{self.me.rank}", bye)
        except (DistError, RuntimeError):
            return

    def linger(self) -> None:
        """The store ends with the leader: let the others, who notice now that it goes, read why."""
        if self.me.rank != 0:
            return
        deadline = time.monotonic() + _LINGER_S
        others = [member.rank for member in self.members if member.rank != 0]
        try:
            while time.monotonic() < deadline:
                if all(self.store.check([f"here/{r}"]) or self.store.check([f"bye/{r}"]) for r in others):
                    return
                time.sleep(_POLL_S / 5)
        except (DistError, RuntimeError):
            return

    def check_goodbyes(self) -> None:
        """Raise if a worker has failed and said why: nobody need wait for it."""
        gone = {}
        for member in self.members:
            if member.rank != self.me.rank and self.store.check([f"bye/{member.rank}"]):
                gone[member.rank] = self._farewell(member.rank)
        failed = sorted((b.t, rank, b.cause) for rank, b in gone.items() if b.cause and not b.because)
        if failed:
            _, rank, cause = failed[0]
            raise blame.failed(self.names, rank, cause, str(self.me))

    def explain(self, error: Exception, *, deadline_s: float) -> WorkerError:
        """Turn a broken operation into an error that names who is to blame."""
        reason = self._explain(error, deadline_s)
        self.reasons.append(reason)
        return reason

    def _explain(self, error: Exception, deadline_s: float) -> WorkerError:
        timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        where = str(self.me)
        gone, silent, reachable = self._roll_call()
        failed = sorted((b.t, rank, b.cause) for rank, b in gone.items() if b.cause and not b.because)
        if failed:
            _, rank, cause = failed[0]
            return blame.failed(self.names, rank, cause, where)
        ended = sorted(rank for rank, bye in gone.items() if not bye.cause)
        if ended:
            return blame.ended(self.names, ended, where)
        for bye in gone.values():
            kind = RoundTimeout if bye.late else PeerLost
            return kind(bye.cause, ranks=bye.because, where=where, fix="see the log of the worker it names")
        if not reachable and self.me.rank != 0:
            return blame.died(self.names, (0,), where)
        if timed_out:
            return blame.late(self.names, silent, deadline_s, where)
        return blame.died(self.names, silent, f"{where} ({error})")

    def _farewell(self, rank: int) -> Farewell:
        return msgspec.json.decode(self.store.get(f"bye/{rank}"), type=Farewell)

    def _roll_call(self) -> tuple[dict[int, Farewell], list[int], bool]:
        """Who said goodbye, who says nothing, and whether the store can be reached at all."""
        gone: dict[int, Farewell] = {}
        waiting = {member.rank for member in self.members} - {self.me.rank}
        deadline = time.monotonic() + _ROLL_CALL_S
        try:
            self.store.set(f"here/{self.me.rank}", "1")
            while waiting and time.monotonic() < deadline:
                for rank in sorted(waiting):
                    if self.store.check([f"bye/{rank}"]):
                        gone[rank] = self._farewell(rank)
                        waiting.discard(rank)
                    elif self.store.check([f"here/{rank}"]):
                        waiting.discard(rank)
                if any(bye.cause for bye in gone.values()):
                    break
                time.sleep(_POLL_S)
        except (DistError, RuntimeError):
            return gone, sorted(waiting), False
        return gone, sorted(waiting), True


def meet(place: Place, *, node: str, host: str, pid: int, timeout_s: float) -> Meeting:
    """Sign in and wait for everybody; JoinTimeout names who is missing."""
    store = PrefixStore(f"echelon/{place.attempt}", _open_store(place, timeout_s))
    leader = _address_of(place)
    me = Member(rank=place.rank, node=node, host=host, pid=pid, leader_address=leader)
    deadline = time.monotonic() + timeout_s
    missing = set(range(place.everybody))
    try:
        _put(store, f"joined/{place.rank}", me)
        while missing:
            missing = {rank for rank in missing if not store.check([f"joined/{rank}"])}
            if missing and time.monotonic() > deadline:
                raise _missing(place, missing, f"did not join within {timeout_s:g} s")
            if missing:
                time.sleep(_POLL_S)
        keys = [f"joined/{rank}" for rank in range(place.everybody)]
        members = tuple(msgspec.json.decode(store.get(key), type=Member) for key in keys)
    except (DistError, RuntimeError) as error:  # the store went with the leader
        raise _missing(place, missing or {0}, "had not joined when rank 0 left") from error
    return Meeting(store, me, members)


def _put(store: Store, key: str, value: Member | Farewell) -> None:
    store.set(key, msgspec.json.encode(value).decode())


def _missing(place: Place, missing: set[int], what: str) -> JoinTimeout:
    names = ", ".join(str(rank) for rank in sorted(missing))
    plural = "ranks" if len(missing) > 1 else "rank"
    return JoinTimeout(
        f"{plural} {names} of {place.everybody} {what}",
        ranks=tuple(sorted(missing)),
        where=f"rank {place.rank}, meeting at {place.address}:{place.port}",
        fix=f"see the log of {plural} {names}; a longer wait is join(timeout_s=...) or --join-timeout-s",
    )


def _open_store(place: Place, timeout_s: float) -> Store:
    leads = place.rank == 0 and not place.hosted

    def open_it() -> Store:
        return TCPStore(
            place.address,
            place.port,
            is_master=leads,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            multi_tenant=True,  # the script may have torch.distributed's own store at that port
        )

    try:
        store = _within(timeout_s + 1, open_it)
    except (DistError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"{place.address}:{place.port}"
        if leads and "EADDRINUSE" in str(error):
            raise ConfigError(
                f"port {place.port} is in use by another program",
                where=f"rank 0, {where}",
                fix="give another one with --port, or leave it out to have a free one chosen",
            ) from None
        raise JoinTimeout(
            f"no leader answered at {where} within {timeout_s:g} s",
            ranks=(0,),
            where=f"rank {place.rank}",
            fix="start rank 0; check that MASTER_ADDR and MASTER_PORT name it, and firewalls between",
        ) from error
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _within(limit_s: float, act: Callable[[], Store]) -> Store:
    """What `act` returns. A program that listens at the port and says nothing would hold it up for ever.

    It cannot be interrupted, so it is left to a thread that nobody waits for.
    """
    outcome: list[Store | Exception] = []

    def run() -> None:
        try:
            outcome.append(act())
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            outcome.append(error)

    thread = threading.Thread(target=run, name="echelon-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _address_of(place: Place) -> str:
    found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def interface_of(meeting: Meeting, place: Place) -> str:
    """The name of the network interface towards the others."""
    return _interface(meeting, place).name


def interface_address(meeting: Meeting, place: Place) -> str:
    """This worker's own address on the network interface towards the others."""
    choice = _interface(meeting, place)
    link_local = choice.address.lower().startswith("fe80:")  # means something only with its interface
    return f"{choice.address}%{choice.name}" if link_local else choice.address


def _interface(meeting: Meeting, place: Place) -> interfaces.InterfaceChoice:
    """The network interface towards the others: the one that the route to the leader takes.

    The leader itself uses the one that has the address at which workers of other hosts reached it, so
    that a name that means loopback on its own machine does no harm.
    """
    if place.rank != 0:
        return interfaces.towards(place.address, place.port)
    others = [m.leader_address for m in meeting.members if m.host != meeting.me.host]
    if not others:
        return interfaces.towards(place.address, place.port)
    return interfaces.owning(others[0]) or interfaces.towards(others[0], place.port)
