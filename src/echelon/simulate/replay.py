"""Checks that a policy makes the same decisions as in a recorded run, given the same arrivals.

A rule depends only on its arrivals. So the arrivals of a recorded run, real or simulated, fed to a new rule
in order must give the recorded decisions: the same parts with the same weights, in the same order. Times of
decisions and versions are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

from echelon.errors import ConfigError
from echelon.observe.events import AnyEvent, Arrived, Decided
from echelon.simulate.record import decided
from echelon.sync.families.serve import Arrival, Decision, Kind, Rule, ServePolicy
from echelon.sync.policy import ClusterInfo

_KINDS = ("gradient", "delta", "weights", "ask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The first difference, after arrival number `index` (from 0): the recorded and the new decision."""

    index: int
    arrival: Arrived
    recorded: Decided | None
    now: Decided | None

    def __str__(self) -> str:
        what = f"{self.arrival.kind} of worker {self.arrival.worker}, step {self.arrival.step}"
        if self.arrival.step < 0:
            what = self.arrival.kind
        return f"arrival {self.index} ({what}): recorded {_words(self.recorded)}, now {_words(self.now)}"


def replay(events: Iterable[AnyEvent], policy: ServePolicy, cluster: ClusterInfo) -> Mismatch | None:
    """Feed the arrivals to a new rule; returns the first decision that differs, or None."""
    rule = policy.rule(cluster)
    for index, (arrival, recorded) in enumerate(_rounds(events)):
        now = [decided(d, t=arrival.t, rank=arrival.rank, version=0) for d in _feed(rule, arrival)]
        for at in range(max(len(now), len(recorded))):
            then_is = recorded[at] if at < len(recorded) else None
            now_is = now[at] if at < len(now) else None
            if then_is is None or now_is is None or _facts(then_is) != _facts(now_is):
                return Mismatch(index=index, arrival=arrival, recorded=then_is, now=now_is)
    return None


def _rounds(events: Iterable[AnyEvent]) -> Iterator[tuple[Arrived, list[Decided]]]:
    """Each arrival, with the decisions up to the next arrival."""
    arrival: Arrived | None = None
    decisions: list[Decided] = []
    for event in events:
        if isinstance(event, Arrived):
            if arrival is not None:
                yield arrival, decisions
            arrival, decisions = event, []
        elif isinstance(event, Decided):
            if arrival is None:
                raise ConfigError(
                    f"the record begins with a decision ({event.what})",
                    where="replay",
                    fix="give a server's events from the beginning of the run",
                )
            decisions.append(event)
    if arrival is not None:
        yield arrival, decisions


def _feed(rule: Rule, event: Arrived) -> list[Decision]:
    if event.kind == "leave":
        return rule.leave(event.worker, event.t)
    if event.kind == "join":
        return rule.join(event.worker, event.t)
    if event.kind == "tick":
        return rule.tick(event.t)
    if event.kind not in _KINDS:
        raise ConfigError(
            f"unknown kind of arrival {event.kind!r}",
            where="replay",
            fix="replay the run with the version of Echelon that recorded it",
        )
    return rule.arrive(
        Arrival(
            worker=event.worker,
            step=event.step,
            t=event.t,
            kind=cast(Kind, event.kind),
            read=event.read,
            samples=event.samples,
            compute_s=event.compute_s,
            transfer_s=event.transfer_s,
            square=event.square,
            dot=event.dot,
        )
    )


def _facts(event: Decided) -> tuple[object, ...]:
    return (
        event.what, event.worker, event.step, [tuple(part) for part in event.parts],
        event.fresh, event.ask, event.at, event.reason,
    )  # fmt: skip


def _words(event: Decided | None) -> str:
    if event is None:
        return "nothing"
    if event.what == "apply":
        parts = ", ".join(f"{weight:g} x step {step} of {worker}" for worker, step, weight in event.parts)
        return f"apply {parts}"
    if event.what == "wake":
        return f"wake at {event.at:g}"
    more = f" step {event.step}: {event.reason}" if event.what == "drop" else ""
    how = f" fresh={event.fresh} ask={event.ask}" if event.what == "release" else ""
    return f"{event.what} worker {event.worker}{more}{how}"
