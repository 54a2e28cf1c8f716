"""Rows of chunks as a torch data set. A chunk is mapped into memory when a row of it is first wanted.

A batch is read at once, by `__getitems__`: torch's DataLoader calls it with all the batch's rows.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, Sampler

from echelon.data.chunk import Catalogue, this_host
from echelon.errors import DataError

_ROWS_PER_CHUNK = 8  # with fewer rows of each chunk in a batch, copying them one by one is quicker
_SHARED_FOLDER = "give loader_of folder=, a folder that all machines see"


class ChunkDataset(Dataset[Any]):
    """The rows of a catalogue's chunks. Copies in other processes open the chunks for themselves.

    hosts        the machine of each worker, by rank, once they have met
    chunk_hosts  the machine of each chunk, alike on all workers once they have met
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.hosts: tuple[str, ...] = (this_host(),)
        self.chunk_hosts = tuple(chunk.host for chunk in catalogue.chunks)
        self._starts = np.asarray(catalogue.starts)
        self._copies: dict[int, Path] = {}
        self._opened: dict[int, dict[str, npt.NDArray[Any]]] = {}
        self._owned: list[weakref.finalize[[Path, int], ChunkDataset]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": {}, "_owned": []}

    def own(self, folder: Path) -> None:
        """Remove the folder when this data set is closed or forgotten, or when the program ends."""
        self._owned.append(weakref.finalize(self, _remove_folder, folder, os.getpid()))

    def close(self) -> None:
        """Remove the folders that are this process's own."""
        for remove in self._owned:
            remove()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> Any:
        if not -len(self) <= row < len(self):
            raise IndexError(row)
        found = [tensor[0] for tensor in self._read([row % len(self)]).values()]
        return self._formed(found)

    def __getitems__(self, rows: Sequence[int]) -> Any:
        """The tensors of these rows, one batch."""
        return self._formed(list(self._read(rows).values()))

    def _formed(self, tensors: list[torch.Tensor]) -> Any:
        form = self.catalogue.form
        if form == "one":
            return tensors[0]
        if form == "tuple":
            return tuple(tensors)
        names = [spec.name for spec in self.catalogue.tensors]
        return dict(zip(names, tensors, strict=True))

    def _read(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        wanted = np.asarray(rows)
        numbers = np.searchsorted(self._starts, wanted, side="right") - 1
        within = wanted - self._starts[numbers]
        first = int(numbers[0])
        if (numbers == first).all():
            return {name: torch.from_numpy(array[within]) for name, array in self._chunk(first).items()}
        out = {
            spec.name: np.empty((len(wanted), *spec.shape), spec.dtype) for spec in self.catalogue.tensors
        }
        by_chunk = np.argsort(numbers, kind="stable")
        borders = np.flatnonzero(np.diff(numbers[by_chunk])) + 1
        if len(wanted) > _ROWS_PER_CHUNK * len(borders):
            for places in np.split(by_chunk, borders):
                chunk = self._chunk(int(numbers[places[0]]))
                for name, array in out.items():
                    array[places] = chunk[name][within[places]]
        else:
            chunks = [self._chunk(number) for number in numbers.tolist()]
            rows_within = within.tolist()
            for name, array in out.items():
                for place, (chunk, row) in enumerate(zip(chunks, rows_within, strict=True)):
                    array[place] = chunk[name][row]
        return {name: torch.from_numpy(array) for name, array in out.items()}

    def has(self, number: int) -> bool:
        """Whether this process can read a chunk: it is there, and whole."""
        try:
            return self._path(number).stat().st_size == self.catalogue.chunks[number].size_bytes
        except OSError:
            return False

    def use_copy(self, number: int, path: Path) -> None:
        """Read a chunk from another file. It is mapped at once, so the file may then be removed."""
        self._copies[number] = path
        self._chunk(number)

    def _path(self, number: int) -> Path:
        return self._copies.get(number) or self.catalogue.path(number)

    def _chunk(self, number: int) -> dict[str, npt.NDArray[Any]]:
        if number not in self._opened:
            self._opened[number] = self._open(number)
        return self._opened[number]

    def _open(self, number: int) -> dict[str, npt.NDArray[Any]]:
        from safetensors import SafetensorError, safe_open

        if not self.has(number):
            raise unreadable(self.catalogue, number, this_host())
        path = self._path(number)
        try:
            with safe_open(path, framework="pt") as file:
                return {spec.name: file.get_tensor(spec.name).numpy() for spec in self.catalogue.tensors}
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"chunk {path.name} is damaged: {error}",
                where=str(path),
                fix="call loader_of again, to write the data anew",
            ) from error


def _remove_folder(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a process that was forked
        shutil.rmtree(folder, ignore_errors=True)


def unreadable(catalogue: Catalogue, number: int, host: str) -> DataError:
    """The error of a chunk that cannot be read on a machine."""
    chunk, start = catalogue.chunks[number], catalogue.starts[number]
    return DataError(
        f"chunk {chunk.name} (rows {start} to {start + chunk.rows - 1}) cannot be read on {host}; "
        f"{chunk.host} wrote it",
        where=str(catalogue.path(number)),
        fix=_SHARED_FOLDER,
    )


class NearSampler(Sampler[int]):
    """Stands for `order="near"`; a shared loader asks `near.py` for the order. Alone, all rows are near."""

    def __init__(self, dataset: ChunkDataset, *, shuffle: bool) -> None:
        self.dataset = dataset
        self.shuffle = shuffle

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        rows = len(self.dataset)
        return iter(torch.randperm(rows).tolist() if self.shuffle else range(rows))
