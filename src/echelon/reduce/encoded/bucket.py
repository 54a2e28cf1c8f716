"""A bucket whose gradients are sent encoded: between all workers, or between sites only.

The trainer's thread copies gradients into the bucket and goes on; the codec thread encodes, exchanges and
decodes them. The part of a gradient that was reduced before this pass is set aside: encoding it again would
lose precision again.

Between sites, the bucket is laid out by rails: [rail 0's ranges of all parameters | flags] [rail 1's ...],
so that a reduce-scatter inside the site gives each rail the site's sum of its ranges, and the site's flags.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from echelon.codec.codec import Codec
from echelon.comm.future import Future, Timing
from echelon.comm.group import blocks
from echelon.errors import GradientError
from echelon.reduce.bucket import Bucket, Landed
from echelon.reduce.encoded import rounds
from echelon.reduce.encoded.rounds import EncodedRound, LoadedRange, NonFinite, ParameterRange
from echelon.reduce.encoded.route import Route, Site
from echelon.reduce.encoded.states import States
from echelon.reduce.encoded.thread import CodecThread, Steps

Named = tuple[str, nn.Parameter]


class EncodedBucket(Bucket):
    """Gradients of float32 parameters on the CPU, encoded."""

    def __init__(
        self,
        parameters: Sequence[Named],
        codec: Codec,
        states: States,
        route: Route,
        thread: CodecThread,
        *,
        rank: int,
        names: Mapping[int, str],
    ) -> None:
        super().__init__([p for _, p in parameters], len(parameters))
        self.how = codec.name if route.inside is None else f"between({codec.name})"
        self.carried: Mapping[int, Tensor] = {}  # by id: gradients' reduced parts, from before this pass
        self._names = [name for name, _ in parameters]
        self._codec = codec
        self._states = states
        self._route = route
        self._thread = thread
        self._rank = rank
        self._worker_names = names
        self._progress = route.anyone.progress
        self._accumulated: frozenset[int] = frozenset()
        self._rounds = 0
        self._buffer = torch.zeros(sum(p.numel() for p in self.parameters), dtype=torch.float32)
        self._flats = list(torch.split(self._buffer, [p.numel() for p in self.parameters]))
        self._views = [flat.view(p.shape) for flat, p in zip(self._flats, self.parameters, strict=True)]
        self._pieces = [
            ParameterRange(index, name, tuple(p.shape), p.numel(), 0, p.numel())
            for index, (name, p) in enumerate(parameters)
        ]
        self._used: list[bool] = []
        self._non_finite: NonFinite | None = None
        self._sent_bytes = self._sending_bytes = 0
        self._timing = Timing()

    @property
    def size_bytes(self) -> int:
        """The unencoded gradients."""
        return self._buffer.numel() * self._buffer.element_size()

    def sent_bytes(self) -> int:
        """The bytes that this worker sent in the last complete round."""
        return self._sent_bytes

    def memory(self) -> list[Tensor]:
        """The bucket's views."""
        return self._views

    def holds(self, p: nn.Parameter, gradient: Tensor) -> bool:
        """Whether a parameter's gradient is this bucket's memory."""
        index = next(index for index, own in enumerate(self.parameters) if own is p)
        return gradient.data_ptr() == self._flats[index].data_ptr()

    def landed(self) -> Landed:
        """The bucket's views. One that no worker used may still hold residuals."""
        out: Landed = []
        for index, p in enumerate(self.parameters):
            before = self.carried.get(id(p))
            if before is not None:
                self._views[index].add_(before)
            some = self._used[index] or before is not None or bool(self._flats[index].any())
            out.append((p, self._views[index] if some else None))
        self.carried = {}
        return out

    def _fill(self, weight: float) -> None:
        used = []
        for p, view in zip(self.parameters, self._views, strict=True):
            before = self.carried.get(id(p))
            if p.grad is None:
                view.zero_()
            elif before is None:
                torch.mul(p.grad, weight, out=view)
            else:
                torch.sub(p.grad, before, out=view).mul_(weight)
            used.append(p.grad is not None)
        self._used = used

    def _start(self, priority: int) -> Future[Tensor]:
        self._sending_bytes = 0
        self._timing = Timing()
        added_to = [index for index, p in enumerate(self.parameters) if id(p) in self.carried]
        self._accumulated = frozenset(added_to)
        ended = self._thread.submit(self._steps(priority), self._progress, self._timing)
        return ended.then(lambda _: self._buffer)

    # In the codec thread -------------------------------------------------------------------------

    def _steps(self, priority: int) -> Steps:
        begun = time.perf_counter()
        self._non_finite = self._find_non_finite()
        inside = self._route.inside
        if inside is None:
            held = [LoadedRange(piece, flat) for piece, flat in zip(self._pieces, self._flats, strict=True)]
            work = self._round(held, priority)
            work.encode_s = time.perf_counter() - begun
            yield from rounds.steps(work)
            self._read_results(work)
        else:
            yield from self._between_sites(inside, priority, begun)
        self._sent_bytes = self._sending_bytes
        self._rounds += 1
        if self._non_finite is not None:
            raise self._not_finite(self._non_finite)

    def _find_non_finite(self) -> NonFinite | None:
        """This worker's gradient that is not finite, if any."""
        if not self._buffer.numel() or all(torch.isfinite(end) for end in torch.aminmax(self._buffer)):
            return None
        bad = next(index for index, flat in enumerate(self._flats) if not torch.isfinite(flat).all())
        return NonFinite(self._rank, bad)

    def _round(self, held: Sequence[LoadedRange], priority: int) -> EncodedRound:
        return EncodedRound(
            codec=self._codec,
            states=self._states,
            lanes=self._route.between,
            held=held,
            used=self._used,
            non_finite=self._non_finite,
            priority=priority,
            timing=self._timing,
            accumulated=self._accumulated,
            names=self._worker_names,
        )

    def _read_results(self, work: EncodedRound) -> None:
        self._used, self._non_finite = work.used, work.non_finite
        self._sending_bytes += work.sent_bytes
        self.coded_bytes = work.sent_bytes
        self.encode_s += work.encode_s

    def _between_sites(self, inside: Site, priority: int, begun: float) -> Steps:
        rails = [self._rail(rail, inside.rails) for rail in range(inside.rails)]
        tail = len(self.parameters) + 2 * inside.size
        lengths = [sum(piece.size for piece in rail) + tail for rail in rails]
        lengths += [0] * (inside.size - inside.rails)
        flat = torch.zeros(sum(lengths), dtype=torch.float32)
        for block, rail in zip(blocks(flat, lengths), rails, strict=False):
            if self._non_finite is None:
                self._copy(block, rail, to_block=True)
            flags = block[block.numel() - tail :]
            flags[: len(self._used)] = torch.tensor(self._used, dtype=torch.float32)
            at = len(self._used) + 2 * inside.position
            flags[at : at + 2] = rounds.to_numbers(self._non_finite)
        self.encode_s += time.perf_counter() - begun
        future = inside.down.reduce_scatter(flat, lengths)
        yield future
        future.wait()
        self._sending_bytes += 4 * (sum(lengths) - lengths[inside.position])
        mine = blocks(flat, lengths)[inside.position]
        if inside.position < inside.rails:
            flags = mine[mine.numel() - tail :]
            self._used = [bool(flag) for flag in flags[: len(self._used)]]
            rail = rails[inside.position]
            values = torch.split(mine[: mine.numel() - tail], [piece.size for piece in rail])
            held = [LoadedRange(p, v) for p, v in zip(rail, values, strict=True)]
            self._non_finite = rounds.from_numbers(flags[len(self._used) :]) or self._overflow(held)
            work = self._round(held, priority)
            yield from rounds.steps(work)
            self._read_results(work)
            flags.zero_()
            flags[: len(self._used)] = torch.tensor(self._used, dtype=torch.float32)
            flags[len(self._used) : len(self._used) + 2] = rounds.to_numbers(self._non_finite)
        future = inside.up.all_gather_unequal(flat, lengths, priority=priority)
        yield future
        future.wait()
        self._sending_bytes += 4 * lengths[inside.position] * (inside.size - 1)
        reports = []
        for block, rail in zip(blocks(flat, lengths), rails, strict=False):
            flags = block[block.numel() - tail :]
            self._used = [bool(flag) for flag in flags[: len(self._used)]]
            reports.append(flags[len(self._used) : len(self._used) + 2])
            self._copy(block, rail, to_block=False)
        self._non_finite = rounds.from_numbers(torch.cat(reports))
        self._timing.ended = time.perf_counter()

    def _overflow(self, held: Sequence[LoadedRange]) -> NonFinite | None:
        """The first sum of a site's finite gradients that is not finite, if any."""
        bad = (one.piece.index for one in held if not torch.isfinite(one.values).all())
        found = next(bad, None)
        return None if found is None else NonFinite(self._rank, found)

    def _rail(self, rail: int, rails: int) -> list[ParameterRange]:
        """The ranges of all parameters that belong to one rail of every site."""
        return [share for piece in self._pieces if (share := piece.shares(rails)[rail]).size]

    def _copy(self, block: Tensor, rail: Sequence[ParameterRange], *, to_block: bool) -> None:
        at = 0
        for piece in rail:
            there = block[at : at + piece.size]
            here = self._flats[piece.index][piece.start : piece.stop]
            if to_block:
                there.copy_(here)
            else:
                here.copy_(there)
            at += piece.size

    def _not_finite(self, found: NonFinite) -> GradientError:
        name = self._names[found.parameter]
        who = self._worker_names[found.rank]
        return GradientError(
            f"the gradient of {name} on {who} holds NaN or infinity",
            ranks=(found.rank,),
            where=f"codec {self._codec.name}, round {self._rounds}: no worker applies this bucket",
            fix="lower the learning rate, clip gradients, or look for a division by zero in the loss",
        )
