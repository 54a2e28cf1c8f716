"""Workers meet at the leader's board, and report there why they failed.

The leader opens a meeting (`meeting.py`), whose board is the store; each worker signs in and waits, up to a
deadline, for all the others. A worker that fails writes the reason to the store. When a reduction breaks,
each survivor reports that it is still present and checks who else is, so that the error names the missing
worker or the reason why it left.

A process may join again at the same store, whether or not its first session is closed. So meetings are
numbered: the leader opens a new one each time, and the others take part in the newest one that is not
complete.
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass, field

import msgspec
from torch.distributed import DistError

from echelon.cluster import interfaces
from echelon.comm.meet.board import PrefixedStore, Store, decode_text, decode_value
from echelon.comm.meet.meeting import open_meeting
from echelon.comm.meet.place import Place
from echelon.comm.meet.service import refused_key
from echelon.comm.wire import blame
from echelon.errors import ConfigError, Corrupt, JoinTimeout, PeerLost, RoundTimeout, WorkerError

_POLL_S = 0.05
_LOOK_S = 0.005
_ASK_S = 0.2
_ROLL_CALL_S = 1.5
_LINGER_S = 0.3
_LINGER_FAILED_S = 3.0  # on a busy machine the others take a while to notice and to ask
_log = logging.getLogger(__name__)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the others know it.

    leader_address  the address at which it reached the leader
    servers         how many of the last ranks it takes for servers
    cores           the cores that it may run on, as the system numbers them
    usable_cores    how many of these its control group grants
    threads         the threads that it computes with, if they are chosen already; else 0
    """

    rank: int
    node: str
    host: str
    pid: int
    leader_address: str = ""
    servers: int = 0
    cores: tuple[int, ...] = ()
    usable_cores: int = 0
    threads: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.node}"


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker writes to the store when it leaves; `cause` is empty if it ended normally.

    `because` names other workers that caused it to leave; `late` says whether those were late.
    """

    t: float
    cause: str = ""
    because: tuple[int, ...] = ()
    late: bool = False


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Workers that have joined, and the store through which they report.

    `timeout_s` is how long they wait for each other while they join.
    """

    store: Store
    me: Member
    members: tuple[Member, ...]
    timeout_s: float = 60.0
    departure_causes: list[str] = field(default_factory=list)
    reasons: list[WorkerError] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Each worker's name in errors, by rank."""
        return [str(member) for member in self.members]

    def publish(self, what: str, value: str) -> None:
        """Publish a value for the other workers."""
        self.store.set(f"published/{what}", value)

    def lookup(self, what: str, *, of: int = 0) -> str:
        """Wait for a value that a worker has published, the leader by default, and return it."""
        key = f"published/{what}"
        until = time.monotonic() + self.timeout_s
        ask_at = time.monotonic() + _ASK_S
        error: Exception | None = None
        try:
            while not self.store.check([key]) and time.monotonic() < until:
                if time.monotonic() > ask_at:
                    self.check_departures()
                    ask_at = time.monotonic() + _ASK_S
                time.sleep(_LOOK_S)
            if self.store.check([key]):
                return decode_text(self.store.get(key), key=key, peer=str(self.members[of]))
        except (DistError, RuntimeError) as broken:  # the store ends with the leader
            error = broken
        who = "the leader" if of == 0 else str(self.members[of])
        raise PeerLost(f"{who} did not publish {what!r}", ranks=(of,), where=str(self.me)) from error

    def announce_departure(self, cause: str = "") -> None:
        """Write why this worker leaves; best effort, since the store may be gone."""
        self.departure_causes.append(cause)
        departure = Departure(t=time.time(), cause=cause)
        for reason in self.reasons:
            if reason.message in cause:  # another worker is the cause: report that one
                late = isinstance(reason, RoundTimeout)
                departure = Departure(t=departure.t, cause=reason.message, because=reason.ranks, late=late)
        try:
            _put(self.store, f"departure/{self.me.rank}", departure)
        except (DistError, RuntimeError):
            return

    def linger(self) -> None:
        """Keep the leader, and so the store, alive until the others have read why it leaves."""
        if self.me.rank != 0:
            return
        began = time.monotonic()
        limit_s = _LINGER_FAILED_S if any(self.departure_causes) else _LINGER_S
        lost = {rank for reason in self.reasons for rank in reason.ranks}
        others = {member.rank for member in self.members if member.rank != 0}
        try:
            while (passed_s := time.monotonic() - began) < limit_s:
                if all(
                    self._has_answered(rank) for rank in others - (lost if passed_s > _LINGER_S else set())
                ):
                    return
                time.sleep(_POLL_S / 5)
        except (DistError, RuntimeError):
            return

    def _has_answered(self, rank: int) -> bool:
        return bool(self.store.check([f"here/{rank}"]) or self.store.check([f"departure/{rank}"]))

    def check_departures(self) -> None:
        """Raise if a worker has failed and reported why: waiting for it is pointless."""
        gone = {}
        for member in self.members:
            if member.rank != self.me.rank and self.store.check([f"departure/{member.rank}"]):
                gone[member.rank] = self._departure(member.rank)
        failed = sorted((b.t, rank, b.cause) for rank, b in gone.items() if b.cause and not b.because)
        if failed:
            _, rank, cause = failed[0]
            raise blame.failed(self.names, rank, cause, str(self.me))

    def explain(self, error: Exception, *, deadline_s: float) -> WorkerError:
        """Turn a failed operation into an error that names the worker at fault."""
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
        ended = sorted(rank for rank, departure in gone.items() if not departure.cause)
        if ended:
            return blame.ended(self.names, ended, where)
        for departure in gone.values():
            kind = RoundTimeout if departure.late else PeerLost
            fix = "see the log of the worker it names"
            return kind(departure.cause, ranks=departure.because, where=where, fix=fix)
        if not reachable and self.me.rank != 0:
            return blame.died(self.names, (0,), where)
        if timed_out:
            return blame.late(self.names, silent, deadline_s, where)
        return blame.died(self.names, silent, f"{where} ({error})")

    def _departure(self, rank: int) -> Departure:
        key = f"departure/{rank}"
        return decode_value(self.store.get(key), Departure, key=key, peer=str(self.members[rank]))

    def _roll_call(self) -> tuple[dict[int, Departure], list[int], bool]:
        """Departed workers, silent workers, and whether the store can be reached."""
        gone: dict[int, Departure] = {}
        waiting = {member.rank for member in self.members} - {self.me.rank}
        deadline = time.monotonic() + _ROLL_CALL_S
        try:
            self.store.set(f"here/{self.me.rank}", "1")
            while waiting and time.monotonic() < deadline:
                for rank in sorted(waiting):
                    if self.store.check([f"departure/{rank}"]):
                        gone[rank] = self._departure(rank)
                        waiting.discard(rank)
                    elif self.store.check([f"here/{rank}"]):
                        waiting.discard(rank)
                if any(departure.cause for departure in gone.values()):
                    break
                time.sleep(_POLL_S)
        except (DistError, RuntimeError):
            return gone, sorted(waiting), False
        return gone, sorted(waiting), True


