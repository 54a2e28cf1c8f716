"""Unusual uses of deferred and factored models give right results or are refused."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import socket
import time
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import echelon
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet
from echelon.comm.memory import shm
from echelon.comm.open import open_group
from echelon.errors import ModelError, PeerLost
from echelon.reduce import packing as buckets

WORKERS = 2


def rows(seed, count=8, width=16):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def learn(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().sum(1).mean().backward()
    optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_all_same(outcomes):
    for other in outcomes[1:]:
        for ours, theirs in zip(outcomes[0], other, strict=True):
            assert torch.equal(ours, theirs)


def read_on_one_worker(overlap):
    with echelon.join(record=False, round_timeout_s=90, overlap=overlap) as session:
        model = nn.Linear(16, 16)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            learn(model, optimizer, rows(step + session.rank))
            if session.rank == 0:
                float(model.weight.detach().norm())
            session.all_reduce(torch.ones(1))
        return weights(model)


def test_one_worker_can_read_a_deferred_parameter_before_the_others(warm_pool):
    assert_all_same(warm_pool.run(WORKERS, read_on_one_worker, "step"))


def read_in_another_order():
    """Batches grow, so that factors must be gathered again; workers read layers in different orders."""
    with echelon.join(
        record=False, round_timeout_s=90, overlap="step", factors="always", transport="tcp"
    ) as session:
        model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            learn(model, optimizer, rows(10 * step + session.rank, 4 * (step + 1)))
            for layer in model if session.rank else reversed(model):
                layer.weight.sum()
        return weights(model)


def test_deferred_factors_are_right_in_any_order_of_use(warm_pool):
    assert_all_same(warm_pool.run(WORKERS, read_in_another_order))


class Checkpointed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head, self.unused = nn.Linear(width, 4), nn.Linear(width, 2)

    def forward(self, x):
        x = x.requires_grad_()
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def checkpointed(width, factors):
    with echelon.join(record=False, round_timeout_s=90, factors=factors) as session:
        model = Checkpointed(width)
        alone = copy.deepcopy(model)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        for step in range(2):
            learn(model, optimizer, rows(step + session.rank, width=width))
        x = torch.cat([rows(1 + rank, width=width) for rank in range(session.world_size)])
        alone(x).square().sum(1).mean().backward()
        for (name, p), reference in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (reference.grad is None), name
            if p.grad is not None:
                torch.testing.assert_close(p.grad, reference.grad, msg=name)


@pytest.mark.parametrize(("width", "factors"), [(512, "auto"), (16, "always")])
def test_nested_backward_passes_lose_no_gradient_of_a_linear_layer(warm_pool, width, factors):
    warm_pool.run(WORKERS, checkpointed, width, factors)


def twice_checkpointed():
    kept = buckets.FIRST_BYTES, buckets.BUCKET_BYTES
    buckets.FIRST_BYTES = buckets.BUCKET_BYTES = 64
    try:
        with echelon.join(record=False, round_timeout_s=90, factors="never") as session:
            model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
            alone = copy.deepcopy(model)
            model = session.prepare(model)
            for one, x in (
                (model, rows(session.rank)),
                (alone, torch.cat([rows(0), rows(1)])),
            ):
                x = x.requires_grad_()
                for _ in range(2):
                    x = checkpoint(one[0], x, use_reentrant=True)
                try:
                    one[1](x).square().sum(1).mean().backward()
                except ModelError:
                    return
            torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)
    finally:
        buckets.FIRST_BYTES, buckets.BUCKET_BYTES = kept


def test_gradient_computed_in_two_parts_is_reduced_whole_or_refused(warm_pool):
    warm_pool.run(WORKERS, twice_checkpointed)


def interrupted_start():
    """The trainer thread loses the interpreter lock just after it has published that it is ready."""
    place = Place.from_environment(os.environ)
    rendezvous = meet(
        place, node=f"machine-{place.rank // 2}", host=socket.gethostname(), pid=os.getpid(), timeout_s=90
    )
    group = open_group(rendezvous, place, transport="auto", collective="auto", deadline_s=90, timeout_s=90)
    publish = shm.Board.publish

    def slowly(board, row, number):
        publish(board, row, number)
        if row == shm.READY and place.rank == 0:
            time.sleep(0.05)

    shm.Board.publish = slowly
    try:
        buffer = group.buffer(1000, torch.float32, torch.device("cpu"))
        buffer.fill_(place.rank)
        group.all_reduce(buffer).wait()
        return float(buffer[0])
    finally:
        shm.Board.publish = publish
        rendezvous.announce_departure("")
        group.close()
        rendezvous.linger()


def test_reduction_over_rails_can_complete_before_the_trainer_thread_continues(warm_pool):
    assert warm_pool.run(4, interrupted_start) == [6.0] * 4


def freeze_one_and_unfreeze_the_other():
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        model[0].requires_grad_(False)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        learn(model, optimizer, rows(session.rank))
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)
        with contextlib.suppress(ModelError):
            learn(model, optimizer, rows(10 + session.rank))
        return weights(model)


def test_unfreezing_one_layer_while_freezing_the_rest_keeps_workers_identical(warm_pool):
    assert_all_same(warm_pool.run(WORKERS, freeze_one_and_unfreeze_the_other))


def sharing(overlap, loss):
    with echelon.join(record=False, round_timeout_s=90, overlap=overlap, factors="never") as session:
        shared = nn.Linear(16, 16)
        one, other = nn.Sequential(shared, nn.Linear(16, 4)), nn.Sequential(shared, nn.Linear(16, 4))
        alone = copy.deepcopy((one, other))
        try:
            one, other = session.prepare(one, other, loss=loss)
        except ModelError:
            return
        for models, x in (((one, other), rows(session.rank)), (alone, torch.cat([rows(0), rows(1)]))):
            total = sum(model(x).square().sum(1) for model in models)
            (total.mean() if loss == "mean" else total.sum()).backward()
        torch.testing.assert_close(shared.weight.grad + 0, alone[0][0].weight.grad)


@pytest.mark.parametrize(("overlap", "loss"), [("backward", "sum"), ("step", "mean")])
def test_models_that_share_a_layer_get_right_gradients_or_are_refused(warm_pool, overlap, loss):
    warm_pool.run(WORKERS, sharing, overlap, loss)


def use_while_deferred(what):
    with echelon.join(record=False, round_timeout_s=90, overlap="step", factors="never") as session:
        model = nn.Linear(16, 16)
        model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
        learn(model, optimizer, rows(0))
        if what == "pickle":
            pickle.dumps(model)
        else:
            with torch.inference_mode():
                model(rows(0))
        learn(model, optimizer, rows(1))
        pickle.dumps(model)
        return weights(model)


@pytest.mark.parametrize("what", ["pickle", "inference"])
def test_a_deferred_model_can_be_pickled_and_used_in_inference_mode(warm_pool, what):
    assert_all_same(warm_pool.run(WORKERS, use_while_deferred, what))


def scripted(overlap):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)))
    with echelon.join(record=False, round_timeout_s=90, factors="never") as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            model, optimizer = session.prepare(model, optimizer, overlap=overlap)
        except ModelError:
            return None
        for step in range(3):
            learn(model, optimizer, rows(10 * step + session.rank))
        return weights(model)


def test_deferred_scripted_model_trains_the_same_or_is_refused(warm_pool):
    late, prompt = (warm_pool.run(WORKERS, scripted, overlap) for overlap in ("step", "backward"))
    if late[0] is not None:
        assert_all_same([late[0], prompt[0]])


def change_while_deferred(what, overlap):
    """The optimizer is reset, or gets another group, right after a step."""
    with echelon.join(record=False, round_timeout_s=90, factors="never") as session:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
        extra = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fresh = copy.deepcopy(optimizer.state_dict())
        model, optimizer = session.prepare(model, optimizer, overlap=overlap)
        for step in range(3):
            learn(model, optimizer, rows(10 * step + session.rank))
            if what == "reset":
                optimizer.load_state_dict(copy.deepcopy(fresh))
            elif step == 1:
                extra.grad = torch.ones(3)
                optimizer.add_param_group({"params": [extra]})
                model(rows(0))
                extra.grad = None
        return [*weights(model), extra.detach().clone()]


@pytest.mark.parametrize("what", ["reset", "group"])
def test_optimizer_can_be_changed_while_updates_are_deferred(warm_pool, what):
    late, prompt = (
        warm_pool.run(WORKERS, change_while_deferred, what, way) for way in ("step", "backward")
    )
    assert_all_same([late[0], late[1], prompt[0]])


def hooked_later():
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer, overlap="step")
        learn(model, optimizer, rows(0, width=4))
        optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(ModelError) as error:
            learn(model, optimizer, rows(1, width=4))
        return str(error.value)


def test_step_hooks_registered_after_prepare_are_refused(warm_pool):
    for said in warm_pool.run(WORKERS, hooked_later):
        assert "step hooks" in said


def close_while_deferred():
    """Close a session with an error while updates are deferred: the updates are dropped."""
    model = nn.Linear(4, 4)
    session = echelon.join(record=False, round_timeout_s=90)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), overlap="step")
    before = weights(model)
    learn(model, optimizer, rows(session.rank, width=4))
    with contextlib.suppress(PeerLost):  # the other worker may have closed already
        session.barrier()
    session.close("enough")
    model.state_dict()
    return [type(p) is nn.Parameter for p in model.parameters()], assert_all_same([before, weights(model)])


def test_deferred_model_has_plain_torch_parameters_after_the_session_fails(warm_pool):
    assert warm_pool.run(WORKERS, close_while_deferred) == [([True, True], None)] * WORKERS


def pickled_norm():
    with echelon.join(record=False, round_timeout_s=90) as session:
        model = session.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        model(rows(session.rank, width=4)).sum().backward()
        copied = pickle.loads(pickle.dumps(model))
        return type(copied[1]) is nn.BatchNorm1d, torch.equal(copied[1].running_mean, model[1].running_mean)


def test_a_model_with_batch_normalisation_can_be_pickled_in_a_session(warm_pool):
    assert warm_pool.run(WORKERS, pickled_norm) == [(True, True)] * WORKERS
