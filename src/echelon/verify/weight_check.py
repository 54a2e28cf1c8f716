"""The check of weights in a run: a vote on every tensor, and repairs from a peer in the majority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.checkpoint import state_tree
from echelon.errors import ModelError
from echelon.verify.checksums import checksum, state_checksum
from echelon.verify.verification import ActiveVerification, CheckFinding, VerifiedRun
from echelon.verify.vote import Vote, vote

if TYPE_CHECKING:
    from echelon.verify.checks.weights import Weights


@dataclass(frozen=True, slots=True)
class _Held:
    """A weight, or what an optimizer keeps of one."""

    label: str
    weight: Tensor | None = None
    state_of: tuple[Optimizer, nn.Parameter] | None = None

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of its parameter."""
        assert self.state_of is not None
        optimizer, p = self.state_of
        return dict(optimizer.state[p]) if p in optimizer.state else {}

    def number(self) -> int:
        """Its checksum."""
        return checksum(self.weight) if self.weight is not None else state_checksum(self.state)


class WeightCheck(ActiveVerification):
    """Votes every few steps."""

    def __init__(self, run: VerifiedRun, options: Weights) -> None:
        super().__init__(run)
        self._options = options

    def stepped(self, step: int) -> None:
        """It is time for a vote after every few steps."""
        if step % self._options.every == 0:
            self.vote()

    @torch.no_grad()
    def vote(self) -> None:
        """Compare all tensors; give the majority's to who has others."""
        held = self._held()
        if not held:
            return
        self.done += 1
        group = self.run.group
        told = group.all_gather(torch.tensor([group.slot, *(one.number() for one in held)]))
        slots, rows = torch.stack(list(told)).cpu().split([1, len(held)], dim=1)
        slot_of = slots.flatten().tolist()  # of those who were members when they told
        differing = (rows != rows[0]).any(dim=0).nonzero().flatten().tolist()
        if not differing:
            return
        votes = {at: vote(rows[:, at].tolist()) for at in differing}
        self._report(held, votes, slot_of)
        for at, outcome in votes.items():
            right = [slot for place, slot in enumerate(slot_of) if place not in outcome.others]
            self._repair(held[at], right)

    def _held(self) -> list[_Held]:
        """All weights and all optimizer states, in the same order on all workers."""
        weights = self.run.weights()
        label_of = {tensor.data_ptr(): name for name, tensor in weights if tensor.numel()}
        held = [_Held(name, tensor) for name, tensor in weights]
        for optimizer in self.run.optimizers:
            kind = type(optimizer).__name__
            held += [
                _Held(f"{kind}'s state of {label_of[p.data_ptr()]}", None, (optimizer, p))
                for group in optimizer.param_groups
                for p in group["params"]
                if p.data_ptr() in label_of
            ]
        return held

    def _report(self, held: Sequence[_Held], votes: dict[int, Vote], slot_of: Sequence[int]) -> None:
        """One finding for each worker that has other values; stop if there is no majority."""
        tied = next((at for at, outcome in votes.items() if not outcome.majority), None)
        stops = tied is not None and self._options.tie == "stop"
        for rank in sorted({rank for outcome in votes.values() for rank in outcome.others}):
            concerned = [at for at, outcome in votes.items() if rank in outcome.others]
            outcome = votes[concerned[0]]
            more = f" and {len(concerned) - 1} more" if len(concerned) > 1 else ""
            source = f"rank {slot_of[outcome.source]}'s"
            why = "the majority's" if outcome.majority else f"{source}, and there is no majority"
            self.run.report(
                CheckFinding(
                    check="weights",
                    worker=slot_of[rank],
                    tensor=held[concerned[0]].label + more,
                    what=f"differs from {why}",
                    action="stopped" if stops else "repaired",
                )
            )
        if stops and tied is not None:
            outcome = votes[tied]
            ranks = " and ".join(self.run.name(slot_of[rank]) for rank in (outcome.source, *outcome.others))
            raise ModelError(
                f"{held[tied].label} differs between {ranks}, and no majority says which is right",
                where=f"verify weights, step {self.run.step()}",
                fix="continue from a checkpoint; use three workers or more, or weights(tie=leader), which "
                "takes the lowest rank's values",
            )

    def _repair(self, one: _Held, right: Sequence[int]) -> None:
        """All workers take part; only those that do not have the right values change anything."""
        group = self.run.group
        wrong = group.slot not in right
        if one.weight is not None:
            values = one.weight.detach().clone(memory_format=torch.contiguous_format)
            group.broadcast_held(values, right)
            if wrong:
                one.weight.copy_(values)
            return
        assert one.state_of is not None
        mine = torch.frombuffer(bytearray(state_tree.pack(one.state)), dtype=torch.uint8)
        length = torch.tensor([mine.numel()])
        group.broadcast_held(length, right)
        data = mine if mine.numel() == int(length) else torch.zeros(int(length), dtype=torch.uint8)
        group.broadcast_held(data, right)
        if wrong:
            optimizer, p = one.state_of
            _take_state(optimizer.state[p], state_tree.unpack(bytes(data.numpy())))


def _take_state(state: dict[str, Any], right: dict[str, Any]) -> None:
    """Replace values in place where there are tensors of the same shape."""
    for name in [name for name in state if name not in right]:
        del state[name]
    for name, value in right.items():
        before = state.get(name)
        if isinstance(before, Tensor) and isinstance(value, Tensor) and before.shape == value.shape:
            before.copy_(value)
        else:
            state[name] = value