def meet(
    place: Place,
    *,
    node: str,
    host: str,
    pid: int,
    timeout_s: float,
    cores: tuple[int, ...] = (),
    usable_cores: int = 0,
    threads: int = 0,
) -> Rendezvous:
    """Sign in and wait for all processes; JoinTimeout names the missing ones."""
    board = open_meeting(place, timeout_s)
    store = PrefixedStore(f"echelon/{place.attempt}/{place.process_count}", board)
    me = Member(
        rank=place.rank,
        node=node,
        host=host,
        pid=pid,
        leader_address=_address_of(place),
        servers=place.servers,
        cores=cores,
        usable_cores=usable_cores,
        threads=threads,
    )
    return meet_at(store, place, me, timeout_s, refusals=board)


def meet_at(
    store: Store, place: Place, me: Member, timeout_s: float, *, refusals: Store | None = None
) -> Rendezvous:
    """Sign in at a store that others use, too, and wait for all; JoinTimeout names the missing ones.

    `refusals` says why callers were refused that named a rank, if the store lets nobody in without proof.
    """
    meeting = _Meetings(store, place, me, time.monotonic() + timeout_s, refusals)
    try:
        found = meeting.complete()
        if found is None:
            raise _missing(place, meeting.missing, f"did not join within {timeout_s:g} s{meeting.refusal}")
        members = tuple(_member(found, rank) for rank in range(place.process_count))
    except (DistError, RuntimeError) as error:  # the store ends with the leader
        what = f"had not joined when rank 0 left{meeting.refusal}"
        raise _missing(place, meeting.missing or {0}, what) from error
    rendezvous = Rendezvous(found, me, members, timeout_s)
    _check_servers(rendezvous)
    return rendezvous


def _member(store: Store, rank: int) -> Member:
    key = f"joined/{rank}"
    found = decode_value(store.get(key), Member, key=key, peer=f"rank {rank}")
    if found.rank != rank:
        raise Corrupt(f"rank {rank} has joined as rank {found.rank}", ranks=(rank,), where=key)
    return found


