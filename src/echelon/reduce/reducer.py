"""Reduces a model's gradients while backward goes on, so that `backward()` returns with them reduced.

A hook reports when a parameter's gradient is computed. A bucket whose gradients are all computed is sent,
after the buckets before it. When backward ends, the remaining buckets are sent; then the reducer waits for
the results and assigns them, or hands buckets in flight to a receiver.

The combined gradient is sum_i w_i g_i with weights that sum to one. A gradient that was reduced
before (several backward passes in one step) is the same on all workers, so reducing it again with the
new part leaves it as it is. Where a sum is wanted instead, each gradient is multiplied by the number of
workers before it is accumulated, and the mean of those is the sum.

A worker's own gradients do not change until the whole round has succeeded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.comm.changing import LOST, GroupChanges
from echelon.comm.group import Group
from echelon.comm.schedule.cost import LinkCost
from echelon.errors import GradientError, MismatchedCalls, ModelError
from echelon.reduce.bucket import Bucket, DenseBucket, Landed
from echelon.reduce.encoded.bucket import EncodedBucket
from echelon.reduce.encoded.encoder import ModelEncoder, bucket_bytes
from echelon.reduce.packing import Item, assign, sizes
from echelon.reduce.piggyback import Piggyback
from echelon.reduce.unfit import find_unfit, send_without

NamedParameter = tuple[str, nn.Parameter]
_COPIED_BYTES = 2 << 20  # sums of so many bytes are copied faster than workers confirm them to each other


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """How one bucket's reduction went; times are on the performance counter.

    `filled_at`: the worker began to copy gradients into it, which took `encode_s`. `begun`, `sent` and
    `ended` are as in `future.Timing` (0 if unknown). `wait_s`: how long the trainer was blocked for it.
    `how`: its form. `coded_bytes`: the encoded part of `sent_bytes`.
    """

    index: int
    size_bytes: int
    sent_bytes: int
    filled_at: float
    encode_s: float
    begun: float
    sent: float
    ended: float
    adding_s: float
    wait_s: float
    how: str = "dense"
    coded_bytes: int = 0


class RoundObserver(Protocol):
    """Records how a round goes."""

    def computing(self) -> None:
        """Backward goes on: one more gradient is computed."""

    def arrived(self) -> None:
        """All of this worker's gradients are computed."""

    def bucket(self, times: BucketTimes) -> None:
        """One bucket has been reduced."""

    def reduced(self, sent_bytes: int) -> None:
        """The reduced gradients have arrived, or are in flight and handed to the receiver."""

    def waited(self, wait_s: float) -> None:
        """The trainer was blocked for gradients that were in flight after the round."""


class Receiver(Protocol):
    """Takes the buckets in flight when backward ends."""

    def take(self, reducer: Reducer, buckets: Sequence[Bucket]) -> None:
        """Take them; wait for each with `reducer.receive` when it is needed."""

    def settle(self) -> None:
        """Wait for all of them now: another round begins."""


class Inspector(Protocol):
    """Looks at every round before its sums are assigned; see verify/verifier.py."""

    def sending(self, bucket: Bucket) -> None:
        """A bucket is about to be filled with this worker's gradients."""

    def sent(self, reducer: Reducer) -> None:
        """All buckets are in flight."""

    def landed(self, reducer: Reducer) -> bool:
        """All sums have arrived, `p.grad` is still this worker's own; whether to reduce these again."""


