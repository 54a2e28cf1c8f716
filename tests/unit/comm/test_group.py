import copy

import pytest
import torch
from torch import nn

from echelon.comm.alone import SoloGroup


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_single_worker_reduces_to_its_own_values_in_place(op):
    tensor = torch.tensor([1.0, -2.0])
    future = SoloGroup().all_reduce(tensor, op)
    assert future.done()
    assert future.wait() is tensor
    assert tensor.tolist() == [1.0, -2.0]


def test_single_worker_gathers_a_copy_of_its_own_tensor():
    tensor = torch.tensor([1, 2])
    (gathered,) = SoloGroup().all_gather(tensor)
    gathered += 1
    assert tensor.tolist() == [1, 2]


def test_single_worker_keeps_the_tensor_it_broadcasts():
    tensor = torch.tensor([1, 2])
    SoloGroup().broadcast(tensor)
    assert tensor.tolist() == [1, 2]


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256))])
def test_single_worker_gathers_and_broadcasts_bytes_unchanged(data):
    assert SoloGroup().all_gather_bytes(data) == [data]
    assert SoloGroup().broadcast_bytes(data) == data


def test_single_worker_neither_sends_nor_waits():
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
