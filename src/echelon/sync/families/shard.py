"""The state of one shard: weights, an optimizer, and pushes that wait for a decision.

The cluster and the simulator use the same class, so both apply updates by the same arithmetic. All tensors
are flat; `parameters` are views of the weights in the shapes that the optimizer sees.

An update is made of whole pushes. Gradients, each times its weight, are summed and applied by one step of
the optimizer. Deltas are added to the weights. Pushed weights are combined with the server's by
`ServePolicy.meet`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.errors import ConfigError
from echelon.sync.families.serve import Kind, ServePolicy, WeightedPush

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Push:
    """A worker's push of one step. `used` says which parameters have a gradient.

    `settings` are the options of the worker's optimizer; they hold for the update that the push is part of.
    If the memory of `flat` is another's, `settled` is called when it is needed no more.
    """

    kind: Kind
    flat: Tensor
    used: Sequence[bool]
    settings: Any = None
    settled: Callable[[], None] | None = None


class ShardState:
    """One shard's weights and pushes.

    `step` takes one step of its optimizer with the gradients in `parameters`. The memory of up to `spare`
    pushes is kept for reuse. `configure` sets the optimizer's options to a push's settings.
    """

    def __init__(
        self,
        policy: ServePolicy,
        flat: Tensor,
        parameters: Sequence[Tensor],
        step: Callable[[], None],
        *,
        spare: int = 0,
        configure: Callable[[Any], None] = lambda settings: None,
    ) -> None:
        self.flat = flat
        self.parameters = list(parameters)
        self.version = 0
        self._policy = policy
        self._step = step
        self._configure = configure
        self._pushes: dict[tuple[int, int], Push] = {}
        self._read: dict[int, Tensor] = {}
        self._replies: dict[int, Tensor] = {}
        self._memory: dict[str, Tensor] = {}
        self._last: Tensor | None = None
        self._spare = spare
        self._free: list[Tensor] = []
        self._snapshot: tuple[int, Tensor] | None = None
        self._idle = False
        self._bounds: list[tuple[int, int]] = []
        at = 0
        for parameter in self.parameters:
            self._bounds.append((at, at + parameter.numel()))
            at += parameter.numel()

    @property
    def waiting(self) -> int:
        """The number of pushes that wait for a decision."""
        return len(self._pushes)

    def seeded(self) -> None:
        """First weights have been written into `flat`."""
        self._snapshot = None

    def push(self, worker: int, step: int, push: Push) -> tuple[float, float]:
        """Keep a push; if the policy listens, returns its squared norm and dot product with the last."""
        self._pushes[worker, step] = push
        if not self._policy.listens:
            return 0.0, 0.0
        square = float(push.flat.dot(push.flat))
        dot = float(push.flat.dot(self._last)) if self._last is not None else 0.0
        self._last = push.flat if push.settled is None else push.flat.clone()
        return square, dot

    def apply(self, parts: Sequence[WeightedPush]) -> None:
        """Make one update of these pushes, and forget them."""
        for part in parts:
            if (part.worker, part.step) not in self._pushes:
                raise ConfigError(
                    f"sync policy {self._policy.name} applies step {part.step} of worker {part.worker}, "
                    "which was not pushed or is already settled",
                    fix="a policy settles every push exactly once: see echelon/sync/families/serve.py",
                )
        taken = [(part, self._pushes.pop((part.worker, part.step))) for part in parts]
        for _, push in taken:
            if push.settings is not None:
                self._configure(push.settings)
        self._apply_gradients([(part, push) for part, push in taken if push.kind == "gradient"])
        for part, push in taken:
            if push.kind == "delta":
                self.flat.add_(push.flat, alpha=part.weight)
            elif push.kind == "weights":
                self._replies[part.worker] = self._policy.meet(self.flat, push.flat)
        self.version += 1
        for _, push in taken:
            self._settle(push)

    def _apply_gradients(self, taken: Sequence[tuple[WeightedPush, Push]]) -> None:
        if not taken:
            return
        total = self._amended(*taken[0])
        if len(taken) > 1 or taken[0][0].weight != 1.0 or total is self._last:
            total = total * taken[0][0].weight
        for part, push in taken[1:]:
            total.add_(self._amended(part, push), alpha=part.weight)
        used = [any(flags) for flags in zip(*(push.used for _, push in taken), strict=True)]
        for parameter, (start, stop), is_used in zip(self.parameters, self._bounds, used, strict=True):
            parameter.grad = total[start:stop].view(parameter.shape) if is_used else None
        self._step()
        for parameter in self.parameters:
            parameter.grad = None

    def _amended(self, part: WeightedPush, push: Push) -> Tensor:
        if not self._policy.amends or part.worker not in self._read:
            return push.flat
        return self._policy.amend(push.flat, self.flat, self._read[part.worker], self._memory)

    def drop(self, worker: int, step: int) -> None:
        """Forget a push without applying it."""
        push = self._pushes.pop((worker, step), None)
        if push is not None:
            self._settle(push)

    def take_over(self, worker: int) -> None:
        """Copy pushes of a worker that wait in memory which is not this shard's."""
        for (pusher, _), push in self._pushes.items():
            if pusher == worker and push.settled is not None:
                push.flat = self.push_memory().copy_(push.flat)
                push.settled()
                push.settled = None

    def read(self, worker: int) -> Tensor:
        """The weights that a released worker gets: the shard's, or those that `meet` returned."""
        reply = self._replies.pop(worker, None)
        if reply is not None:
            return reply
        weights = self.flat.clone()
        if self._policy.amends:
            self._read[worker] = weights
        return weights

    def snapshot(self, worker: int) -> Tensor:
        """As `read`, but all workers that get one version share its memory, which must not be changed."""
        if worker in self._replies:
            return self._replies.pop(worker)
        if self._snapshot is None or self._snapshot[0] != self.version:
            if self._snapshot is not None and self._idle:
                self._recycle(self._snapshot[1])
            self._idle = False
            self._snapshot = (self.version, self.push_memory().copy_(self.flat))
        weights = self._snapshot[1]
        if self._policy.amends:
            self._read[worker] = weights
        return weights

    def read_into(self, worker: int, target: Tensor | None) -> None:
        """As `read`, into given memory; None if nobody uses the weights, and they are only noted."""
        if self._policy.amends or worker in self._replies:
            weights = self.read(worker)
            if target is not None:
                target.copy_(weights)
        elif target is not None:
            target.copy_(self.flat)

    def lent(self, snapshot: Tensor, *, back: bool) -> None:
        """A snapshot is being sent, or, with `back`, was sent: its memory may be reused."""
        if self._policy.amends or self._policy.pushes == "weights":
            return
        if self._snapshot is not None and self._snapshot[1] is snapshot:
            self._idle = back
        elif back:
            self._recycle(snapshot)

    def push_memory(self) -> Tensor:
        """Memory for a push: reused if there is any, for new memory costs time."""
        try:
            return self._free.pop()  # no check before: two threads call this
        except IndexError:
            return self.flat.new_empty(self.flat.shape)

    def _settle(self, push: Push) -> None:
        if push.settled is not None:
            push.settled()
        else:
            self._recycle(push.flat)

    def _recycle(self, flat: Tensor) -> None:
        if len(self._free) < self._spare and flat is not self._last:
            self._free.append(flat)