class Reducer:
    """Reduces one model's gradients over all workers."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        group: Group,
        weight: Callable[[], float],
        observer: RoundObserver,
        *,
        summed: bool = False,
        receiver: Receiver | None = None,
        link: LinkCost | None = None,
        encoder: ModelEncoder | None = None,
        piggyback: Piggyback | None = None,
        inspector: Inspector | None = None,
    ) -> None:
        self._inspector = inspector
        self._named = list(parameters)
        self._group = group
        self._weight = weight
        self._observer = observer
        self._summed = summed
        self._receiver = receiver
        self._link = link
        self._encoder = encoder
        self._piggyback = piggyback
        self._just_landed: set[int] = set()
        self._carried: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._factored: Mapping[int, Callable[[], Bucket]] = {}
        self._signature: list[Hashable] = []
        self._next = 0
        self._reported: set[int] = set()
        self._in_backward = False
        self._kept: list[Tensor] = []  # copies of the last round's sums, where members may be lost
        self._packed_in = 0  # the number of changes of members when buckets were made
        self.active = True
        self.unreduced = False
        self.rounds = 0
        self.refresh()

    @property
    def group(self) -> Group:
        """The workers that reduce together."""
        return self._group

    @property
    def named(self) -> list[NamedParameter]:
        """The parameters, by name."""
        return self._named

    def renew(self, parameters: Sequence[NamedParameter]) -> None:
        """From the next round on, reduce the gradients of these parameters; on all workers alike."""
        self._named = list(parameters)
        self._signature = [_signature(p) for _, p in self._named]
        self._pack()

    @property
    def unit(self) -> float:
        """The factor of gradients in buckets."""
        return self._weight()

    @property
    def weight(self) -> float:
        """The weight of this worker's gradients in the result; 1 for a sum."""
        return 1.0 if self._summed else self._weight()

    def refresh(self) -> None:
        """Make new buckets if parameters were frozen, unfrozen or changed; on all workers alike."""
        signature = [_signature(p) for _, p in self._named]
        if signature != self._signature:
            self._signature = signature
            self._pack()

    @property
    def _changes_so_far(self) -> int:
        return self._group.changes.number if self._group.changes is not None else 0

    def factor(self, made: Mapping[int, Callable[[], Bucket]]) -> None:
        """From the next round on, these parameters (by id) have buckets of their own."""
        self._factored = made
        self._pack()

    def _pack(self) -> None:
        """Assign every trainable parameter to a bucket, in the order in which backward reaches them."""
        if self._receiver is not None:
            self._receiver.settle()
        self._packed_in = self._changes_so_far
        self._set_all_aside(p for _, p in self._named)
        self.detach()
        wanted = [p for _, p in self._named if p.requires_grad]
        coded = {at for at, p in enumerate(wanted) if self._encoder is not None and self._encoder.fits(p)}
        dense = [at for at, p in enumerate(wanted) if id(p) not in self._factored and at not in coded]
        items = [_item(wanted[index]) for index in dense]
        total_bytes = sum(item.size_bytes for item in items)
        first, rest = sizes(self._link, self._group.size, total_bytes=total_bytes)
        packed = assign(items, first_bytes=first, bucket_bytes=rest)
        # A bucket can be sent when backward has passed its last parameter, which is the lowest.
        made: list[tuple[int, Bucket]] = []
        carrier = self._carrier(packed, [wanted[index] for index in dense])
        for at, part in enumerate(packed):
            places = [dense[index] for index in part]
            along = self._piggyback if at == carrier else None
            made.append((min(places), DenseBucket([wanted[place] for place in places], self._group, along)))
        made += self._encoded(wanted, sorted(coded))
        made += [
            (place, self._factored[id(p)]()) for place, p in enumerate(wanted) if id(p) in self._factored
        ]
        self._buckets = [bucket for _, bucket in sorted(made, key=lambda pair: -pair[0])]
        for bucket in self._buckets:
            for p in bucket.parameters:
                self._bucket_of[id(p)] = bucket
                self._listen(p)

    def _carrier(self, packed: Sequence[Sequence[int]], dense: Sequence[nn.Parameter]) -> int | None:
        """The bucket that carries numbers along: the last that is sent and has room for them."""
        if self._piggyback is None:
            return None
        fitting = [at for at, part in enumerate(packed) if self._piggyback.fits(dense[part[0]].dtype)]
        self._piggyback.is_carried = bool(fitting)
        return fitting[-1] if fitting else None

    def _encoded(self, wanted: Sequence[nn.Parameter], places: Sequence[int]) -> list[tuple[int, Bucket]]:
        """The encoded buckets, each with its lowest place."""
        if self._encoder is None or not places:
            return []
        name_of = {id(p): name for name, p in reversed(self._named)}
        items = [_item(wanted[place]) for place in places]
        most = bucket_bytes(sum(item.size_bytes for item in items))
        made: list[tuple[int, Bucket]] = []
        for part in assign(items, first_bytes=most, bucket_bytes=most):
            held = [wanted[places[index]] for index in part]
            bucket = self._encoder.bucket([(name_of[id(p)], p) for p in held])
            made.append((min(places[index] for index in part), bucket))
        return made

    def _listen(self, p: nn.Parameter) -> None:
        self._handles.append(p.register_post_accumulate_grad_hook(self._ready))
        if self._summed:
            self._handles.append(p.register_hook(self._times_workers))
        if self._receiver is not None:
            self._handles.append(p.register_hook(self._before_gradient))
        if self._encoder is not None:
            self._handles.append(p.register_hook(lambda _: self._set_aside(p)))

    def detach(self) -> None:
        """Remove all hooks and buckets."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._bucket_of.clear()
        self._just_landed.clear()
        for bucket in self._buckets:
            bucket.release()
        self._buckets = []

    def touches(self, parameter_ids: set[int]) -> bool:
        """Whether this reducer has any of these parameters."""
        return any(id(p) in parameter_ids for _, p in self._named)

    def missed(self, parameter_ids: set[int]) -> str:
        """The name of a parameter among these whose gradient was in no round."""
        for name, p in self._named:
            unseen = p.requires_grad and id(p) not in self._bucket_of and p.grad is not None
            if unseen and id(p) in parameter_ids:
                return name
        return ""

    def rescale(self, factor: float) -> None:
        """Convert gradients that are kept locally from the current weight to the next one."""
        if self._summed:
            return
        self._set_all_aside(p for _, p in self._named)
        for _, p in self._named:
            before = self._carried.get(id(p))
            if p.grad is not None and before is not None:
                p.grad.sub_(before).mul_(factor).add_(before)
            elif p.grad is not None:
                p.grad.mul_(factor)

    def _times_workers(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad * self._group.size  # a factored weight may get none

    def _before_gradient(self, grad: Tensor | None) -> None:
        """A gradient is about to be accumulated: the one in flight must have arrived."""
        if not self._in_backward and self._receiver is not None:
            self._receiver.settle()

    def _set_aside(self, p: nn.Parameter) -> None:
        """Before a gradient is accumulated: remember its reduced part, which is not encoded again."""
        gradient = p.grad
        if gradient is None:
            self._carried.pop(id(p), None)  # it was cleared since
        if id(p) not in self._just_landed:
            return
        self._just_landed.discard(id(p))
        bucket = self._bucket_of[id(p)]
        if (
            isinstance(bucket, EncodedBucket)
            and gradient is not None
            and bucket.holds(p, gradient)
            and gradient.any()
        ):
            self._carried[id(p)] = gradient.clone()

    def _set_all_aside(self, parameters: Iterable[nn.Parameter]) -> None:
        """Also where this worker accumulates nothing: all workers must set aside the same."""
        if self._encoder is not None:
            for p in parameters:
                self._set_aside(p)

    def _ready(self, parameter: Tensor) -> None:
        if not self._in_backward:
            self._weight()  # the weight of this pass is settled before any of its gradients counts
        self._observer.computing()
        self.unreduced = True  # until the round succeeds
        if not self.active:
            return
        self._refuse(parameter)
        if not self._in_backward:
            self._begin()
        bucket = self._bucket_of[id(parameter)]
        if id(parameter) in self._reported:
            self._refuse_parts(parameter, bucket)
            return
        self._reported.add(id(parameter))
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._send()

    def _begin(self) -> None:
        if self._receiver is not None:
            self._receiver.settle()
        self.refresh()
        if self._encoder is not None and self._group.changes is not None:
            self._encoder.states.keep()
        self._reported.clear()
        self._in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._next == len(self._buckets):
            self._observer.arrived()
        if isinstance(bucket, EncodedBucket):
            self._set_all_aside(bucket.parameters)
            ids = [id(p) for p in bucket.parameters]
            bucket.carried = {key: self._carried.pop(key) for key in ids if key in self._carried}
        if self._inspector is not None:
            self._inspector.sending(bucket)
        if self._packed_in != self._changes_so_far:
            return  # its buffers are those of lost members too: all are sent when backward ends
        bucket.send(self._weight(), -self._next)

    def _finish(self) -> None:
        """Backward is over: send the remaining buckets, wait for all, assign the results."""
        try:
            while self._next < len(self._buckets):
                self._send()
            self.rounds += 1
            if self._receiver is not None:
                self._receiver.take(self, self._buckets)
            else:
                landed = self._landed()
                for bucket in landed:
                    for p, gradient in bucket:
                        if gradient is not None:
                            p.grad = gradient
                self._reset()
            self._observer.reduced(sum(bucket.sent_bytes() for bucket in self._buckets))
            self.unreduced = False
        except BaseException:
            self._reset()
            raise
        finally:
            self._in_backward = False
            self._next = 0

    def _landed(self) -> list[Landed]:
        """Wait for all buckets, and repeat the round where that is needed."""
        if self._group.changes is not None:
            return self._landed_without_lost(self._group.changes)
        return self._receive_all() if self._inspector is None else self._inspected()

    def _landed_without_lost(self, changes: GroupChanges) -> list[Landed]:
        """The round of the members that are there: sent again if others were lost before it was complete.

        A member may be interrupted after others have gone on. Small sums are kept for it: copies, because
        the script may change its gradients in place. Larger ones count once all members confirm that they
        have them, so that nobody needs another's. So do encoded ones: states of codecs change with a round.
        """
        small = self._encoder is None and sum(one.size_bytes for one in self._buckets) <= _COPIED_BYTES
        found, landed = changes.begin(), None
        unfit: Sequence[int] = ()
        received: list[Landed] | None = None
        refused: GradientError | None = None
        while found is None and landed is None:
            try:
                if self._packed_in != changes.number or changes.outdated():
                    self._send_again()
                try:
                    received, refused = self._receive_all(), None
                except GradientError as error:  # on all alike: it is raised once all have confirmed it
                    received, refused = [], error
                if self._encoder is None:
                    unfit = find_unfit(self._group.current, changes.members, self._buckets)
                if unfit:
                    received = self._sum_without(unfit, changes)
                if not small:
                    self._group.current.barrier()
                landed = received
            except (*LOST, MismatchedCalls) as error:
                loss = changes.loss(error)
                if loss is None:
                    raise
                found = changes.recover(loss)
        if found is not None and small:
            for bucket, sums in zip(self._buckets, found[:-1], strict=True):
                bucket.sums().copy_(sums)
            unfit = [int(slot) for slot in found[-1]]
            landed = [bucket.landed() for bucket in self._buckets]
        elif found is not None:
            landed = received  # all have confirmed
        assert landed is not None
        told = torch.tensor(list(unfit), dtype=torch.int64)
        changes.complete([*self._kept_sums(), told] if small else [], full=True)
        changes.reduced(anew=found is None, refused=unfit)
        if refused is not None:
            raise refused
        return landed

    def _sum_without(self, unfit: Sequence[int], changes: GroupChanges) -> list[Landed]:
        """The round without these members' gradients; their own stay as they are."""
        send_without(self._group.current, self._buckets, self._weight(), is_unfit=changes.slot in unfit)
        return self._receive_all()

    def _kept_sums(self) -> list[Tensor]:
        """Copies of the sums, in the memory of the last round's, which nobody needs any more."""
        sums = [bucket.sums() for bucket in self._buckets]
        if [kept.shape for kept in self._kept] != [one.shape for one in sums]:
            self._kept = [torch.empty_like(one) for one in sums]
        for kept, one in zip(self._kept, sums, strict=True):
            kept.copy_(one)
        return self._kept

    def _send_again(self) -> None:
        """Send this worker's own gradients, weighted so that the weights of the members sum to one."""
        again = self._packed_in != self._changes_so_far
        for bucket in self._buckets:
            if bucket.future is not None and not again:
                bucket.future.wait()  # sent with another weight, and still in flight
        if self._encoder is not None:
            self._take_back(self._encoder, again=again)
        weight = self._weight()
        total = torch.tensor([weight], dtype=torch.float64)
        self._group.current.all_reduce(total).wait()
        if again:
            self._pack()
        for index, bucket in enumerate(self._buckets):
            bucket.reset()
            bucket.send(weight / float(total), -index - 1)

    def _take_back(self, encoder: ModelEncoder, *, again: bool) -> None:
        """Undo what encoding has changed. With `again` the exchanges have failed, or soon will."""
        for bucket in self._buckets:
            if bucket.future is not None and again:
                with contextlib.suppress(Exception):  # it has been told, or is about to be
                    bucket.future.wait()
        encoder.states.go_back()
        if again:
            encoder.renew(self._group.current)

    def _inspected(self) -> list[Landed]:
        """Wait for all buckets, and let the inspector look; all workers repeat the round if it says so."""
        assert self._inspector is not None
        self._inspector.sent(self)
        landed = self._receive_all()
        while self._inspector.landed(self):
            for index, bucket in enumerate(self._buckets):
                bucket.reset()
                bucket.send(self._weight(), -index - 1)
            self._inspector.sent(self)
            landed = self._receive_all()
        return landed

    def _receive_all(self) -> list[Landed]:
        """Wait for all buckets, also if a gradient is not finite: training may go on after that."""
        landed: list[Landed] = []
        refused: GradientError | None = None
        for bucket in self._buckets:
            try:
                landed.append(self.receive(bucket))
            except GradientError as error:
                refused = refused or error
        if refused is not None:
            raise refused
        return landed

    def _reset(self) -> None:
        for bucket in self._buckets:
            bucket.reset()

    def receive(self, bucket: Bucket) -> Landed:
        """Wait for one bucket and report it."""
        assert bucket.future is not None
        waiting = time.perf_counter()
        try:
            bucket.future.wait()
        except GradientError:
            bucket.reset()  # training may go on
            raise
        wait_s = time.perf_counter() - waiting
        if self._receiver is not None:
            self._observer.waited(wait_s)
        timing = bucket.future.timing
        landed = bucket.landed()
        self._just_landed.update(id(p) for p in bucket.parameters)
        self._observer.bucket(
            BucketTimes(
                index=self._buckets.index(bucket),
                size_bytes=bucket.size_bytes,
                sent_bytes=bucket.sent_bytes(),
                filled_at=bucket.filled_at,
                encode_s=bucket.encode_s,
                begun=timing.begun,
                sent=timing.sent,
                ended=timing.ended,
                adding_s=timing.adding_s,
                wait_s=wait_s,
                how=bucket.how,
                coded_bytes=bucket.coded_bytes,
            )
        )
        return landed

    def _refuse(self, parameter: Tensor) -> None:
        """Raise ModelError for a gradient that cannot be reduced."""
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ModelError(
                f"parameter {self._name(parameter)} has a sparse gradient, which cannot be reduced yet",
                fix="build the embedding with sparse=False",
            )
        if gradient is not None and gradient.requires_grad:
            raise ModelError(
                f"the gradient of parameter {self._name(parameter)} has a graph of its own, "
                "which ends at this worker",
                where="backward(create_graph=True)",
                fix="use torch.autograd.grad(..., create_graph=True) for the inner gradient",
            )

    def _refuse_parts(self, parameter: Tensor, bucket: Bucket) -> None:
        """Reentrant checkpoints may compute a gradient in parts, but not after it was sent."""
        if bucket.future is not None:
            raise ModelError(
                f"the gradient of parameter {self._name(parameter)} was computed in two parts, "
                "the second after the first was sent",
                where="torch.utils.checkpoint with use_reentrant=True",
                fix="use use_reentrant=False",
            )

    def _name(self, parameter: Tensor) -> str:
        return next((name for name, p in self._named if p is parameter), "?")


def _signature(p: nn.Parameter) -> Hashable:
    return p.requires_grad, p.dtype, p.device, p.shape


def _item(p: nn.Parameter) -> Item:
    return Item(size_bytes=p.numel() * p.element_size(), kind=(p.dtype, p.device))
