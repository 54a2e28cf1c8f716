"""A run resumed from a checkpoint ends like an uninterrupted run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import echelon
from plain import examples
from warm import WorkerFailure


def train(folder, options):
    """Train three epochs of seven steps, or up to a step at which it saves and stops.

    stop       after this step, save and stop           resume      load first
    dropout    draw random numbers in every step        epoch_end   save after each epoch, not after steps
    """
    stop, resume = options.get("stop"), options.get("resume", False)
    with echelon.join(record=False, shares=options.get("shares"), round_timeout_s=90) as session:
        torch.manual_seed(50 + session.rank if resume else 10 + session.rank)
        layers = [nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(options.get("dropout", 0.0))]
        model = nn.Sequential(*layers, nn.Linear(12, 3)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=3 * 7)
        x, y = examples().tensors
        data = TensorDataset(x, y, torch.arange(len(x)))
        loader = DataLoader(data, batch_size=8, **_order(options))
        model, optimizer, scheduler, loader = session.prepare(model, optimizer, scheduler, loader)
        drawn, epochs, losses = [], [], []
        extra = session.load(folder) if resume else None
        begun_at = session.step
        for epoch in session.epochs(3):
            epochs.append(epoch)
            for x, y, index in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                scheduler.step()
                drawn.append(index.tolist())
                losses.append(float(loss.detach()))
                if session.step == stop and not options.get("epoch_end"):
                    session.save(folder, extra={"note": "on the way", "step": session.step})
                    return {"drawn": drawn, "epochs": epochs, "losses": losses}
            if options.get("epoch_end"):
                session.save(folder)
                if session.step == stop:
                    return {"drawn": drawn, "epochs": epochs, "losses": losses}
        return {
            "drawn": drawn,
            "epochs": epochs,
            "losses": losses,
            "begun_at": begun_at,
            "extra": extra,
            "steps": session.step,
            "lr": scheduler.get_last_lr(),
            "random": float(torch.rand(())),
            "state": {name: value.clone() for name, value in model.state_dict().items()},
        }


def _order(options):
    if options.get("sampler"):
        return {"sampler": WeightedRandomSampler([1.0] * 52, 52, replacement=False)}
    return {"shuffle": True}


def together(workers):
    """The global batches, from the samples that each worker drew."""
    return [
        sorted(i for part in batch for i in part)
        for batch in zip(*(w["drawn"] for w in workers), strict=True)
    ]


def assert_same_end(resumed, whole):
    for mine, reference in zip(resumed, whole, strict=True):
        assert mine["random"] == reference["random"]
        assert mine["lr"] == reference["lr"]
        for name, value in reference["state"].items():
            assert torch.equal(mine["state"][name], value), name


@pytest.mark.parametrize("sampler", [False, True], ids=["shuffled", "sampler"])
def test_run_resumed_within_an_epoch_ends_with_the_same_bits(warm_pool, tmp_path, sampler):
    options = {"dropout": 0.3, "shares": (2, 1), "sampler": sampler}
    whole = warm_pool.run(2, train, tmp_path, options)
    stopped = warm_pool.run(2, train, tmp_path, {**options, "stop": 10})
    resumed = warm_pool.run(2, train, tmp_path, {**options, "resume": True})
    assert [worker["epochs"] for worker in resumed] == [[1, 2]] * 2
    assert together(stopped) + together(resumed) == together(whole)
    assert stopped[1]["losses"] + resumed[1]["losses"] == whole[1]["losses"]
    assert (resumed[0]["begun_at"], resumed[0]["steps"]) == (10, 21)
    assert [worker["extra"] for worker in resumed] == [{"note": "on the way", "step": 10}] * 2
    assert_same_end(resumed, whole)


def test_run_resumes_with_another_number_of_workers(warm_pool, tmp_path):
    whole = warm_pool.run(2, train, tmp_path / "whole", {})
    stopped = warm_pool.run(2, train, tmp_path, {"stop": 10})
    for count, shares in ((4, None), (3, (3, 2, 1))):
        resumed = warm_pool.run(count, train, tmp_path, {"resume": True, "shares": shares})
        assert together(stopped) + together(resumed) == together(whole)
        for name, value in whole[0]["state"].items():
            torch.testing.assert_close(resumed[-1]["state"][name], value, rtol=1e-8, atol=1e-9)


def test_run_started_by_one_process_resumes_on_several_workers(warm_pool, tmp_path):
    options = {"sampler": True}
    whole = train(tmp_path / "whole", options)
    stopped = train(tmp_path, {**options, "stop": 10})
    assert stopped["drawn"] == whole["drawn"][:10]
    resumed = warm_pool.run(2, train, tmp_path, {**options, "resume": True})
    assert together([stopped]) == together([whole])[:10]
    assert together(resumed)[:4] == together([whole])[10:14], "the epoch under way is the sampler's"


def test_checkpoint_saved_after_an_epoch_resumes_with_the_next_epoch(warm_pool, tmp_path):
    options = {"dropout": 0.3, "epoch_end": True}
    whole = warm_pool.run(2, train, tmp_path / "whole", options)
    warm_pool.run(2, train, tmp_path, {**options, "stop": 14})
    resumed = warm_pool.run(2, train, tmp_path, {**options, "resume": True})
    assert [worker["epochs"] for worker in resumed] == [[2]] * 2
    assert together(resumed) == together(whole)[14:]
    assert_same_end(resumed, whole)


def test_checkpoint_saved_after_the_last_batch_resumes_at_the_end_of_that_epoch(warm_pool, tmp_path):
    stopped = warm_pool.run(2, train, tmp_path, {"stop": 7})
    resumed = warm_pool.run(2, train, tmp_path, {"resume": True})
    assert [worker["epochs"] for worker in resumed] == [[0, 1, 2]] * 2, (
        "what follows the batches is still to do"
    )
    assert len(stopped[0]["drawn"]) == 7
    assert len(resumed[0]["drawn"]) == 14


def too_few_left(folder, resume):
    """Eleven samples in batches of four: three are left for the last one."""
    with echelon.join(record=False) as session:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.arange(11.0)[:, None]), batch_size=4)
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        if resume:
            session.load(folder)
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
            if session.step == 2 and not resume:
                session.save(folder)
                break


def test_resuming_with_too_few_remaining_samples_for_more_workers_is_refused(warm_pool, tmp_path):
    warm_pool.run(2, too_few_left, tmp_path, False)
    warm_pool.run(3, too_few_left, tmp_path, True)
    with pytest.raises(WorkerFailure, match="3 samples are left of this pass, which cannot be shared by 4"):
        warm_pool.run(4, too_few_left, tmp_path, True)
