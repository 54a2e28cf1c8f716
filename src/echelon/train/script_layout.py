"""How are the models of a session spread over its workers, and what synchronises and checks them?

The session inherits this. A run begins with data parallelism; `--parallel` or the first `prepare` may
choose another layout, which replaces the synchronizer before anything is prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from echelon.cluster.allowance import allowance
from echelon.comm.meet.links import Links
from echelon.comm.meet.rendezvous import Member, Rendezvous
from echelon.comm.memory.rails import machines
from echelon.errors import ConfigError
from echelon.parallel.layout import is_auto
from echelon.parallel.strategies.threads import Threads
from echelon.parallel.threaded import ThreadedModel
from echelon.plan.groups import Groups
from echelon.plan.neighbours import neighbouring_groups
from echelon.plan.shares import ShareTable
from echelon.train.arranging import Arranger, arranges
from echelon.train.auto_shares import AutoShares
from echelon.train.checks import alone, check_layout
from echelon.train.families.choose import spread_out
from echelon.train.families.synchronizer import ModelOptions
from echelon.train.guard import Guard, Surroundings
from echelon.train.layout_pick import auto_job, picked, predicted_event, said
from echelon.train.memory_room import MemoryRoom
from echelon.train.profiling import JobProfiling
from echelon.train.script_members import ScriptMembers
from echelon.train.weighing import LossWeights
from echelon.verify.verifier import Verifier


class ScriptLayout(ScriptMembers):
    """The session's layout; the session sets what is declared here."""

    _rendezvous: Rendezvous | None
    _links: Links | None
    _verifier: Verifier
    _copies: int
    _layout: str
    _thread_replicas: int
    _threaded: list[ThreadedModel]
    _weights: LossWeights
    _arranger: Arranger | None
    _profiling: JobProfiling
    device: torch.device

    def _entering(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        """A model is called with these arguments."""
        raise NotImplementedError

    def _adapt_to_speeds(self, members: Sequence[Member]) -> None:
        """Decide by measured speeds how gradients travel and how large shares are, where allowed."""
        plan, group, clock = self._plan, self._group, self._clock
        arranged = self._changes is None and arranges(plan, group, self._synchronizer)
        if self._links is not None and members and arranged:
            hosts = machines(members)
            self._arranger = Arranger(group, self._links, hosts, clock, self._record.emit, self.explain)
        adapts = plan.adapt_shares and group.size > 1 and self._copies == 1
        if adapts and self._synchronizer.meets_every_step:
            self._auto_shares = AutoShares(
                group,
                self._shares,
                self._prepared.loaders,
                clock,
                self._record.emit,
                self.explain,
                **(self._arranger.callbacks if self._arranger is not None else {}),
                room=MemoryRoom(self._nodes.count(self.node)) if self.device.type == "cpu" else None,
            )
            clock.on_ended = self._auto_shares.step_ended
            self._synchronizer.carry(self._auto_shares.piggyback)

    def _watch_over(self) -> None:
        """Check and weigh what the synchronizer synchronises."""
        self._guard = Guard(
            Surroundings(
                group=self._group,
                view=self._view,
                nodes=self._nodes,
                prepared=self._prepared,
                synchronizer=self._synchronizer,
                rendezvous=self._rendezvous,
                verifier=self._verifier,
                copies=self._copies,
                step=lambda: self._clock.step,
                warn=self.warn,
            )
        )
        self._weights = LossWeights(
            lambda weight, batch: self._synchronizer.weigh(weight / self._copies, batch),
            where=lambda: f"step {self._clock.step}, rank {self.rank}",
            entering=self._entering,
            strange=self._guard.not_finite,
        )
        self._synchronizer.resolve_with(self._weights.resolve)

    def _lay_out(self, text: str, *, where: str) -> None:
        """Spread the models that will be prepared over the workers by this layout."""
        if text == self._layout or is_auto(text) or (self.world_size == 1 and not alone(text, where)):
            return
        layout = replace(
            check_layout(replace(self._plan, parallel=text), self.world_size, where=where),
            order=self._neighbours(),
        )
        threads = layout.find(Threads)
        if layout.is_data_only and self._layout == "data" and threads is None:
            return
        if self._prepared.models or self._prepared.loaders or self._layout != "data":
            raise ConfigError(
                f"parallel is {text!r}, but the run has begun with {self._layout!r}",
                where=where,
                fix="give one layout, in the first prepare or in join",
            )
        if self._changes is not None and threads is None:
            raise ConfigError(
                f"parallel is {text!r}, and a part of the model is lost with its worker",
                where=where,
                fix="leave --min-workers out, or use data parallelism alone",
            )
        self._layout = text
        if threads is not None:  # each worker has the whole model, as with data
            self._thread_replicas = threads.replicas or torch.get_num_threads()
            return
        self._guard.remove()
        self._synchronizer.close()
        self._auto_shares = self._arranger = self._clock.on_ended = None
        self._profiling = JobProfiling(None)
        memory = allowance(self._nodes.count(self.node)).memory_bytes
        spread = spread_out(
            layout,
            self._group,
            self._clock,
            memory_bytes=memory,
            links=self._links,
            compared=self._agree,
            explain=self.explain,
        )
        if list(layout.order) != sorted(layout.order):
            self.explain("layout", f"neighbours by site: {_said_sites(self._sites())}", tell="")
        self._synchronizer, self._view = spread.synchronizer, spread.view
        self._shares = ShareTable(spread.mesh.weights(self._plan.weights))
        self._clock.counts_samples = spread.mesh.stage_of(self.rank) == 0
        self._watch_over()

    def _in_threads(self, model: nn.Module) -> None:
        """Compute calls of a model in threads, if the layout says so."""
        count = self._thread_replicas
        if count > 1:
            own_threads = max(1, torch.get_num_threads() // count)
            self._threaded.append(ThreadedModel(model, count, own_threads))

    def _end_threads(self) -> None:
        """Give the models back that are computed in threads."""
        while self._threaded:
            self._threaded.pop().close()

    def _sites(self) -> Groups:
        """The workers of each site, by the plan's groups or by measured links."""
        links, members = self._links, self._rendezvous.members if self._rendezvous is not None else []
        return neighbouring_groups(
            machines(members[: self.world_size]),
            links.latency_s if links is not None else {},
            links.bytes_per_s if links is not None else {},
            self._plan.groups,
        )

    def _neighbours(self) -> tuple[int, ...]:
        """The workers, those of one site beside each other."""
        return tuple(rank for site in self._sites() for rank in site)

    def _picked_layout(self, things: tuple[Any, ...], rules: ModelOptions, *, per_worker: bool) -> str:
        """The layout that `auto` chooses for what is prepared; later, the one that the run has."""
        if self.world_size == 1 or self._changes is not None or self._prepared.models:
            return self._layout
        job = auto_job(
            things,
            self.world_size,
            per_worker=per_worker,
            local_batchnorm=rules.batchnorm == "local",
        )
        here = self._nodes.count(self.node)
        found = picked(
            job, self._group, self._plan, self._plan.workers[self.rank].memory, here, self._neighbours()
        )
        best, *others = found.costs
        self._plan = replace(self._plan, parallel=best.text)
        if self.is_leader:
            self._record.emit(predicted_event(found))
        self.explain("parallel", said(found), tell=f"parallel auto: {best}" if others else "")
        return best.text


def _said_sites(sites: Groups) -> str:
    """The ranks of each site, as a text."""
    return " | ".join(",".join(map(str, site)) for site in sites)
