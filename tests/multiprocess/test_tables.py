"""Workers train on a table that `loader_of` wrote: as one process, each row once, wherever chunks are."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.data.dataset import ChunkDataset
from echelon.errors import DataError

SHARES = {1: None, 2: (3, 1)}


def table(count):
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(count, 4)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)
    return {"n": np.arange(count), **{f"x{i}": x[:, i] for i in range(4)}, "y": y}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few hundred rows."""
    from echelon.data import write

    monkeypatch.setattr(write.write_part, "__kwdefaults__", {"chunk_bytes": 8192})


def joined(seed=5):
    shares = SHARES[int(os.environ.get("WORLD_SIZE", "1"))]
    return echelon.join(record=False, seed=seed, shares=shares, round_timeout_s=90)


def train(loader, epochs=2):
    """The weights after some epochs, as numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joined() as session:
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        for _ in session.epochs(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def plain(count, batch):
    columns = table(count)
    x = np.stack([columns[f"x{i}"] for i in range(4)], axis=1)
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(columns["y"]))
    return DataLoader(data, batch_size=batch, shuffle=True)


def test_two_unequal_workers_train_as_one_process_trains_on_a_tensor_dataset(
    warm_pool, tmp_path, small_chunks
):
    data = echelon.loader_of(
        table(1001), columns=[f"x{i}" for i in range(4)], label="y", batch_size=32, folder=tmp_path
    )
    assert len(data.dataset.catalogue.chunks) > 2
    alone = train(plain(1001, 32))
    assert train(data) == alone
    first, second = warm_pool.run(2, train, data)
    assert first == second
    assert torch.allclose(torch.tensor(first), torch.tensor(alone), atol=1e-5)


def pretend(stack, host):
    for module in ("missing", "dataset"):
        stack.enter_context(mock.patch(f"echelon.data.{module}.this_host", return_value=host))


def drawn(data, epochs, host=None, folder=None):
    """By epoch, the rows that this worker draws. `host` and `folder` are those of a pretended machine."""
    rank = int(os.environ.get("RANK", "0"))
    with ExitStack() as stack:
        if host is not None:
            pretend(stack, host[rank])
        if folder is not None:
            data.dataset.catalogue = replace(data.dataset.catalogue, folder=f"{folder}/{host[rank]}")
        session = stack.enter_context(
            echelon.join(record=False, seed=5, shares=SHARES[2], round_timeout_s=90)
        )
        loader = session.prepare(data)
        found = [[n for batch in loader for n in batch.flatten().tolist()] for _ in range(epochs)]
        copies = {number: str(path) for number, path in loader.dataset._copies.items()}
        kept = [Path(path).exists() for path in copies.values()]
        assert all(kept) if data.num_workers else not any(kept), "mapped, and removed"
    return found, copies


def test_each_of_20001_rows_is_drawn_once_per_epoch_in_another_order_each_time(
    warm_pool, tmp_path, small_chunks
):
    data = echelon.loader_of({"n": np.arange(20_001)}, columns="n", batch_size=64, folder=tmp_path)
    (first, _), (second, _) = warm_pool.run(2, drawn, data, 2)
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(20_001))
        assert 2.9 < len(one) / len(other) < 3.1
    assert first[0] != first[1]


def on_two_machines(tmp_path, rows_of_a, rows, **options):
    """A table whose first rows machine a wrote, the others machine b, each on its own disk."""
    data = echelon.loader_of(
        {"n": np.arange(rows)}, columns="n", batch_size=16, folder=tmp_path / "all", **options
    )
    catalogue = data.dataset.catalogue
    hosts = ["a" if start < rows_of_a else "b" for start in catalogue.starts[:-1]]
    chunks = tuple(replace(c, host=host) for c, host in zip(catalogue.chunks, hosts, strict=True))
    for chunk in chunks:
        (tmp_path / chunk.host).mkdir(exist_ok=True)
        shutil.copy(tmp_path / "all" / chunk.name, tmp_path / chunk.host / chunk.name)
    data.dataset.__init__(replace(catalogue, chunks=chunks))
    return data, catalogue.starts[hosts.index("b")]


def test_near_workers_draw_the_rows_of_their_own_machine_each_once(warm_pool, tmp_path, small_chunks):
    data, border = on_two_machines(tmp_path, 12_000, 16_000, order="near")
    (first, copied_a), (second, copied_b) = warm_pool.run(2, drawn, data, 2, ("a", "b"), str(tmp_path))
    for one, other in zip(first, second, strict=True):
        assert sorted(one + other) == list(range(16_000))
        far = sum(n >= border for n in one) + sum(n < border for n in other)
        assert far == abs(border - len(one)) < 1100
    assert first[0] != first[1]
    assert not copied_a or not copied_b, "only one machine has too few rows of its own"
    assert len(copied_a) + len(copied_b) < 3, "only the chunks that are lent are copied"


def test_chunks_on_the_disks_of_other_machines_are_copied_and_the_batches_are_exact(
    warm_pool, tmp_path, small_chunks
):
    data, _ = on_two_machines(tmp_path, 3000, 5001)
    (first, copied_a), (second, copied_b) = warm_pool.run(2, drawn, data, 1, ("a", "b"), str(tmp_path))
    catalogue = data.dataset.catalogue
    assert sorted(copied_a) == [n for n, chunk in enumerate(catalogue.chunks) if chunk.host == "b"]
    assert sorted(copied_b) == [n for n, chunk in enumerate(catalogue.chunks) if chunk.host == "a"]
    exact = warm_pool.run(2, drawn, data, 1)
    assert [first, second] == [rows for rows, _ in exact]
    assert sorted(first[0] + second[0]) == list(range(5001))


def test_copies_stay_for_processes_that_load_data_and_go_with_the_worker(warm_pool, tmp_path, small_chunks):
    data, _ = on_two_machines(tmp_path, 300, 2000, num_workers=1)
    (first, copied_a), (second, copied_b) = warm_pool.run(2, drawn, data, 1, ("a", "b"), str(tmp_path))
    assert sorted(first[0] + second[0]) == list(range(2000))
    copies = [*copied_a.values(), *copied_b.values()]
    assert copies
    assert not any(Path(path).exists() for path in copies)


def test_two_workers_of_one_machine_share_a_copy(warm_pool, tmp_path, small_chunks):
    data, _ = on_two_machines(tmp_path, 3000, 5001)
    shutil.copytree(tmp_path / "all", tmp_path / "c")
    for chunk in data.dataset.catalogue.chunks:
        if chunk.host == "b":
            (tmp_path / "a" / chunk.name).unlink(missing_ok=True)
    outcomes = warm_pool.run(3, drawn_by_three, data, ("c", "a", "a"), str(tmp_path))
    assert outcomes[0][1] == {}
    assert outcomes[1][1] == outcomes[2][1] != {}
    assert sorted(n for rows, _ in outcomes for n in rows[0]) == list(range(5001))


def drawn_by_three(data, host, folder):
    with mock.patch.dict(SHARES, {2: (1, 1, 1)}):
        return drawn(data, 1, host, folder)


def test_a_chunk_that_no_worker_can_read_is_named_on_all_workers(warm_pool, tmp_path, small_chunks):
    data, _ = on_two_machines(tmp_path, 3000, 5001)
    lost = data.dataset.catalogue.chunks[-1]
    (tmp_path / "b" / lost.name).unlink()
    for outcome in warm_pool.outcomes(2, drawn, data, 1, ("a", "b"), str(tmp_path)):
        assert isinstance(outcome.error, DataError)
        assert outcome.error.message.startswith(f"chunk {lost.name}")
        assert "b wrote it" in outcome.error.message
        assert "a folder that all machines see" in outcome.error.fix


def test_a_chunk_that_changed_on_its_machine_is_not_copied_silently(warm_pool, tmp_path, small_chunks):
    data, _ = on_two_machines(tmp_path, 3000, 5001)
    changed = data.dataset.catalogue.chunks[-1]
    (tmp_path / "b" / changed.name).write_bytes(b"\0" * changed.size_bytes)
    for outcome in warm_pool.outcomes(2, drawn, data, 1, ("a", "b"), str(tmp_path)):
        assert isinstance(outcome.error, DataError)
        assert "could not be copied" in outcome.error.message
        assert changed.name in outcome.error.message


def drawn_without_room(*arguments):
    with mock.patch("echelon.data.missing.shutil.disk_usage", return_value=mock.Mock(free=10)):
        return drawn(*arguments)


def test_copies_that_would_fill_a_disk_are_refused_before_they_travel(warm_pool, tmp_path, small_chunks):
    data, _ = on_two_machines(tmp_path, 3000, 5001)
    for outcome in warm_pool.outcomes(2, drawn_without_room, data, 1, ("a", "b"), str(tmp_path)):
        assert isinstance(outcome.error, DataError)
        assert "10 B are free" in outcome.error.message


def stop_and_go_on(data, checkpoint, *, steps, host=None):
    """Draw some batches, or all that are left, from the checkpoint on."""
    rank = int(os.environ.get("RANK", "0"))
    seen = []
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ExitStack() as stack:
        if host is not None:
            pretend(stack, host[rank])
        session = stack.enter_context(joined())
        model, optimizer, loader = session.prepare(model, optimizer, data)
        session.load(checkpoint, required=False)
        for _ in session.epochs(1):
            for batch in loader:
                seen += batch.tolist()
                optimizer.zero_grad()
                model(batch.float().unsqueeze(1)).mean().backward()
                optimizer.step()
                if session.step == steps:
                    session.save(checkpoint)
                    return seen
    return seen


@pytest.mark.parametrize("order", ["exact", "near"])
def test_a_pass_goes_on_after_a_checkpoint_with_another_number_of_workers(
    warm_pool, tmp_path, small_chunks, order
):
    data, _ = on_two_machines(tmp_path, 500, 3000, order=order)
    checkpoint = str(tmp_path / "checkpoint")
    before = warm_pool.run(2, stop_early, data, checkpoint)
    after = stop_and_go_on(data, checkpoint, steps=-1)
    assert sum(len(seen) for seen in before) == 20 * 16
    assert sorted([n for seen in before for n in seen] + after) == list(range(3000))


def stop_early(data, checkpoint):
    return stop_and_go_on(data, checkpoint, steps=20, host=("a", "b"))


def claimed(data, host, folder):
    """The rows that this worker claims, in a run whose workers do not wait for each other."""
    rank = int(os.environ["RANK"])
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    with ExitStack() as stack:
        pretend(stack, host[rank])
        data.dataset.catalogue = replace(data.dataset.catalogue, folder=f"{folder}/{host[rank]}")
        session = stack.enter_context(
            echelon.join(record=False, seed=5, round_timeout_s=90, sync="hogwild", transport="shm")
        )
        model, optimizer, loader = session.prepare(model, optimizer, data)
        for _ in session.epochs(1):
            for batch in loader:
                seen += batch.tolist()
                optimizer.zero_grad()
                model(batch.float().unsqueeze(1) / 5000).mean().backward()
                optimizer.step()
    return seen


@pytest.mark.parametrize("order", ["exact", "near"])
def test_workers_that_claim_parts_of_batches_draw_each_row_once(warm_pool, tmp_path, small_chunks, order):
    data, _ = on_two_machines(tmp_path, 1500, 3001, order=order)
    first, second = warm_pool.run(2, claimed, data, ("a", "b"), str(tmp_path))
    assert sorted(first + second) == list(range(3001))


def prepare_own(rows):
    """Each worker writes a table of its own."""
    rank = int(os.environ["RANK"])
    with (
        joined() as session,
        echelon.loader_of({"n": np.arange(rows) + rank * (rows % 2)}, batch_size=8) as data,
    ):
        loader = session.prepare(data)
        assert isinstance(loader.dataset, ChunkDataset)
        return sum(len(batch) for batch in loader)


def own_tables(host):
    """Each worker writes the same table, on its own machine."""
    rank = int(os.environ["RANK"])
    with ExitStack() as stack:
        pretend(stack, host[rank])
        stack.enter_context(mock.patch("echelon.data.write.this_host", return_value=host[rank]))
        session = stack.enter_context(joined())
        table = {"n": np.arange(100)}
        data = stack.enter_context(echelon.loader_of(table, columns="n", batch_size=8, order="near"))
        return [n for batch in session.prepare(data) for n in batch.tolist()]


def test_near_workers_that_each_wrote_the_table_agree_on_who_draws_what(warm_pool):
    first, second = warm_pool.run(2, own_tables, ("a", "b"))
    assert sorted(first + second) == list(range(100))


def test_workers_that_each_write_the_same_table_share_it_and_different_ones_are_noticed(warm_pool):
    assert sum(warm_pool.run(2, prepare_own, 100)) == 100
    for outcome in warm_pool.outcomes(2, prepare_own, 101):
        assert isinstance(outcome.error, DataError)
        assert "workers differ: loader 0, which samples" in outcome.error.message
