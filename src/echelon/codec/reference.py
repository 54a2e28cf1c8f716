"""What do workers end with when they give each other coded gradients? In one memory, without a network.

This is the reference for the real thing, and what `echelon bench codecs` trains with. It holds the states
of all workers, for each parameter. Bytes are written and read as between machines, and are counted:

    gather   a worker sends its bytes to all others                          (P-1) payloads
    scatter  a worker sends others their pieces, and all others its total    (P-1) pieces + (P-1) totals
    sum      numbers are added by a ring                                     2 (P-1)/P of them, each round

Sums are float32, in the order of ranks. Empty pieces do not travel. Nothing here looks at a clock: whoever
wants to know how long coding takes brings one.
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
    """A group of workers with one codec, and what its last exchange took.

    `sent_bytes` is by rank. `encode_s` and `decode_s` are a worker's, on average; 0 without a clock.
    """

    def __init__(self, codec: Codec, workers: int, now: Callable[[], float] | None = None) -> None:
        if workers < 1:
            raise ConfigError(f"{workers} workers", where="together", fix="give at least 1")
        self.codec = codec
        self.workers = workers
        self.states: list[dict[str, State]] = [{} for _ in range(workers)]
        self.sent_bytes = [0] * workers
        self.encode_s = 0.0
        self.decode_s = 0.0
        self._now = now or (lambda: 0.0)
        self._steps: dict[str, int] = {}

    def combine(self, gradients: Sequence[Gradients]) -> dict[str, Tensor]:
        """What all workers end with: nearly the sum of their gradients, by name, in the same shapes."""
        return self.outcomes(gradients)[0]

    def outcomes(self, gradients: Sequence[Gradients]) -> list[dict[str, Tensor]]:
        """What each worker ends with, by rank; they are the same to the bit if the codec keeps its word."""
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
                f"there are gradients of {len(gradients)} workers, and {self.workers} workers",
                where="together",
                fix="give those of each worker, by rank",
            )
        wanted = {name: (one.shape, one.dtype) for name, one in gradients[0].items()}
        for rank, mine in enumerate(gradients):
            if {name: (one.shape, one.dtype) for name, one in mine.items()} != wanted:
                raise ModelError(
                    f"the gradients of ranks 0 and {rank} differ in names, shapes or types",
                    where="together",
                    fix="give the same parameters on all workers",
                )

    def _coded(self, name: str, shape: tuple[int, ...], given: Sequence[Tensor]) -> list[Tensor]:
        step = self._steps.get(name, 0)
        self._steps[name] = step + 1
        for mine in self.states:
            if name not in mine:
                mine[name] = self.codec.begin(given[0].numel())
        states = [mine[name] for mine in self.states]
        turn = CodecContext(step=step, workers=self.workers, seed=seed_of(name), shape=shape)
        turns = [replace(turn, rank=rank) for rank in range(self.workers)]
        if isinstance(self.codec, Summed):
            return self._by_sums(self.codec, given, states, turns)
        if self.codec.travels == "gather":
            return self._by_gathering(given, states, turns)
        return self._by_scattering(given, states, turns)

    def _by_gathering(
        self, given: Sequence[Tensor], states: Sequence[State], turns: Sequence[CodecContext]
    ) -> list[Tensor]:
        import torch

        payloads = []
        for values, state, turn in zip(given, states, turns, strict=True):
            with self._encoding():
                payloads.append(self.codec.encode(values, state, turn))
            self._send(turn.rank, payloads[-1], times=self.workers - 1)
        total = torch.zeros_like(given[0])
        # All do the same with the same bytes and no state of their own, so it is done once for all.
        with self._decoding(workers=1):
            for payload, turn in zip(payloads, turns, strict=True):
                self.codec.read(payload, total, turn, add=True)
        return [total] * self.workers

    def _by_scattering(
        self, given: Sequence[Tensor], states: Sequence[State], turns: Sequence[CodecContext]
    ) -> list[Tensor]:
        import torch

        length = given[0].numel()
        outs = [torch.empty_like(given[0]) for _ in given]
        for owner, (start, stop) in enumerate(owners(length, self.workers, turns[0].seed)):
            if start == stop:
                continue
            pieces = [values[start:stop] for values in given]
            parts = []
            for rank, turn in enumerate(turns):
                if rank != owner:
                    with self._encoding():
                        state = part_of(states[rank], length, start, stop)
                        parts.append(self.codec.encode(pieces[rank], state, replace(turn, start=start)))
                    self._send(rank, parts[-1])
            turn = replace(turns[owner], start=start)
            with self._encoding():
                state = part_of(states[owner], length, start, stop)
                total = self.codec.merge(parts, pieces[owner], state, turn)
            self._send(owner, total, times=self.workers - 1)
            for out, mine in zip(outs, states, strict=True):
                with self._decoding():
                    self.codec.read_total(total, out[start:stop], mine, turn)
        for mine, turn in zip(states, turns, strict=True):
            with self._decoding():
                self.codec.settle(mine, turn)
        return outs

    def _by_sums(
        self, codec: Summed, given: Sequence[Tensor], states: Sequence[State], turns: Sequence[CodecContext]
    ) -> list[Tensor]:
        import torch

        numbers = []
        for values, state, turn in zip(given, states, turns, strict=True):
            with self._encoding():
                numbers.append(codec.first(values, state, turn))
        total = self._sum(numbers)
        for _ in range(codec.rounds - 1):
            numbers = []
            for state, turn in zip(states, turns, strict=True):
                with self._encoding():
                    # Each its own copy, as between machines: a codec may work in what it is given.
                    numbers.append(codec.further(total.clone(), state, turn))
            total = self._sum(numbers)
        outs = []
        for state, turn in zip(states, turns, strict=True):
            outs.append(torch.empty_like(given[0]))
            with self._decoding():
                codec.finish(total.clone(), outs[-1], state, turn)
        return outs

    def _sum(self, numbers: Sequence[Tensor]) -> Tensor:
        """The sum in the order of ranks, as a ring would have added it."""
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
    """A piece's part of the state of a parameter of so many elements: views, so it is changed in place.

    What is kept for each element is float32. A count is not, so it is not cut where a parameter happens to
    have as many elements as there are counts.
    """
    import torch

    return {
        name: one[start:stop] if one.dtype == torch.float32 and one.shape == (length,) else one
        for name, one in state.items()
    }


def ring_bytes(size_bytes: int, workers: int) -> int:
    """What a worker sends when a ring adds up so many bytes of numbers."""
    return round(2 * (workers - 1) * size_bytes / workers)


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
