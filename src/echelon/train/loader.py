"""A loader that draws this worker's share of every global batch.

The order of samples depends on the seed and the number of the pass, never on the number of workers, so
adding workers does not change the training. Every sample is drawn exactly once per pass. A pass can resume
in the middle: its position counts samples of the whole order.

    the loader was built with   the order is
    shuffle=False               the data set's
    shuffle=True                a permutation drawn from seed, loader and pass
    a RandomSampler             independent draws, or permutations, drawn from seed, loader and pass
    a sampler, a batch sampler  drawn by the leader's sampler and sent to all workers
    order="near" of loader_of   each worker's rows are near it, see data/near.py
    an iterable data set        the stream's; each worker reads all of it and keeps its own part of every
                                batch, so the stream must be the same on all workers
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, Protocol

import msgspec
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
)

from echelon.comm.group import Group
from echelon.data.dataset import ChunkDataset, NearSampler
from echelon.data.missing import meet
from echelon.data.near import Placement, near_order
from echelon.errors import ConfigError, DataError
from echelon.plan.shares import BatchSizes, ShareTable, Slice, batch_sizes, slice_of, split
from echelon.train.clock import StepClock
from echelon.train.left_loop import when_unwound
from echelon.train.loader_rules import check_enough, draws_itself, generator_of, refuse, stable_seed
from echelon.train.order import (
    LONGEST_LIST,
    Permutation,
    merge_small,
    random_draws,
    told_batches,
    told_list,
)
from echelon.train.to_device import to_device

BatchMeaning = Literal["global", "per-worker"]
_log = logging.getLogger(__name__)


class SampleOrder(Protocol):
    """The indices of one pass, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, wanted: slice, /) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How workers share data.

    shares    every worker's part of each batch
    on_begin  called before a pass begins, when its position can still be set
    on_pass   called when a pass begins and when it has ended
    on_ask    called when the loop asks for a batch
    on_batch  called with every batch before the loop gets it: which part it is of, and its data
    on_break  called when the loop is left in the middle
    on_error  called with the exception by which a loop was left, if something else catches it; with None
              when a pass begins
    claim     adds to a counter that all workers share, if they claim parts of batches as they need them
    copies    how many workers have the same samples: ranks s, s + shards, s + 2 shards and so on
    slots     into how many parts a batch is claimed, and which part of them is this worker's
    slot      where workers may be lost: which of all workers this one is, in the order of their starts
    is_out    where workers may be lost: whether this one is left out for a while, and goes through the pass
              again and again
    on_drained  where workers may be lost: called when a pass has no batches left; returns the positions
                that are to be drawn again, since those who drew them were lost
    owed        and these positions until then, by the index of a loader
    """

    group: Group
    shares: ShareTable
    seed: int
    clock: StepClock
    device: torch.device
    on_pass: Callable[[SharedLoader], None]
    on_batch: Callable[[SharedLoader, Slice, Any], None]
    on_begin: Callable[[], None] = lambda: None
    on_ask: Callable[[SharedLoader], None] = lambda loader: None
    on_break: Callable[[], None] = lambda: None
    on_error: Callable[[BaseException | None], None] = lambda error: None
    claim: Callable[[str, int], int] | None = None
    slots: tuple[int, Callable[[int], int]] | None = None
    copies: int = 1
    slot: int | None = None
    is_out: Callable[[], bool] = lambda: False
    on_drained: Callable[[SharedLoader], list[int]] | None = None
    owed: Callable[[int], list[int]] | None = None

    @property
    def shards(self) -> int:
        """Into how many parts a batch is cut; the same after a loss, until members change between steps."""
        return self.group.size // self.copies if self.slot is None else self.shares.workers

    @property
    def shard(self) -> int:
        """Which of them is this worker's."""
        return self.slot if self.slot is not None else self.group.rank % self.shards


