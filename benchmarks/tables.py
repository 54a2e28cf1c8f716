"""How fast is a table written and read? `loader_of` beside a TensorDataset, Arrow, Parquet and Ray Data.

    python benchmarks/tables.py [--quick] [--engines spark,ray]

write   a table of 40,000 rows x 17 numbers becomes a loader; for engines also when they are warm. Beside it
        the same table as one Parquet file and one Arrow file, written by pyarrow in this process.
read    rows/s of a shuffled pass in batches of 64, and the ratio to the peer in the same run: a DataLoader
        of a TensorDataset, which fetches row by row. All but Ray's iterator go through torch's DataLoader;
        those besides the TensorDataset fetch whole batches. Parquet has no random access: its rows are
        decoded into memory before. Ray's iterator shuffles within 1,000 rows.

Rounds take turns, medians are shown. One process, one thread of torch. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import echelon

ROWS, FEATURES, BATCH = 40_000, 16, 64
Table = dict[str, Any]


def table_of(rows: int) -> Table:
    """Numbers in 16 columns, and a label."""
    numbers = np.random.default_rng(0)
    columns = {f"x{i}": numbers.normal(size=rows).astype(np.float32) for i in range(FEATURES)}
    return {**columns, "y": numbers.integers(0, 10, rows)}


def timed(act: Callable[[], Any]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def drain(batches: Iterable[Any]) -> None:
    """Draw all batches."""
    for _ in batches:
        pass


def plain(table: Table) -> DataLoader[Any]:
    """The peer."""
    x = torch.from_numpy(np.stack([table[f"x{i}"] for i in range(FEATURES)], axis=1))
    data = TensorDataset(x, torch.from_numpy(table["y"]))
    return DataLoader(data, batch_size=BATCH, shuffle=True)


def shared(loader: DataLoader[Any]) -> DataLoader[Any]:
    """As a worker has it, the only one of its run."""
    return echelon.join(record=False).prepare(loader)


class Rows(Dataset[Any]):
    """Rows that a function reads, a batch at a time."""

    def __init__(self, count: int, read: Callable[[list[int]], Any]) -> None:
        self.count = count
        self.read = read

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Any:
        return self.read([row])

    def __getitems__(self, rows: list[int]) -> Any:
        """A whole batch."""
        return self.read(rows)


def batched(rows: int, read: Callable[[list[int]], Any]) -> DataLoader[Any]:
    """A loader of such rows."""
    return DataLoader(Rows(rows, read), batch_size=BATCH, shuffle=True, collate_fn=lambda batch: batch)


def arrow_file(table: Table, folder: Path) -> Path:
    """The table as an Arrow file."""
    import pyarrow as pa

    path = folder / "table.arrow"
    whole = pa.table(table)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, whole.schema) as writer:
        writer.write_table(whole)
    return path


def parquet_file(table: Table, folder: Path) -> Path:
    """The table as a Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / "table.parquet"
    parquet.write_table(pa.table(table), path)
    return path


def arrow_loader(path: Path, rows: int) -> DataLoader[Any]:
    """Random rows of a memory-mapped Arrow file."""
    import pyarrow as pa

    whole = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()

    def read(wanted: list[int]) -> Any:
        taken = whole.take(wanted)
        x = np.stack([taken[f"x{i}"].to_numpy() for i in range(FEATURES)], axis=1)
        return torch.from_numpy(x), torch.from_numpy(taken["y"].to_numpy().copy())

    return batched(rows, read)


def parquet_loader(path: Path, rows: int) -> DataLoader[Any]:
    """A Parquet file, all of it in memory."""
    from pyarrow import parquet

    whole = parquet.read_table(path)
    x = torch.from_numpy(np.stack([whole[f"x{i}"].to_numpy() for i in range(FEATURES)], axis=1))
    y = torch.from_numpy(whole["y"].to_numpy().copy())
    return batched(rows, lambda wanted: (x[wanted], y[wanted]))


