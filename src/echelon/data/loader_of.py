"""A table as a loader: `loader_of` writes it once, and returns a loader that any worker can open.

    data = echelon.loader_of(df, label="price", batch_size=64)

The loader is small and can be pickled: it holds the catalogue of the chunks, not the rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from echelon.config.choices import check_word
from echelon.data import chunk
from echelon.data.collect import collect
from echelon.data.columns import ToTensors, select
from echelon.data.dataset import ChunkDataset, NearSampler
from echelon.data.source import WriteJob, source_of
from echelon.errors import ConfigError, DataError

Order = Literal["exact", "near"]


class TableLoader(DataLoader[Any]):
    """What `loader_of` returns: a DataLoader, to give to `session.prepare` or to iterate over.

    Copies in other processes read the same chunks. As a context manager it closes itself.
    """

    def close(self) -> None:
        """Remove the chunks, if `loader_of` made a temporary folder for them in this process."""
        if isinstance(self.dataset, ChunkDataset):
            self.dataset.close()

    def __enter__(self) -> TableLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def loader_of(
    data: Any,
    *,
    batch_size: int,
    columns: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    to_tensors: ToTensors | None = None,
    shuffle: bool = True,
    drop_last: bool = False,
    order: Order = "exact",
    folder: str | Path | None = None,
    num_workers: int = 0,
) -> TableLoader:
    """A loader of a Spark DataFrame, a Ray Dataset or another table, for `session.prepare`.

    data         a Spark or pandas DataFrame, a Ray Dataset, a pyarrow Table, the path of Parquet files, a
                 dict of arrays, or the path of a folder that `loader_of` wrote before
    batch_size   the batch of all workers together, unless `prepare` says otherwise
    columns      a name: x is that column, float32 or int64 as its numbers are. A list of names: x is one
                 float32 matrix of numbers and lists side by side. Default: all columns but the label
    label        the column, or columns, of y, by the same rules; without it a batch is x alone
    to_tensors   makes the tensors itself: gets a dict of arrays by column, returns a tensor, a tuple or a
                 dict of them with one row for each; called once, while the data is written
    shuffle      whether every pass has an order of its own, drawn from the run's seed
    drop_last    whether a last batch that is not full is left out
    order        exact: the batches are those of one process, whatever the number of workers. near: workers
                 draw the rows that their own machine wrote, as far as possible, so batches differ
    folder       where the data is written, best where all machines see it; it is kept. Default: a temporary
                 folder, removed when this program ends or by `close()`
    num_workers  the processes that load data, as torch's DataLoader has them

    The engine's own tasks write the data once, as files of tensors. Every row is drawn once per pass.
    Example:

        data = echelon.loader_of(df, columns=["area", "rooms"], label="price", batch_size=64)
    """
    check_word("order", order, get_args(Order), where="loader_of")
    _check_batch(batch_size)
    path = Path(data) if isinstance(data, (str, Path)) else None
    if path is not None and chunk.is_saved(path):
        _refuse_choices(columns=columns, label=label, to_tensors=to_tensors, folder=folder)
        dataset = ChunkDataset(chunk.read(path))
    else:
        dataset = _written(data, columns, label, to_tensors, folder)
    choice: dict[str, Any] = {"shuffle": shuffle}
    if order == "near":
        choice = {"sampler": NearSampler(dataset, shuffle=shuffle)}
    return TableLoader(
        dataset,
        batch_size=batch_size,
        drop_last=drop_last,
        collate_fn=_whole,
        num_workers=num_workers,
        **choice,
    )


def _written(
    data: Any,
    columns: str | Sequence[str] | None,
    label: str | Sequence[str] | None,
    to_tensors: ToTensors | None,
    folder: str | Path | None,
) -> ChunkDataset:
    """Write the table; a temporary folder goes away if that fails, and with the data set."""
    source = source_of(data)
    known = source.columns(data)
    if not known:
        raise DataError("the data has no columns and no rows", where="loader_of", fix="check what was read")
    selection = select(known, columns, label, to_tensors)
    target = _made(folder)
    try:
        parts = source.write(data, WriteJob(selection=selection, folder=str(target)))
        dataset = ChunkDataset(collect(parts, str(target)))
    except BaseException:
        _empty(target)
        if folder is None:
            target.rmdir()
        raise
    if folder is None:
        dataset.own(target)
    else:
        chunk.save(dataset.catalogue)
    return dataset


def _empty(folder: Path) -> None:
    """Remove what was written before something failed; the folder was empty before."""
    for file in folder.iterdir():
        file.unlink(missing_ok=True)


def _made(folder: str | Path | None) -> Path:
    """The folder to write to, which must be empty."""
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="echelon-data-"))
    if "://" in str(folder):
        raise ConfigError(
            f"{folder} is not a path of the file system, which workers can map into memory",
            where="loader_of, folder",
            fix="name a folder on a disk, best on one that all machines see",
        )
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        used = any(path.iterdir())
    except OSError as error:
        raise ConfigError(
            f"the folder cannot be used: {error.strerror or error}",
            where=f"loader_of, folder {path}",
            fix="name a folder that can be made",
        ) from error
    if used:
        raise ConfigError(
            f"the folder {path} is not empty",
            where="loader_of, folder",
            fix="name a new folder; if loader_of wrote this one, give its path instead of the data",
        )
    return path


def _check_batch(batch_size: int) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigError(
            f"batch_size is {batch_size!r}", where="loader_of", fix="give a whole number from 1"
        )


def _refuse_choices(**given: Any) -> None:
    """What was chosen when the folder was written cannot be chosen again."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} cannot be chosen for data that is already written",
                where=f"loader_of, {name}",
                fix="leave it out, or give loader_of the original data",
            )


def _whole(batch: Any) -> Any:
    """The data set reads whole batches."""
    return batch