class _Batches:
    """A batch sampler that yields this worker's indices of the current pass, drawn when they are needed."""

    def __init__(self) -> None:
        self.drawing: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.drawing


class SharedLoader(DataLoader[Any]):
    """Stands in for a DataLoader that was prepared: draws this worker's share of every batch.

    Attributes that it does not define itself are those of the script's own DataLoader.
    """

    def __init__(
        self, loader: DataLoader[Any], index: int, sharing: Sharing, meaning: BatchMeaning
    ) -> None:
        # Not DataLoader's own __init__: the drawing is done by `_inner`, which is built below.
        self.dataset = loader.dataset
        self._given = loader
        self._index = index
        self._sharing = sharing
        self._batch_sampler: Any = loader.batch_sampler
        self._sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._collate: Any = loader.collate_fn
        self.streams = isinstance(loader.dataset, IterableDataset)
        self._own_batches = not self.streams and type(loader.batch_sampler) is not BatchSampler
        refuse(loader, self._sampler, self.streams)
        self.drop_last = bool(getattr(self._batch_sampler, "drop_last", False))
        size = 0 if self._own_batches else int(getattr(self._batch_sampler, "batch_size", 0))
        self.global_batch_size = size * sharing.shards if meaning == "per-worker" else size
        self._by_batches = self._own_batches or (not self.streams and not self._has_list())
        self._batches = _Batches()
        self._seeds = torch.Generator()
        self._inner = self._rebuild(loader)
        self.pass_index = -1
        self.position = 0
        self.finished = True
        self.trains = False
        self.draws_to_train = False
        self.batches_drawn = 0  # in all passes; the loop may not have them yet
        self.batches_handed = 0
        self.share_drawn = 0  # samples of this worker in the current pass, or in the last one
        self._resuming = False
        self._changed = False  # workers were lost: what was loaded ahead is cut for them, too
        self._again: list[int] = []  # positions of this pass whose holders were lost
        self._owed: list[int] = []  # the same, of the run that the checkpoint was written in
        self._is_drained = False  # all others of this pass were drawn
        self._drawn: list[Any] | None = None
        self._claimed_to: Callable[[], int] | None = None
        self._restored = 0
        self._generator = generator_of(self._batch_sampler, self._sampler)
        self._generator_began: Tensor | None = None
        self._check()
        if isinstance(self.dataset, ChunkDataset):
            keep_files = loader.num_workers > 0
            meet(self.dataset, sharing.group, self._chunks_needed, keep_files=keep_files)

    def __getattr__(self, name: str) -> Any:
        if name == "batch_size":  # only reached if the property has raised
            raise AttributeError("a loader with a batch sampler of its own has no single batch size")
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._given, name)

    @property
    def index(self) -> int:
        """Which of the prepared loaders it is, from 0."""
        return self._index

    @property
    def given(self) -> DataLoader[Any]:
        """The script's own loader."""
        return self._given

    @property
    def inner(self) -> DataLoader[Any]:
        """The loader that draws this worker's samples."""
        return self._inner

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """This worker's share of a full batch."""
        if self._own_batches:
            raise AttributeError("batch_size")
        weights = self._sharing.shares.now
        living = [at for at, weight in enumerate(weights) if weight]
        shares = split(self.global_batch_size, [weights[at] for at in living])
        shard = self._sharing.shard  # of one that is about to join it is no member's yet
        return shares[living.index(shard) if shard in living else -1]

    def _has_list(self) -> bool:
        """Whether the order can be looked up at any position; otherwise it is drawn batch by batch."""
        if draws_itself(self._sampler):
            return True
        return hasattr(self._sampler, "__len__") and len(self._sampler) <= LONGEST_LIST

    def _rebuild(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        options: dict[str, Any] = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory,
            "timeout": loader.timeout,
            "worker_init_fn": loader.worker_init_fn,
            "generator": self._seeds,
        }
        if loader.num_workers:
            options["multiprocessing_context"] = loader.multiprocessing_context
            options["prefetch_factor"] = loader.prefetch_factor
            options["persistent_workers"] = loader.persistent_workers
        if self.streams:
            return DataLoader(
                self.dataset,
                batch_size=self.global_batch_size,
                drop_last=self.drop_last,
                collate_fn=_as_list,
                **options,
            )
        return DataLoader(
            self.dataset,
            batch_sampler=self._batches,
            collate_fn=self._collate,
            **options,
        )

    def _check(self) -> None:
        workers = self._sharing.shards
        if self._sharing.slot is not None and (self.streams or self._by_batches):
            raise ConfigError(
                "samples of a stream, or of a batch sampler of its own, cannot be drawn again when their "
                "worker is lost",
                where=f"--min-workers, loader {self._index}",
                fix="leave --min-workers out, or use a data set with a length and a sampler",
            )
        if self._own_batches:
            return
        split(self.global_batch_size, [weight for weight in self._sharing.shares.weights if weight])
        if self.streams:
            return
        if not hasattr(self._sampler, "__len__"):
            return
        samples = len(self._sampler)
        if not batch_sizes(samples, self.global_batch_size, workers, drop_last=self.drop_last):
            raise DataError(
                f"the data set's {samples} samples do not make one batch of {self.global_batch_size}",
                where=f"loader {self._index}",
                fix="use a smaller batch, or drop_last=False",
            )
        if samples < workers:
            raise DataError(
                f"the data set's {samples} samples cannot be shared by {workers} workers",
                where=f"loader {self._index}",
                fix="use fewer workers, or more data",
            )
        if samples < self.global_batch_size and self._sharing.group.rank == 0:
            _log.warning(
                "loader %d: the data set's %d samples are fewer than a batch of %d; each pass is one batch",
                self._index,
                samples,
                self.global_batch_size,
            )

    def __len__(self) -> int:
        if self._own_batches:
            return len(self._batch_sampler)
        if self.streams:
            return len(self._inner)
        return len(self._sizes(len(self._sampler)))

    def _sizes(self, samples: int) -> BatchSizes:
        workers = self._sharing.shards
        return batch_sizes(samples, self.global_batch_size, workers, drop_last=self.drop_last)

    def merged(self) -> int:
        """How many samples of a pass join the batch before, because they are fewer than the workers."""
        if self._own_batches or self.streams or self.drop_last or not hasattr(self._sampler, "__len__"):
            return 0
        sizes = self._sizes(len(self._sampler))
        return max(0, sizes.last - self.global_batch_size)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._sharing.on_begin()
        if not self._resuming:
            self.pass_index += 1
            self.position = 0
            self._drawn = None
            self._owed = []
        self.share_drawn = 0
        if self._sharing.slot is not None:  # what was loaded ahead of a loop that was left counts no more
            self.batches_drawn = self.batches_handed
        self._resuming = self.finished = self._is_drained = False
        self._sharing.on_error(None)
        self._sharing.on_pass(self)
        # Seeds of its own, so that resuming a pass does not change the script's random numbers.
        self._seeds.manual_seed(self._seed_of_pass(f"/{self._sharing.shard}"))
        clock = self._sharing.clock
        parts = self._from_stream() if self.streams else self._from_order()
        counts = not self._claims
        try:
            while True:
                clock.data_asked()
                self._sharing.on_ask(self)
                try:
                    part, data = next(parts)
                except StopIteration:
                    if self._sharing.is_out():
                        self.position, parts = 0, self._from_order()
                        continue
                    self._is_drained = True
                    self._again, self._owed = self._owed, []
                    if self._sharing.on_drained is not None:
                        self._again = sorted([*self._again, *self._sharing.on_drained(self)])
                    if not self._again:
                        break
                    parts, counts = self._draw_again(), False
                    continue
                if counts:
                    self.position += 1 if self._by_batches else part.batch
                self.share_drawn += part.share
                self.batches_handed += 1
                data = to_device(data, self._sharing.device)
                self._sharing.on_batch(self, part, data)
                clock.data_handed(part.share, part.batch)
                yield data
        except GeneratorExit:  # the loop was left: the others must not wait for this worker
            when_unwound(self._sharing.on_error)
            self._sharing.on_break()
            raise
        self.finished = True
        self._sharing.on_pass(self)

    def state(self) -> dict[str, Any]:
        """The position in the data, with the order if a sampler drew it, for a checkpoint."""
        if self._claimed_to is not None and not self.finished:
            self.position = self._claimed_to()
        drawn = None if self.finished or self._drawn is None else msgspec.json.encode(self._drawn)
        generator = self._generator.get_state() if self._generator is not None else None
        if not self.finished and self._generator_began is not None:
            generator = self._generator_began  # a resumed pass draws again from its beginning
        return {
            "pass": self.pass_index,
            "position": self.position,
            "finished": self.finished,
            "trains": self.trains,
            "drawn": drawn,
            "generator": generator,
            "again": [] if self.finished else self._all_owed(),
        }

    def _all_owed(self) -> list[int]:
        """The positions of this pass that are to be drawn again, as their workers were lost."""
        lately = self._sharing.owed(self._index) if self._sharing.owed is not None else []
        return [*self._again, *self._owed, *lately]

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at the position in `state`; a pass that only evaluated starts again."""
        self._restored += 1  # parts that were claimed before can be claimed again
        self.pass_index = state["pass"]
        self.position = state["position"]
        self.finished = state["finished"]
        self.trains = state["trains"]
        self._drawn = msgspec.json.decode(state["drawn"]) if state["drawn"] is not None else None
        self._owed = [int(position) for position in state.get("again", ())]  # older checkpoints have none
        if self._generator is not None and state["generator"] is not None:
            self._generator.set_state(state["generator"])
        if not self.finished and self.trains:
            self._resuming = True
        elif not self.finished:
            self.pass_index -= 1

    def place(self) -> dict[str, Any]:
        """Where this loader is, for a worker that comes back to the run."""
        counts = {"handed": self.batches_handed, "draws_to_train": self.draws_to_train}
        return {**self.state(), **counts, "again": list(self._owed)}

    def go_to(self, place: Mapping[str, Any], *, in_pass: bool) -> None:
        """Go on where another worker's loader is; `in_pass`: in the middle of its pass."""
        self.restore(dict(place))
        self.pass_index, self._resuming = place["pass"], in_pass
        self.batches_handed = self.batches_drawn = place["handed"]
        self.draws_to_train = place["draws_to_train"]

    def moved(self) -> None:
        """`go_to` was called in the middle of a pass, between two batches: go on there."""
        self._resuming, self._changed = False, True

    @property
    def most_workers(self) -> int:
        """How many workers can share every batch of this loader, at most."""
        if isinstance(self._sampler, NearSampler):
            return self._sharing.shards  # the order follows from where workers are
        return min(self.global_batch_size, len(self._sampler))

    @property
    def can_be_cut_anew(self) -> bool:
        """Whether what is left of the pass is enough for any number of workers that can share a batch."""
        left = len(self._sampler) - self.position
        return self.finished or self.drop_last or not left or left >= self.global_batch_size

    @property
    def draws_again(self) -> bool:
        """Whether the pass is at the samples whose holders were lost."""
        return bool(self._again) or self._is_drained

    def _from_order(self) -> Iterator[tuple[Slice, Any]]:
        taken: deque[Slice] = deque()  # parts whose data are being loaded
        if self._claims:
            drawing = self._claim_parts(taken)
        elif self._by_batches:
            drawing = self._cut_batches(taken)
        else:
            drawing = self._cut_order(taken)
        self._batches.drawing = drawing
        self._changed = False
        for data in self._inner:
            yield taken.popleft(), data
            if self._changed:
                break
        self._claimed_to = None
        if self._changed:  # what was loaded ahead was cut for lost workers, too
            self.batches_drawn = self.batches_handed
            yield from self._from_order()

    def changed(self) -> None:
        """Workers were lost: batches that the loop does not have yet are cut anew."""
        self._changed = True

    def _draw_again(self) -> Iterator[tuple[Slice, Any]]:
        """The samples whose holders were lost, shared by the others; if they are few, each has all."""
        order, shares, shard = self._order(), self._sharing.shares, self._sharing.shard
        while self._again:
            batch, self._again = (
                self._again[: self.global_batch_size],
                self._again[self.global_batch_size :],
            )
            living = [bool(weight) for weight in shares.at(self._index, self.batches_drawn)]
            if len(batch) < sum(living):  # each computes all of them, and their mean is the same
                parts = tuple(len(batch) * alive for alive in living)
                part = Slice(0, len(batch), sum(parts), parts)
                own = batch
            else:
                parts = shares.parts(self._index, self.batches_drawn, len(batch))
                start = sum(parts[:shard])
                part = Slice(start, start + parts[shard], len(batch), parts, batch)
                own = batch[part.start : part.stop]
            self.batches_drawn += 1
            self._batches.drawing = iter([[order[at : at + 1][0] for at in own]])
            for data in self._inner:
                yield part, data

    def _cut_order(self, taken: deque[Slice]) -> Iterator[list[int]]:
        order = self._order()
        sizes = self._sizes(len(order) - self.position)
        if sizes:
            check_enough(sizes[len(sizes) - 1], self._sharing.shards)
        begin = self.position
        for index, size in enumerate(sizes):
            part = self._slice(size, begin + sizes.start(index))
            taken.append(part)
            yield list(order[part.start : part.stop])

    def _slice(self, size: int, start: int = 0) -> Slice:
        """This worker's part of the next batch."""
        shard = self._sharing.shard
        part = self._sharing.shares.slice_of(self._index, self.batches_drawn, size, shard, start=start)
        self.batches_drawn += 1
        if self._sharing.slot is not None:
            part = replace(part, positions=range(start, start + size))
        return part

    @property
    def _claims(self) -> bool:
        """Whether workers claim parts of batches as they need them; only shuffled data in equal parts."""
        sampler = self._sampler
        in_order = not sampler.shuffle if isinstance(sampler, NearSampler) else False
        shuffled = type(sampler) is not SequentialSampler and not in_order
        equal = len(set(self._sharing.shares.weights)) == 1
        return self._sharing.claim is not None and shuffled and equal and not self._by_batches

    def _claim_parts(self, taken: deque[Slice]) -> Iterator[list[int]]:
        """Claim the next part whenever this worker needs one; every part is claimed once."""
        sharing = self._sharing
        order, begin, size = self._order(), self.position, sharing.group.size
        sizes = self._sizes(len(order) - begin)
        tickets, part_of = sharing.slots or (size, lambda slot: slot)
        what = f"{self._index}/{self.pass_index}/{begin}/{self._restored}"
        claim = sharing.claim
        assert claim is not None
        self._claimed_to = lambda: begin + sizes.start(min(claim(what, 0) // tickets, len(sizes)))
        while (ticket := claim(what, 1)) < len(sizes) * tickets:
            batch, slot = divmod(ticket, tickets)
            start = begin + sizes.start(batch)
            taken.append(slice_of(sizes[batch], sharing.shares.weights, part_of(slot), start=start))
            yield list(order[taken[-1].start : taken[-1].stop])

    def _cut_batches(self, taken: deque[Slice]) -> Iterator[list[int]]:
        """This worker's shares of the batches that the leader's sampler draws."""
        for batch in islice(self._told_batches(), self.position, None):
            if not self._own_batches:
                check_enough(len(batch), self._sharing.shards)
            part = self._slice(len(batch))
            taken.append(part)
            yield batch[part.start : part.stop]

    def _told_batches(self) -> Iterator[list[int]]:
        sampler = self._batch_sampler
        if self._own_batches and hasattr(sampler, "__len__") and len(sampler) <= LONGEST_LIST:
            return iter(self._told(lambda: [[int(i) for i in batch] for batch in sampler]))
        if not self._own_batches:
            sampler = BatchSampler(self._sampler, self.global_batch_size, self.drop_last)
        if self._generator is not None:
            self._generator_began = self._generator.get_state()
        batches = told_batches(self._sharing.group, lambda: iter(sampler), self.global_batch_size)
        return batches if self._own_batches else merge_small(batches, self._sharing.shards)

    def _order(self) -> SampleOrder:
        """The indices of one whole pass, the same on all workers."""
        sampler = self._sampler
        if type(sampler) is SequentialSampler:
            return range(len(sampler))
        if isinstance(sampler, NearSampler):
            return self._near_order(sampler)
        if not draws_itself(sampler):
            return self._told(lambda: [int(i) for i in sampler])
        if sampler.replacement or sampler._num_samples is not None:
            return random_draws(sampler, self._seed_of_pass)
        generator = torch.Generator().manual_seed(self._seed_of_pass())
        return Permutation(torch.randperm(len(sampler), generator=generator))

    def _near(self, dataset: ChunkDataset) -> list[Any]:
        """All that the order of near rows depends on, besides the seed."""
        return [
            [chunk.rows for chunk in dataset.catalogue.chunks],
            list(dataset.chunk_hosts),
            list(dataset.hosts),
            list(self._sharing.shares.weights),
            self.global_batch_size,
        ]

    def _placement(self, near: Sequence[Any]) -> Placement:
        chunk_rows, chunk_hosts, hosts, weights, batch = near
        return Placement(
            chunk_rows=chunk_rows,
            chunk_hosts=chunk_hosts,
            worker_hosts=hosts,
            weights=weights,
            sizes=batch_sizes(sum(chunk_rows), batch, len(hosts), drop_last=self.drop_last),
        )

    def _chunks_needed(self, dataset: ChunkDataset) -> Sequence[set[int]]:
        """The chunks that each worker needs. Who claims parts may get any rows."""
        if not isinstance(self._sampler, NearSampler) or self._claims:
            return [set(range(len(dataset.catalogue.chunks)))] * len(dataset.hosts)
        return self._placement(self._near(dataset)).needed()

    def _near_order(self, sampler: NearSampler) -> SampleOrder:
        """Drawn by each worker alike. A resumed pass keeps its order, whoever the workers are now."""
        if self._drawn is None:
            self._drawn = self._near(sampler.dataset)
        placement = self._placement(self._drawn)
        return Permutation(near_order(placement, seed=self._seed_of_pass(), shuffle=sampler.shuffle))

    def _told(self, draw: Callable[[], list[Any]]) -> list[Any]:
        """What the leader draws for this pass; a resumed pass keeps what was drawn when it began."""
        if self._drawn is None:
            self._drawn = told_list(self._sharing.group, draw)
        return self._drawn

    def _seed_of_pass(self, suffix: str = "") -> int:
        return stable_seed(f"{self._sharing.seed}/{self._index}/{self.pass_index}{suffix}")

    def _from_stream(self) -> Iterator[tuple[Slice, Any]]:
        skip = self.position
        for batch in merge_small(iter(self._inner), self._sharing.shards):
            if skip >= len(batch):
                skip -= len(batch)
                continue
            samples, skip = batch[skip:], 0
            check_enough(len(samples), self._sharing.shards)
            part = self._slice(len(samples))
            yield part, self._collate(samples[part.start : part.stop])


def _as_list(samples: list[Any]) -> list[Any]:
    return samples