def in_chunks(table: Table, folder: Path, count: int) -> DataLoader[Any]:
    """What `loader_of` makes of a table that so many tasks write."""
    from echelon.data import write

    row_bytes = 4 * FEATURES + 8
    write.write_part.__kwdefaults__["chunk_bytes"] = row_bytes * (len(table["y"]) // count)
    made = echelon.loader_of(table, label="y", batch_size=BATCH, folder=tempfile.mkdtemp(dir=folder))
    write.write_part.__kwdefaults__["chunk_bytes"] = write.CHUNK_BYTES
    return made


@contextmanager
def spark_frame(table: Table) -> Iterator[Any]:
    """A frame of Spark with two cores of this machine."""
    import pandas
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.execution.arrow.pyspark.enabled", "true").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session.createDataFrame(pandas.DataFrame(table)).repartition(4).cache()
    session.stop()


@contextmanager
def ray_dataset(table: Table) -> Iterator[Any]:
    """A dataset of Ray with two cores of this machine."""
    import pandas
    import ray
    import ray.data

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield ray.data.from_pandas(pandas.DataFrame(table)).repartition(4).materialize()
        ray.shutdown()


ENGINES = {"spark": spark_frame, "ray": ray_dataset}


def written(table: Any, folder: Path) -> float:
    """Seconds until a table is a loader."""

    def write() -> None:
        echelon.loader_of(table, label="y", batch_size=BATCH, folder=tempfile.mkdtemp(dir=folder))

    return timed(write)


def show_writing(table: Table, rounds: int, folder: Path) -> None:
    """Times to write without an engine."""
    ways: dict[str, Callable[[], Any]] = {"loader_of, a dict of arrays": lambda: written(table, folder)}
    if importlib.util.find_spec("pyarrow"):
        ways["Parquet, by pyarrow"] = lambda: timed(lambda: parquet_file(table, folder))
        ways["Arrow, by pyarrow"] = lambda: timed(lambda: arrow_file(table, folder))
    for name, act in ways.items():
        print(f"write  {name:34}{statistics.median([act() for _ in range(rounds)]):8.3f} s", flush=True)


def show_reading(table: Table, rounds: int, folder: Path, extra: dict[str, Callable[[], Any]]) -> None:
    """Rates of all ways to read, in turns."""
    rows = len(table["y"])
    loaders = {
        "TensorDataset": plain(table),
        "TensorDataset, prepared": shared(plain(table)),
        "loader_of": in_chunks(table, folder, 1),
        "loader_of, prepared": shared(in_chunks(table, folder, 1)),
        "loader_of, 8 chunks": in_chunks(table, folder, 8),
        "loader_of, 200 chunks": in_chunks(table, folder, 200),
    }
    if importlib.util.find_spec("pyarrow"):
        loaders["Arrow, memory-mapped"] = arrow_loader(arrow_file(table, folder), rows)
        loaders["Parquet, decoded into memory"] = parquet_loader(parquet_file(table, folder), rows)
    ways: dict[str, Callable[[], Any]] = {name: partial(drain, loader) for name, loader in loaders.items()}
    ways |= extra
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, act in ways.items():
            times[name].append(timed(act))
    base = statistics.median(times["TensorDataset"])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"read   {name:34}{rows / middle:12,.0f} rows/s {base / middle:8.2f} x", flush=True)


def main() -> None:
    """Write, then read."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--engines", default="", help="spark, ray, or both with a comma")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 2 if options.quick else 7
    table = table_of(ROWS)
    chosen = [name for name in options.engines.split(",") if name]
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as text:
        folder = Path(text)
        show_writing(table, rounds, folder)
        for name in chosen:
            with ENGINES[name](table) as made:
                first, *others = [written(made, folder) for _ in range(rounds)]
                middle = statistics.median(others)
                print(
                    f"write  loader_of, {name:23}{middle:8.3f} s, the first time {first:.3f} s", flush=True
                )
                if name == "ray":
                    extra = {"Ray, iter_torch_batches": lambda: drain(ray_batches(made))}
                    show_reading(table, rounds, folder, extra)
        if "ray" not in chosen:
            show_reading(table, rounds, folder, {})


def ray_batches(dataset: Any) -> Iterable[Any]:
    """Ray's own iterator over batches of tensors."""
    return dataset.iter_torch_batches(batch_size=BATCH, local_shuffle_buffer_size=1000)


if __name__ == "__main__":
    main()
