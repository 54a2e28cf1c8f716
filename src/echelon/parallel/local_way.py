"""In which ways can one machine compute a batch? Processes, replicas in threads, threads, chunks.

    1 process x 4 threads    torch as it is: each operation is divided among threads
    4 replicas in threads    each thread of one process computes a part of the batch, operation by operation
    4 processes              each computes a part of the batch; gradients are summed in shared memory
    2 processes x 2 threads  both
    chunks of 250            a part is computed chunk by chunk, so that activations fit the cache

All compute the gradients of the same batch. Pure: who is measured, and what is taken, is decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

_LEAST_CHUNK = 4
_CHUNKS = (4, 16)  # parts of a process's share of the batch
_CLEARLY = 1.02  # a way with more parts has to be faster by so much


class LocalWay(msgspec.Struct, frozen=True, kw_only=True):
    """One way: `threads` are torch's own in each process, or in each of its `replicas` threads."""

    processes: int = 1
    replicas: int = 1
    threads: int = 1
    samples: int = 0  # of a chunk; 0: the share as a whole
    pinned: bool = False

    @property
    def layout(self) -> str:
        """What `--parallel` says for it."""
        if self.replicas > 1:
            inside = f"threads(replicas={self.replicas})"
            return f"{inside} * data" if self.processes > 1 else inside
        if not self.samples:
            return "data"
        chunks = f"pipeline(stages=1, schedule=1f1b, samples={self.samples})"
        return f"{chunks} * data" if self.processes > 1 else chunks

    @property
    def threads_a_process(self) -> int:
        """Torch's own threads in a process, which its replicas divide among them."""
        return self.threads * self.replicas

    @property
    def parts(self) -> int:
        """How many parts it divides the machine into: of two that are equally fast, fewer are simpler."""
        return self.processes * self.replicas + (1 if self.samples else 0) + self.pinned

    def __str__(self) -> str:
        words = [f"{self.processes} process{'es' if self.processes > 1 else ''}"]
        if self.replicas > 1:
            words.append(f"{self.replicas} replicas in threads")
        if self.threads > 1 or self.replicas == 1:
            words.append(f"{self.threads} thread{'s' if self.threads > 1 else ''}")
        text = " x ".join(words)
        if self.samples:
            text += f", chunks of {self.samples}"
        return text + (", pinned" if self.pinned else "")


def as_it_is(cores: int) -> LocalWay:
    """What torch does by itself."""
    return LocalWay(threads=cores)


def usual_ways(cores: int, batch: int) -> list[LocalWay]:
    """Every division of the cores among processes, with whole shares; one core; replicas in threads."""
    counts = [count for count in range(1, cores + 1) if cores % count == 0 and count <= batch]
    if len(counts) > 4:  # the ends, and two between: each has to be measured
        counts = [counts[0], counts[1], counts[len(counts) // 2], counts[-1]]
    ways = [LocalWay(processes=count, threads=cores // count) for count in counts]
    return ways if cores == 1 else [*ways, LocalWay(), *_in_threads(cores, batch)]


def _in_threads(cores: int, batch: int) -> list[LocalWay]:
    """Replicas in the threads of one process, and of two."""
    found = [LocalWay(processes=count, replicas=cores // count) for count in (1, 2) if cores % count == 0]
    return [way for way in found if way.replicas > 1 and cores <= batch]


def table_ways(cores: int, batch: int, *, numa_nodes: int = 1) -> list[LocalWay]:
    """The rows of `echelon bench local`: usual ways, replicas in threads, both, chunks, pinned cores."""
    ways = usual_ways(cores, batch)
    found = [LocalWay(), *(way for way in ways if way != LocalWay())]
    if 1 < cores <= batch:
        found.append(LocalWay(replicas=cores))
    both = LocalWay(processes=2, replicas=max(2, cores // 2))
    if cores > 1 and both.processes * both.replicas <= batch:
        found.append(both)
    for way in ways:
        if way.processes in (1, cores) and way.threads * way.processes == cores:
            found += chunked(way, batch)
    if 1 < cores <= batch:
        found.append(LocalWay(processes=cores, pinned=True))
    if 1 < numa_nodes < cores and numa_nodes <= batch:
        found.append(LocalWay(processes=numa_nodes, threads=cores // numa_nodes, pinned=True))
    return list(dict.fromkeys(found))


def chunked(way: LocalWay, batch: int) -> list[LocalWay]:
    """The way with chunks of some sizes; none where a share is too small."""
    share = -(-batch // way.processes)
    sizes = {-(-share // parts) for parts in _CHUNKS}
    kept = sorted((size for size in sizes if _LEAST_CHUNK <= size < share), reverse=True)
    return [msgspec.structs.replace(way, samples=size) for size in kept]


def refined(way: LocalWay, batch: int) -> list[LocalWay]:
    """What is tried after the best way is known: chunks, and cores of their own for several processes."""
    found = chunked(way, batch) if way.replicas == 1 else []
    return [*found, *([msgspec.structs.replace(way, pinned=True)] if way.processes > 1 else [])]


def cores_of(way: LocalWay, rank: int, cores: Sequence[int]) -> tuple[int, ...]:
    """The cores of one process of a pinned way: neighbours, which share a NUMA node."""
    begin, end = (len(cores) * at // way.processes for at in (rank, rank + 1))
    return tuple(cores[begin : max(end, begin + 1)])


def best_way(rates: Mapping[LocalWay, float]) -> LocalWay:
    """The way with the most samples/s; one with more parts has to be clearly faster."""
    found: LocalWay | None = None
    for way in sorted(rates, key=lambda one: (one.parts, -rates[one])):
        if found is None or rates[way] > _CLEARLY * rates[found]:
            found = way
    if found is None:
        raise ValueError("no way was measured")
    return found
