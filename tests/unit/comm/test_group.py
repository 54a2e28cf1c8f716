import copy

import pytest
import torch
from torch import nn

from echelon.comm.alone import SoloGroup
from echelon.comm.group import Pending
from echelon.errors import PeerLost


def test_a_finished_operation_gives_its_result_at_once():
    tensor = torch.ones(3)
    pending = Pending.finished(tensor)
    assert pending.done()
    assert pending.wait() is tensor


def test_an_operation_is_waited_for_once_however_often_it_is_asked():
    waits = []

    def wait():
        waits.append(1)
        return torch.ones(1)

    pending = Pending(wait, lambda: bool(waits))
    assert not pending.done()
    assert pending.wait() is pending.wait()
    assert waits == [1]


def test_an_operation_that_fails_raises_for_whoever_waits_each_time():
    def wait():
        raise PeerLost("rank 1 is gone", ranks=(1,))

    pending = Pending(wait, lambda: True)
    for waiting in (pending, pending.then(torch.neg)):
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            waiting.wait()
        with pytest.raises(PeerLost):
            waiting.wait()


def test_a_last_step_runs_when_someone_waits_and_only_once():
    steps = []

    def halve(tensor):
        steps.append(1)
        return tensor / 2

    later = Pending.finished(torch.full((2,), 8.0)).then(halve)
    assert later.done()
    assert steps == []
    assert later.wait().tolist() == later.wait().tolist() == [4.0, 4.0]
    assert steps == [1]


def test_last_steps_run_in_the_order_in_which_they_were_added():
    pending = Pending.finished(torch.tensor(3.0)).then(lambda t: t + 1).then(lambda t: t * 10)
    assert pending.wait().item() == 40.0


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_a_worker_alone_reduces_to_its_own_values_in_place(op):
    tensor = torch.tensor([1.0, -2.0])
    pending = SoloGroup().all_reduce(tensor, op)
    assert pending.done()
    assert pending.wait() is tensor
    assert tensor.tolist() == [1.0, -2.0]


def test_a_worker_alone_gathers_a_copy_of_its_own():
    tensor = torch.tensor([1, 2])
    (gathered,) = SoloGroup().all_gather(tensor)
    gathered += 1
    assert tensor.tolist() == [1, 2]


def test_a_worker_alone_keeps_what_it_broadcasts():
    tensor = torch.tensor([1, 2])
    SoloGroup().broadcast(tensor)
    assert tensor.tolist() == [1, 2]


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256))])
def test_bytes_travel_unchanged(data):
    assert SoloGroup().all_gather_bytes(data) == [data]
    assert SoloGroup().broadcast_bytes(data) == data


def test_a_worker_alone_sends_nothing_and_waits_for_nobody():
    group = SoloGroup()
    assert (group.rank, group.size) == (0, 1)
    assert group.sent_bytes(torch.zeros(1000)) == 0
    group.barrier()
    group.close()
    group.close()


class _OfFour(SoloGroup):
    size = 4


def test_sent_bytes_are_those_of_a_ring():
    assert _OfFour().sent_bytes(torch.zeros(100)) == 2 * 3 * 400 // 4


def test_a_copy_of_a_module_shares_the_group():
    module = nn.Linear(1, 1)
    module.group = SoloGroup()
    assert copy.deepcopy(module).group is module.group
    assert module.group.fork() is module.group
