"""Emulates jitter and loss of links where the kernel has no netem, by changing the links while they work.

    jitter J   The rate changes in intervals. In each the link carries what it could carry in CARRIED_S at
               its rate r, and takes e longer, with e uniform in [0, 2 J] (mean J, deviation J / sqrt(3)):
               the rate is r CARRIED_S / (CARRIED_S + e), for CARRIED_S + e. So a transfer that takes k
               CARRIED_S at rate r takes longer by k draws, and a shorter one by a fraction of one.
    loss p     The link drops everything for a short time, CUT_S on average (uniform, from half to one and a
               half of it), again and again. The time in between is such that the fraction of time in which
               it drops is p in the long run, also if the machine is late to act. TCP sends again.

Both directions change together. Draws depend on the seed and the link's name only; the machine's clock
decides when they take effect. `jitter_interval`, `cut_s`, `open_s` are pure; Variation has the thread and
the processes that change the kernel, and leaves every link as the lab says it should be.
"""

from __future__ import annotations

import fcntl
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from echelon.cluster.lab.commands import CommandPipes
from echelon.cluster.lab.lab import Lab
from echelon.errors import LabError

CARRIED_S = 0.05
CUT_S = 0.002
_IDLE_S = 0.05
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateInterval:
    """So many seconds at this fraction of the link's rate."""

    seconds: float
    factor: float


def jitter_interval(draw: random.Random, jitter_s: float) -> RateInterval:
    """The next interval of a link with this jitter."""
    late_s = draw.uniform(0.0, 2.0 * jitter_s)
    return RateInterval(seconds=CARRIED_S + late_s, factor=CARRIED_S / (CARRIED_S + late_s))


def cut_s(draw: random.Random) -> float:
    """How long the link drops everything, the next time."""
    return draw.uniform(0.5 * CUT_S, 1.5 * CUT_S)


def open_s(loss: float, dropped_s: float, elapsed_s: float, next_cut_s: float) -> float:
    """How long the link carries before its next cut, so that it drops for the fraction `loss` of the time.

    It dropped for `dropped_s` of the `elapsed_s` seconds so far.
    """
    return max(0.0, (dropped_s + next_cut_s) / loss - elapsed_s - next_cut_s)


class _Jitter:
    """The state of one link's jitter; `due` is when the rate changes next."""

    def __init__(self, seed: int, link: str, now: float) -> None:
        self.draw = random.Random(f"{seed}/{link}/jitter")
        self.due = now


class _Loss:
    """The state of one link's loss; `due` is when the next cut begins or ends."""

    def __init__(self, seed: int, link: str, loss: float, now: float) -> None:
        self.draw = random.Random(f"{seed}/{link}/loss")
        self.loss = loss
        self.begun_at = self.cut_at = now
        self.dropped_s = 0.0
        self.next_cut_s = cut_s(self.draw)
        self.is_cut = False
        # Links do not begin with a cut, and not all at once.
        self.due = now + self.draw.random() * open_s(loss, 0.0, 0.0, self.next_cut_s)


class Variation:
    """Varies the links of one lab from a thread of its own, from `start` to `close`."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab = lab
        self._seed = seed
        self._pipes = CommandPipes()
        self._stop = threading.Event()
        self._jitters: dict[str, _Jitter] = {}
        self._losses: dict[str, _Loss] = {}
        self._thread = threading.Thread(target=self._vary, name="echelon-links", daemon=True)

    def start(self) -> None:
        """Begin to vary links. From now on all changes of links go the same way, in order."""
        self._lab.network.send = self._pipes.send
        self._thread.start()

    def close(self) -> None:
        """Stop, and leave the links as they would be without jitter and loss."""
        self._stop.set()
        self._thread.join()
        for link in {*self._jitters, *self._losses}:
            self._lab.settle(link)
        self._lab.network.reset_sender()
        self._pipes.close()

    def _vary(self) -> None:
        try:
            self._until_stopped()
        except LabError as error:
            _log.warning("the lab's links do not vary any more: %s", error.message)

    def _until_stopped(self) -> None:
        while not self._stop.is_set():
            now = time.monotonic()
            with self._lab.changing:
                due = min((self._link(link, now) for link in self._lab.link_names), default=now + _IDLE_S)
            self._stop.wait(max(0.0, min(due, now + _IDLE_S) - time.monotonic()))

    def _link(self, link: str, now: float) -> float:
        """Do what is due on a link; returns when something is due next."""
        condition = self._lab.condition(link)
        due = now + _IDLE_S
        if condition.jitter_s > 0:
            jitter = self._jitters.setdefault(link, _Jitter(self._seed, link, now))
            if jitter.due <= now:
                interval = jitter_interval(jitter.draw, condition.jitter_s)
                self._lab.network.reshape(link, condition.rate_bytes_per_s, interval.factor)
                jitter.due = max(jitter.due + interval.seconds, now)
            due = min(due, jitter.due)
        else:
            self._jitters.pop(link, None)
        if condition.loss > 0:
            loss = self._losses.get(link)
            if loss is None or loss.loss != condition.loss:
                loss = self._losses[link] = _Loss(self._seed, link, condition.loss, now)
                if not condition.is_cut:
                    self._lab.network.mend(link)
            if loss.due <= now:
                self._toggle(link, loss, now, stays_cut=condition.is_cut)
            due = min(due, loss.due)
        else:
            self._losses.pop(link, None)
        return due

    def _toggle(self, link: str, loss: _Loss, now: float, *, stays_cut: bool) -> None:
        if not loss.is_cut:
            self._lab.network.cut(link)
            loss.is_cut, loss.cut_at, loss.due = True, now, now + loss.next_cut_s
            return
        if not stays_cut:
            self._lab.network.mend(link)
        loss.is_cut = False
        loss.dropped_s += now - loss.cut_at
        loss.next_cut_s = cut_s(loss.draw)
        loss.due = now + open_s(loss.loss, loss.dropped_s, now - loss.begun_at, loss.next_cut_s)


@contextmanager
def varying(lab: Lab, seed: int = 0) -> Iterator[None]:
    """Vary the lab's links within the block, if they are to vary and the kernel does not do it.

    If another process varies this lab's links already, nothing is done.
    """
    if lab.state.netem or not lab.spec.varies:
        yield
        return
    with lab.state.names.state.open("rb") as mine:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield
            return
        variation = Variation(lab, seed)
        variation.start()
        try:
            yield
        finally:
            variation.close()
