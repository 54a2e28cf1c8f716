"""What is checked while a script trains on several workers, so that nothing is silently wrong?

    weights      the same on all workers (drift.py), at the first pass' end, every few hundred steps, at
                 saves and after the last epoch
    gradients    finite: a warning of the worker on which they are not, an error once weights hold NaN;
                 reduced, if no backward pass has made them
    streams      random numbers that differ between workers (streams.py)
    layers       those that were replaced after `prepare`
    evaluations  on a share of the data whose figures were not combined
    samples      the same at the same index, as far as a few of them show (consistency.py)
    calls        what was not prepared (forgotten.py), what all workers save (saving.py)

With one worker nothing is installed and nothing is checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from echelon.comm.group import Group
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.train import consistency, drift, streams
from echelon.train.families.synchronizer import Synchronizer
from echelon.train.forgotten import ForgottenParts
from echelon.train.loader import SharedLoader
from echelon.train.run_state import Prepared
from echelon.train.saving import WholeSaves
from echelon.verify.verifier import Verifier

_STEPS_BETWEEN = 400  # a check costs about as much as a small step, so it must be rare


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the checks see of a session. `warn` tells the user a sentence.

    `verifier` has the optional checks; `copies` is how many workers have the same samples.
    """

    group: Group
    view: Group  # one worker for each replica of the model; the group itself, if each worker has one
    nodes: list[str]
    prepared: Prepared
    synchronizer: Synchronizer
    rendezvous: Rendezvous | None
    verifier: Verifier
    copies: int
    step: Callable[[], int]
    warn: Callable[[str], None]


