"""How a run's workers sum gradients: arranged by the sites that their links show, and by their speeds.

All workers have the same measurements, so all decide alike. Nothing is decided if the user chose a
collective, if servers sum, or where workers share one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.schedule.collectives.auto import AutoCollective
from echelon.config.units import show_bytes, show_seconds
from echelon.observe.events import CollectiveChanged
from echelon.plan.arrange import arrange, topology_of_links
from echelon.plan.groups import Groups
from echelon.plan.owners import fewer_owners
from echelon.plan.plan import Plan
from echelon.train.clock import StepClock
from echelon.train.families.synchronizer import Explain, Synchronizer

_WORTHWHILE = 0.03  # of a step


def arranges(plan: Plan, group: Group, synchronizer: Synchronizer) -> bool:
    """Whether it is for Echelon to decide how this run's gradients travel."""
    return (
        plan.collective == AutoCollective.name
        and group.own_transport
        and not group.servers
        and synchronizer.meets_every_step
    )


def gradient_bytes(model: nn.Module) -> int:
    """The size of a model's gradients."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


class Arranger:
    """Arranges the group of one worker. All workers call it alike."""

    def __init__(
        self,
        group: Group,
        links: Links,
        machines: Sequence[Sequence[int]],
        clock: StepClock,
        emit: Callable[[CollectiveChanged], None],
        explain: Explain,
    ) -> None:
        self._group = group
        self._links = links
        self._machines = machines
        self._clock = clock
        self._emit = emit
        self._explain = explain
        self._usual = str(AutoCollective.measured(links.slowest))
        self._now = self._usual
        self._by_site = False
        self._groups: Groups = ()
        self._length_bytes = 0

    @property
    def callbacks(self) -> dict[str, Any]:
        """What adapts shares tells this of."""
        return {"on_speeds": self.speeds, "on_congestion": self.measure_again}

    def prepared(self, length_bytes: int) -> None:
        """The gradients of all models have so many bytes."""
        self._length_bytes = length_bytes
        self._arrange("")

    def measure_again(self) -> bool:
        """Gradients take another time: measure links again; returns whether they travel in another way."""
        before = self._links.slowest
        with self._clock.exchange(begins_step=False):
            links = self._group.measure_links()
        if links is None:
            return False
        self._links = links
        self._usual = str(AutoCollective.measured(links.slowest))
        now = links.slowest
        rates = (
            f"{show_bytes(1 / now.seconds_per_byte)}/s, before {show_bytes(1 / before.seconds_per_byte)}/s"
        )
        why = f"links were measured again, because gradients took another time: the slowest has {rates}"
        self._explain("links", why, f"at step {self._clock.step}, {why}")
        return self._arrange(f"{why}; ")

    def _arrange(self, why: str) -> bool:
        """Arrange workers by the sites that links show; returns whether that changed something."""
        topology = topology_of_links(self._links.latency_s, self._links.bytes_per_s, self._machines)
        found = arrange(topology, self._machines, self._length_bytes)
        if found is None:
            if not self._by_site:
                return False
            self._by_site = False
            self._group.arrange(self._usual)
            self._changed(self._usual, f"{why}no way by sites is cheaper", 0.0, 0.0)
            return True
        if (found.collective, found.groups) == (self._now, self._groups):
            return False
        self._by_site = True
        self._groups = found.groups
        self._group.arrange(found.collective, found.groups)
        self._changed(
            found.collective, f"{why}{found.reason}", found.seconds, found.instead_s, found.groups
        )
        return True

    def speeds(self, speeds: Sequence[float], step_s: float) -> bool:
        """Workers have these speeds; returns whether gradients travel in another way from now on."""
        if self._by_site or len(self._machines) != len(speeds):
            return False
        found = fewer_owners(speeds, self._length_bytes, self._links.slowest)
        if found is not None and found.instead_s - found.seconds < _WORTHWHILE * step_s:
            found = None
        collective = found.collective if found is not None else self._usual
        if collective == self._now:
            return False
        self._group.arrange(collective)
        if found is None:
            self._changed(collective, "workers are about equally fast", 0.0, 0.0)
            return True
        summing = ",".join(map(str, found.ranks))
        whose = f"ranks {summing} sum" if len(found.ranks) > 1 else f"rank {summing} sums"
        who = f"{collective}: {whose} for all" if summing else collective
        why = (
            f"{who}, because messages cost slow workers most; about {show_seconds(found.seconds)} for "
            f"{show_bytes(self._length_bytes)}, {show_seconds(found.instead_s)} as before"
        )
        self._changed(collective, why, found.seconds, found.instead_s)
        return True

    def _changed(
        self, collective: str, why: str, expected_s: float, before_s: float, groups: Groups = ()
    ) -> None:
        before, self._now = self._now, collective
        step = self._clock.step
        self._emit(
            CollectiveChanged(
                t=time.time(),
                rank=self._group.rank,
                step=step,
                collective=collective,
                before=before,
                reason=why,
                expected_s=expected_s,
                before_s=before_s,
                groups=[list(group) for group in groups],
            )
        )
        self._explain("collective", why, f"from step {step} on, {why}" if step else why)
