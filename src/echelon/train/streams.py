"""Every worker draws random numbers of its own: dropout masks, noise, augmentations.

Scripts seed all workers alike, so that models start alike. If that went on, four workers would draw the
same noise four times. So after `prepare` every worker but the leader continues on a stream that follows
from the common state and its rank: reproducible, and different on each worker. The leader's stream is the
one that the script would have alone. Checkpoints keep the streams of all workers.

A script that seeds again later makes them alike again; that is noticed at the start of the next pass.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from echelon.checkpoint import state_tree
from echelon.comm.group import Group

STREAMS = ("torch", "numpy", "python")


def digests() -> list[int]:
    """A number for the state of each stream of this process, in the order of STREAMS."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    states = (
        torch.get_rng_state().numpy().tobytes(),
        np.asarray(keys).tobytes() + repr((position, has_gauss, gauss)).encode(),
        array("Q", internal).tobytes() + repr((version, next_gauss)).encode(),
    )
    return [xxhash.xxh3_64_intdigest(state) >> 1 for state in states]


def fork(rank: int, among: Sequence[Sequence[int]]) -> list[str]:
    """Leave each stream that a lower rank has too; `among` are all workers' digests, by rank.

    Returns the names of the streams that were left. All workers call it with the same digests.
    """
    left = []
    for index, name in enumerate(STREAMS):
        state = among[rank][index]
        if any(among[lower][index] == state for lower in range(rank)):
            _seed(name, xxhash.xxh3_64_intdigest(f"{state}/{rank}".encode()) >> 1)
            left.append(name)
    return left


def begin(text: str) -> None:
    """Continue on streams that follow from a text."""
    for name in STREAMS:
        _seed(name, xxhash.xxh3_64_intdigest(f"{text}/{name}".encode()) >> 1)


def alike(among: Sequence[Sequence[int]]) -> bool:
    """Whether two workers have a stream in common."""
    return any(len({mine[index] for mine in among}) < len(among) for index in range(len(STREAMS)))


def copy(group: Group, source: int) -> None:
    """Continue with the streams of another worker; all workers call it, each with a source of its own."""
    told = group.all_gather_bytes(state_tree.pack(random_state()))
    if source != group.rank:
        set_random_state(state_tree.unpack(told[source]))


def random_state() -> dict[str, Any]:
    """The state of all streams of this process."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": (version, torch.tensor(internal, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from a state that `random_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _seed(name: str, seed: int) -> None:
    if name == "torch":
        torch.manual_seed(seed)
    elif name == "numpy":
        np.random.seed(seed & 0xFFFFFFFF)
    else:
        random.seed(seed)
