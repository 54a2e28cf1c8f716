"""A user's program with an engine: it makes tables, calls `loader_of`, and leaves the outcome in a folder.

    python engine_program.py spark FOLDER

It runs in a process of its own, since engines keep processes and threads. FOLDER/NAME.pickle is a loader,
or the error that was raised instead.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import echelon

ROWS = 20_001


def leave(folder: Path, name: str, table: Any, **options: Any) -> None:
    """Write a table, and leave the loader or the error."""
    try:
        made: Any = echelon.loader_of(table, batch_size=64, folder=folder / name, **options)
    except echelon.EchelonError as error:
        made = error
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(made))


def numbers_of_text(columns: dict[str, Any]) -> dict[str, Any]:
    """The number in each text, and the process that read it."""
    texts = columns["text"]
    return {"n": np.array([int(text[1:]) for text in texts]), "pid": np.full(len(texts), os.getpid())}


def spark(folder: Path) -> None:
    """Frames of Spark, with two cores of this machine."""
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql import SparkSession
    from pyspark.sql.functions import array, col, udf

    builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    vector = udf(lambda n: Vectors.dense([n, 1.0]), VectorUDT())
    numbers = session.range(ROWS, numPartitions=5).withColumnRenamed("id", "y")
    frame = numbers.select(
        (col("y") / 2).alias("half"),
        array(col("y"), col("y") * 2).alias("two.lists"),
        vector(col("y")).alias("vector"),
        col("y").cast("decimal(10,2)").alias("decimal"),
        col("y"),
    )
    thousand = session.range(1000, numPartitions=4)
    leave(folder, "rows", frame, label="y")
    leave(folder, "null", thousand.selectExpr("if(id = 777, null, id) as a"))
    leave(folder, "lengths", thousand.selectExpr("if(id < 500, array(id), array(id, id)) as v"))
    leave(folder, "function", thousand.selectExpr("concat('a', id) as text"), to_tensors=numbers_of_text)
    leave(folder, "empty", session.range(0))
    leave(folder, "broken", thousand.selectExpr("raise_error('no such luck') as a"))
    leave(folder, "unknown", frame, columns=["hafl"])
    session.stop()


def ray(folder: Path) -> None:
    """Datasets of Ray, with two cores of this machine."""
    import ray as engine

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as temporary:
        engine.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=temporary
        )
        try:
            _ray_tables(folder)
        finally:
            engine.shutdown()


def _ray_tables(folder: Path) -> None:
    import ray.data as data

    def widen(batch: dict[str, Any]) -> dict[str, Any]:
        n = batch["id"]
        tensor = np.stack([np.stack([n, n * 2]), np.stack([n, n * 3])]).transpose(2, 0, 1)
        return {"half": n / 2, "tensor": tensor, "y": n}

    def fail(batch: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no such luck")

    data.DataContext.get_current().enable_progress_bars = False
    dataset = data.range(ROWS, override_num_blocks=5).map_batches(widen)
    before = dataset.context.execution_options.preserve_order
    items = [{"a": 1.0 * i if i != 77 else None} for i in range(100)]
    texts = data.from_items([{"text": f"a{i}"} for i in range(1000)], override_num_blocks=4)
    leave(folder, "rows", dataset, columns="tensor", label="y")
    leave(folder, "null", data.from_items(items, override_num_blocks=4))
    lists = [{"v": [i] if i < 500 else [i, i]} for i in range(1000)]
    leave(folder, "lengths", data.from_items(lists, override_num_blocks=4))
    leave(folder, "function", texts, to_tensors=numbers_of_text)
    leave(folder, "empty", data.range(10).filter(lambda row: False))
    leave(folder, "broken", data.range(10).map_batches(fail))
    leave(folder, "unknown", dataset, columns=["hafl"])
    assert dataset.context.execution_options.preserve_order == before


PROGRAMS: dict[str, Callable[[Path], None]] = {"spark": spark, "ray": ray}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # What `leave` pickles is found by the test under the name of this file, not as __main__.
    sys.path.insert(0, str(Path(__file__).parent))
    import engine_program

    engine_program.PROGRAMS[sys.argv[1]](Path(sys.argv[2]))