class _Meetings:
    """The meetings at one store, from one worker's side."""

    def __init__(
        self, store: Store, place: Place, me: Member, deadline: float, refusals: Store | None
    ) -> None:
        self.missing = {0} - {place.rank}
        self.refusal = ""
        self._all = store
        self._place = place
        self._me = me
        self._deadline = deadline
        self._refusals = refusals
        self._look_at = 0.0

    def complete(self) -> Store | None:
        """The part of the store that belongs to the newest meeting, once all have joined it.

        None if not all do in time.
        """
        number, current = 0, None
        while True:
            newest = self._newest(opens=number == 0)
            if current is not None and self._all_joined(current):  # also one that the leader has left
                return current
            if newest != number:
                number = newest
                current = self._enter(number)
            elif time.monotonic() > self._deadline:
                return None
            else:
                time.sleep(_POLL_S)

    def _newest(self, *, opens: bool) -> int:
        """The number of the newest meeting; the leader opens one when it comes."""
        return int(self._all.add("meetings", 1 if opens and self._place.rank == 0 else 0))

    def _enter(self, number: int) -> Store | None:
        """Sign in at a meeting; None if it was complete without this worker."""
        store = PrefixedStore(str(number), self._all)
        if store.check(["complete"]):
            self.missing = {0}
            return None
        self.missing = set(range(self._place.process_count))
        _put(store, f"joined/{self._me.rank}", self._me)
        return store

    def _all_joined(self, store: Store) -> bool:
        joined = store.check([f"joined/{rank}" for rank in sorted(self.missing)])
        if joined:
            self.missing = set()
            store.set("complete", "1")
        elif time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + _ASK_S
            self.missing = {rank for rank in self.missing if not store.check([f"joined/{rank}"])}
            self._say(_refusal(self._refusals, self.missing))
        return not self.missing

    def _say(self, refusal: str) -> None:
        """Say at once, and once, why somebody was not let in. The leader's service has said it there."""
        if refusal and not self.refusal and self._place.rank != 0:
            names = ", ".join(str(rank) for rank in sorted(self.missing))
            _log.warning("still waiting for rank %s%s", names, refusal)
        self.refusal = refusal


def _refusal(store: Store | None, missing: set[int]) -> str:
    """Why a missing worker was not let in, if somebody that named its rank was not."""
    for rank in sorted(missing):
        if store is not None and store.check([refused_key(rank)]):
            return f"; {store.get(refused_key(rank)).decode(errors='replace')}"
    return ""


def _check_servers(rendezvous: Rendezvous) -> None:
    """Refuse processes that do not agree on who is a server."""
    leader = rendezvous.members[0]
    odd = next((member for member in rendezvous.members if member.servers != leader.servers), None)
    if odd is None:
        return
    error = ConfigError(
        f"{leader} takes the last {leader.servers} ranks for servers, {odd} the last {odd.servers}",
        where=str(rendezvous.me),
        fix="give all processes the same join(servers=...), or set ECHELON_SERVERS on all machines",
    )
    rendezvous.announce_departure(f"ConfigError: {error.message}")
    rendezvous.linger()  # the others find it out by themselves, at the leader's store
    raise error


def _put(store: Store, key: str, value: Member | Departure) -> None:
    store.set(key, msgspec.json.encode(value).decode())


def _missing(place: Place, missing: set[int], what: str) -> JoinTimeout:
    names = ", ".join(str(rank) for rank in sorted(missing))
    plural = "ranks" if len(missing) > 1 else "rank"
    return JoinTimeout(
        f"{plural} {names} of {place.process_count} {what}",
        ranks=tuple(sorted(missing)),
        where=f"rank {place.rank}, waiting at {place.address}:{place.port}",
        fix=f"see the log of {plural} {names}; a longer wait is join(timeout_s=...) or --join-timeout-s",
    )


def _address_of(place: Place) -> str:
    found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def interface_of(rendezvous: Rendezvous, place: Place) -> str:
    """The name of the network interface towards the others."""
    return _interface(rendezvous, place).name


def interface_address(rendezvous: Rendezvous, place: Place) -> str:
    """This worker's own address on the network interface towards the others."""
    choice = _interface(rendezvous, place)
    link_local = choice.address.lower().startswith("fe80:")  # meaningless without its interface
    return f"{choice.address}%{choice.name}" if link_local else choice.address


def further_addresses(rendezvous: Rendezvous, address: str) -> list[str]:
    """This machine's other addresses, for peers that do not reach `address`.

    There are none if all workers are on one machine. A route to the leader says nothing about routes
    between the others.
    """
    me = rendezvous.me
    alone = all((m.host, m.node) == (me.host, me.node) for m in rendezvous.members)
    if interfaces.is_loopback(address) or alone:
        return []
    return [one.address for one in interfaces.offered() if not one.virtual and one.address != address]


def _interface(rendezvous: Rendezvous, place: Place) -> interfaces.InterfaceChoice:
    """The network interface towards the others: the one that the route to the leader takes.

    The leader uses the interface with the address at which workers of other hosts reached it, because its
    own host name may resolve to loopback on its machine.
    """
    if place.rank != 0:
        return interfaces.towards(place.address, place.port)
    others = [m.leader_address for m in rendezvous.members if m.host != rendezvous.me.host]
    if not others:
        return interfaces.towards(place.address, place.port)
    return interfaces.owning(others[0]) or interfaces.towards(others[0], place.port)