class Guard:
    """The checks of one worker. All workers call the same methods in the same order."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._several = around.group.size > 1
        self._own_streams = True
        self._streams_forked = False
        self._checked_at = -1
        self._stepped_at_begin = 0
        self._combines = False  # the script has combined figures since the last pass began
        self._not_combined: SharedLoader | None = None
        self._said: set[str] = set()
        self._nan_began: int | None = None  # the step in which this worker had such a gradient first
        self._changed = False
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._forgotten = ForgottenParts(
            around.prepared, around.group.size, lambda text: self._say(text, text)
        )
        self._saves: WholeSaves | None = None
        if self._several:
            self._install()

    def _install(self) -> None:
        changed = weakref.WeakMethod(self._registered)

        def registered(module: nn.Module, name: str, what: object) -> None:
            tell = changed()
            if tell is not None:
                tell(module)

        self._handles = [
            register_module_parameter_registration_hook(registered),
            register_module_module_registration_hook(registered),
        ]
        self._forgotten.install()
        rendezvous = self._around.rendezvous
        if rendezvous is not None:
            rank = self._around.group.rank
            host = rendezvous.members[rank].host
            first = min(member.rank for member in rendezvous.members if member.host == host)
            self._saves = WholeSaves(rank, first, lambda key, n: int(rendezvous.store.add(key, n)))
            self._saves.install()

    def remove(self) -> None:
        """Remove all that was installed."""
        self._forgotten.remove()
        if self._saves is not None:
            self._saves.remove()
        while self._handles:
            self._handles.pop().remove()

    # Preparing -----------------------------------------------------------------------------------

    def prepared(self, *, own_streams: bool) -> None:
        """`prepare` is done: from the first time on, workers draw random numbers of their own."""
        if not self._several:
            return
        self._own_streams = own_streams
        self.forward()
        self._modules.update(m for model in self._around.prepared.models for m in model.modules())
        if not self._streams_forked:
            self._streams_forked = True
            self._fork_streams()

    def same_samples(self, loaders: list[SharedLoader]) -> None:
        """Warn if workers read different samples at the same index."""
        text = consistency.compare_samples(self._around.group, loaders, self._around.nodes)
        if text:
            self._say(text, text)

    def _fork_streams(self) -> bool:
        """Whether two workers had a stream in common, which they have no longer."""
        group, copies = self._around.view, self._around.copies
        alike = False
        if self._own_streams:
            among = [one.tolist() for one in group.all_gather(torch.tensor(streams.digests()))]
            if group.rank < len(among):  # a worker that comes back repeats a gather of the others
                streams.fork(group.rank, among)
            alike = streams.alike(among[: group.size // copies])
        if copies > 1:
            streams.copy(group, group.rank % (group.size // copies))
        return alike

    # Layers that change ------------------------------------------------------------------------------

    def _registered(self, module: nn.Module) -> None:
        if module in self._modules:
            self._changed = True

    def forward(self) -> None:
        """A model's forward pass begins: synchronise what was replaced in it."""
        if self._changed:
            self._changed = False
            self._renew()

    def _renew(self) -> None:
        for model in self._around.prepared.models:
            fresh = self._around.synchronizer.renew(model)
            self._modules.update(model.modules())
            if fresh:
                names = ", ".join(fresh[:3]) + (" and others" if len(fresh) > 3 else "")
                self._say(
                    f"new {names}",
                    f"{names} came into the model after prepare: all workers continue with rank 0's "
                    "values. An optimizer that was made before does not know them",
                )

    def place(self) -> list[int]:
        """When weights were checked last, and the step at which the pass began."""
        return [self._checked_at, self._stepped_at_begin]

    def go_to(self, place: list[int]) -> None:
        """Check when the other workers do."""
        self._checked_at, self._stepped_at_begin = place

    # Passes and steps ----------------------------------------------------------------------------

    def pass_begins(self, loader: SharedLoader) -> None:
        """A pass over a loader begins."""
        if not self._several:
            return
        self._stepped_at_begin = self._around.step()
        self._combines = False
        if self._fork_streams():
            self._say(
                "streams",
                "workers had the same random state when a pass began, so the script seeds after prepare; "
                "each worker draws from a stream of its own again",
            )
        merged = loader.merged()
        if merged and not loader.streams:
            self._say(
                f"merged {loader.index}",
                f"the last {merged} samples of each pass over loader {loader.index} join the batch before, "
                f"because {self._around.view.size} workers cannot share them: one step fewer than alone",
            )

    def pass_ended(self, loader: SharedLoader, *, evaluated: bool) -> None:
        """A pass over a loader has ended; `evaluated`: nothing in it could be trained."""
        if not self._several:
            return
        stepped = self._around.step() > self._stepped_at_begin
        if stepped and self._checked_at < 0:
            self.check_weights("the end of a pass")
        if evaluated and not stepped and not self._combines and self._around.view.size > 1:
            self._not_combined = loader

    def combined(self) -> None:
        """The script has combined figures of all workers."""
        self._combines, self._not_combined = True, None

    def goes_on(self) -> None:
        """Training goes on, or is over: an evaluation before it should have been combined by now."""
        loader, self._not_combined = self._not_combined, None
        if loader is not None:
            self._say(
                f"evaluated {loader.index}",
                f"a pass over loader {loader.index} without training was not combined: each worker saw "
                f"its share only (rank {self._around.group.rank}: {loader.share_drawn} samples), so "
                "figures made from it are of that share. Use session.mean, session.all_reduce or "
                "session.gather_for_metrics",
            )

    def stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        if not self._several:
            return
        self._forgotten.stepping(optimizer)
        by_hand = self._around.synchronizer.not_reduced(optimizer)
        if by_hand:
            found = drift.compare(self._around.group, by_hand)
            if found is not None:
                raise drift.gradients_differ(found, self._around.nodes, self._when())
        if self._around.step() - self._checked_at >= _STEPS_BETWEEN and self._checked_at >= 0:
            self.check_weights(self._when())

    # Weights -------------------------------------------------------------------------------------

    def check_weights(self, when: str) -> None:
        """Raise if the workers' weights differ; warn if they are not finite."""
        if not self._several:
            return
        self._checked_at = self._around.step()
        self._around.verifier.vote()
        weights = self._around.synchronizer.replicas()
        found = drift.compare(self._around.group, weights)
        if found is not None:
            raise drift.weights_differ(found, self._around.nodes, f"{when}, {self._when()}")
        self._refuse_nan(when)
        name = drift.first_not_finite(weights)
        if name:
            self._say("not finite", f"parameter {name} holds NaN or infinity ({self._when()})")

    def _refuse_nan(self, when: str) -> None:
        """Raise if weights hold NaN: no step can remove it."""
        name = drift.first_nan(self._around.synchronizer.replicas())
        if name:
            rank, nodes = self._around.group.rank, self._around.nodes
            raise drift.weights_are_lost(name, rank, nodes, self._nan_began, f"{when}, {self._when()}")

    def not_finite(self) -> None:
        """The gradient of a model's output is NaN or infinite on this worker.

        A scaler of gradients skips such a step, so it is no error. Once it has spread, weights hold NaN on
        all workers, and the worker on which it began names itself.
        """
        if not self._several:
            return
        self._refuse_nan("a backward pass")
        rank = self._around.group.rank
        if self._nan_began is None:
            self._nan_began = self._around.step()
        self._say(
            "not finite",
            f"rank {rank} on {self._around.nodes[rank]}: the gradient of the model's output is NaN or "
            f"infinite ({self._when()}); {self._consequence}",
            everywhere=True,
        )

    @property
    def _consequence(self) -> str:
        if self._around.group.changes is None:
            return "it spreads to all workers' weights"
        return "as long as other workers' are finite, it is in no sum"

    def close(self) -> None:
        """The script is over."""
        if self._several:
            self.goes_on()
            self._forgotten.close()

    def _when(self) -> str:
        return f"step {self._around.step()}"

    def _say(self, what: str, text: str, *, everywhere: bool = False) -> None:
        """Say something once, on the leader, or on the worker that it concerns."""
        if what not in self._said and (everywhere or self._around.group.rank == 0):
            self._said.add(what)
            self._around.warn(text)
