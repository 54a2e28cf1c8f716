"""Combines the encoded gradients of a group in one process, without a network.

This is the reference for the distributed version, and `echelon bench codecs` trains with it. It holds the
states of all workers, for each parameter. Bytes are written and read as between machines, and are counted:

    gather   a worker sends its bytes to all others                          (P-1) payloads
    scatter  a worker sends others their pieces, and all others its total    (P-1) pieces + (P-1) totals
    sum      a ring adds the numbers                                         2 (P-1)/P of them, each round

Sums are float32, in the order of ranks. Empty pieces are not sent. Nothing here reads a clock: a caller
that wants to time encoding passes one in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.codec.codec import Codec, CodecContext, State, Summed, owners, seed_of
from echelon.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch import Tensor

Gradients = Mapping[str, "Tensor"]


class ReferenceGroup:
    """A group of workers with one codec, and the cost of its last exchange.

    `sent_bytes` is by rank. `encode_s` and `decode_s` are averages per worker; 0 without a clock.
    """

    def __init__(self, codec: Codec, workers: int, now: Callable[[], float] | None = None) -> None:
        if workers < 1:
            raise ConfigError(f"{workers} workers", where="ReferenceGroup", fix="give at least 1")
        self.codec = codec
        self.workers = workers
        self.states: list[dict[str, State]] = [{} for _ in range(workers)]
        self.sent_bytes = [0] * workers
        self.encode_s = 0.0
        self.decode_s = 0.0
        self._now = now or (lambda: 0.0)
        self._steps: dict[str, int] = {}

    def combine(self, gradients: Sequence[Gradients]) -> dict[str, Tensor]:
        """The result on all workers: approximately the sum of their gradients, by name."""
        return self.outcomes(gradients)[0]

    def outcomes(self, gradients: Sequence[Gradients]) -> list[dict[str, Tensor]]:
        """Each worker's result, by rank; equal to the bit if the codec fulfils its contract."""
        import torch

        self._check(gradients)
        self.sent_bytes = [0] * self.workers
        self.encode_s = self.decode_s = 0.0
        found: list[dict[str, Tensor]] = [{} for _ in range(self.workers)]
        for name, first in gradients[0].items():
            given = [mine[name].detach().reshape(-1).contiguous() for mine in gradients]
            if first.dtype == torch.float32:
                totals = self._coded(name, tuple(first.shape), given)
            else:
                totals = [self._sum(given)] * self.workers
            for mine, total in zip(found, totals, strict=True):
                mine[name] = total.view(first.shape)
        return found

    def _check(self, gradients: Sequence[Gradients]) -> None:
        if len(gradients) != self.workers:
            raise ModelError(
                f"there are gradients of {len(gradients)} workers, but {self.workers} workers",
                where="ReferenceGroup",
                fix="give the gradients of each worker, by rank",
            )
        wanted = {name: (one.shape, one.dtype) for name, one in gradients[0].items()}
        for rank, mine in enumerate(gradients):
            if {name: (one.shape, one.dtype) for name, one in mine.items()} != wanted:
                raise ModelError(
                    f"the gradients of ranks 0 and {rank} differ in names, shapes or types",
                    where="ReferenceGroup",
                    fix="give the same parameters on all workers",
                )

    def _coded(self, name: str, shape: tuple[int, ...], given: Sequence[Tensor]) -> list[Tensor]:
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        for mine in self.states:
            if name not in mine:
                mine[name] = self.codec.begin(given[0].numel())
        states = [mine[name] for mine in self.states]
        context = CodecContext(step=step, workers=self.workers, seed=seed_of(name), shape=shape)
        contexts = [replace(context, rank=rank) for rank in range(self.workers)]
        if isinstance(self.codec, Summed):
            return self._by_sums(self.codec, given, states, contexts)
        if self.codec.travels == "gather":
            return self._by_gathering(given, states, contexts)
        return self._by_scattering(given, states, contexts)

    def _by_gathering(
        self, given: Sequence[Tensor], states: Sequence[State], contexts: Sequence[CodecContext]
    ) -> list[Tensor]:
        import torch

        payloads = []
        for values, state, context in zip(given, states, contexts, strict=True):
            with self._encoding():
                payloads.append(self.codec.encode(values, state, context))
            self._send(context.rank, payloads[-1], times=self.workers - 1)
        total = torch.zeros_like(given[0])
        # All workers do the same with the same bytes and no state, so it is done once for all.
        with self._decoding(workers=1):
            for payload, context in zip(payloads, contexts, strict=True):
                self.codec.read(payload, total, context, add=True)
        return [total] * self.workers

    def _by_scattering(
        self, given: Sequence[Tensor], states: Sequence[State], contexts: Sequence[CodecContext]
    ) -> list[Tensor]:
        import torch

        length = given[0].numel()
        outs = [torch.empty_like(given[0]) for _ in given]
        for owner, (start, stop) in enumerate(owners(length, self.workers, contexts[0].seed)):
            if start == stop:
                continue
            pieces = [values[start:stop] for values in given]
            parts = []
            for rank, context in enumerate(contexts):
                if rank != owner:
                    with self._encoding():
                        state = part_of(states[rank], length, start, stop)
                        parts.append(self.codec.encode(pieces[rank], state, replace(context, start=start)))
                    self._send(rank, parts[-1])
            context = replace(contexts[owner], start=start)
            with self._encoding():
                state = part_of(states[owner], length, start, stop)
                total = self.codec.merge(parts, pieces[owner], state, context)
            self._send(owner, total, times=self.workers - 1)
            for out, mine in zip(outs, states, strict=True):
                with self._decoding():
                    self.codec.read_total(total, out[start:stop], mine, context)
        for mine, context in zip(states, contexts, strict=True):
            with self._decoding():
                self.codec.settle(mine, context)
        return outs

    def _by_sums(
        self,
        codec: Summed,
        given: Sequence[Tensor],
        states: Sequence[State],
        contexts: Sequence[CodecContext],
    ) -> list[Tensor]:
        import torch

        numbers = []
        for values, state, context in zip(given, states, contexts, strict=True):
            with self._encoding():
                numbers.append(codec.first(values, state, context))
        total = self._sum(numbers)
        for _ in range(codec.rounds - 1):
            numbers = []
            for state, context in zip(states, contexts, strict=True):
                with self._encoding():
                    # Each gets a copy, as between machines: a codec may change its input.
                    numbers.append(codec.further(total.clone(), state, context))
            total = self._sum(numbers)
        outs = []
        for state, context in zip(states, contexts, strict=True):
            outs.append(torch.empty_like(given[0]))
            with self._decoding():
                codec.finish(total.clone(), outs[-1], state, context)
        return outs

    def _sum(self, numbers: Sequence[Tensor]) -> Tensor:
        """The sum in the order of ranks; counts the bytes of a ring."""
        total = numbers[0].clone()
        for other in numbers[1:]:
            total += other
        for rank in range(self.workers):
            self.sent_bytes[rank] += ring_bytes(_size_bytes(total), self.workers)
        return total

    def _send(self, rank: int, payload: Tensor, *, times: int = 1) -> None:
        self.sent_bytes[rank] += times * _size_bytes(payload)

    @contextmanager
    def _encoding(self) -> Iterator[None]:
        begun = self._now()
        yield
        self.encode_s += (self._now() - begun) / self.workers

    @contextmanager
    def _decoding(self, workers: int | None = None) -> Iterator[None]:
        begun = self._now()
        yield
        self.decode_s += (self._now() - begun) / (workers or self.workers)


def part_of(state: State, length: int, start: int, stop: int) -> State:
    """A piece's part of a parameter's state: views, so that changes are made in place.

    Only float32 tensors of the parameter's length are cut; a counter of that length is not, because it is
    not float32.
    """
    import torch

    return {
        name: one[start:stop] if one.dtype == torch.float32 and one.shape == (length,) else one
        for name, one in state.items()
    }


def ring_bytes(size_bytes: int, workers: int) -> int:
    """The bytes that a worker sends when a ring adds up numbers of that size."""
    return round(2 * (workers - 1) * size_bytes / workers)


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
