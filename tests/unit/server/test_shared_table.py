"""A push in shared memory is the worker's again once it is settled, or copied for a worker that goes on."""

from __future__ import annotations

import pytest
import torch

from echelon.errors import LaunchError
from echelon.server import mail
from echelon.server.mail import OwnSegment, map_shared
from echelon.server.shared_table import SharedShard
from echelon.sync.families.serve import WeightedPush
from echelon.sync.families.shard import Push, ShardState
from echelon.sync.policy import POLICIES

LENGTH = 5


class Sharing:
    """A worker's and a server's side of one shard, and the server's state of it."""

    def __init__(self, policy="async"):
        own = OwnSegment(SharedShard.size_bytes(LENGTH, torch.float32))
        self.worker = SharedShard(own.memory, LENGTH, torch.float32)
        self.server = SharedShard(map_shared(own.shared), LENGTH, torch.float32)
        own.close()
        weights = torch.zeros(LENGTH)
        self.state = ShardState(
            POLICIES.build(policy).resolved(), weights, [weights.requires_grad_(True)], self._step, spare=2
        )

    def _step(self):
        self.state.flat.sub_(self.state.parameters[0].grad)

    def push(self, step, value):
        """What a worker and a server do; returns what the server has kept."""
        self.worker.push.fill_(value)
        self.worker.pushed()
        push = Push("gradient", self.server.push, [True], settled=self.server.done)
        self.state.push(0, step, push)
        return push


@torch.no_grad()
def test_a_push_is_applied_from_the_workers_memory_which_is_free_then():
    sharing = Sharing()
    assert sharing.worker.is_free
    for step in range(3):
        sharing.push(step, 2.0)
        assert not sharing.worker.is_free
        sharing.state.apply([WeightedPush(0, step, 1.0)])
        assert sharing.worker.is_free
    sharing.state.read_into(0, sharing.server.weights)
    assert torch.equal(sharing.worker.weights, torch.full((LENGTH,), -6.0))
    memory = sharing.state.push_memory()
    assert memory.data_ptr() != sharing.server.push.data_ptr(), "another's memory is not used again"


@torch.no_grad()
def test_a_dropped_push_is_free():
    sharing = Sharing()
    sharing.push(0, 2.0)
    sharing.state.drop(0, 0)
    assert sharing.worker.is_free
    assert not sharing.state.flat.any()


@torch.no_grad()
def test_a_push_of_a_worker_that_goes_on_is_applied_as_it_was():
    sharing = Sharing()
    sharing.push(0, 2.0)
    sharing.state.take_over(1)
    assert not sharing.worker.is_free, "it is another worker's"
    sharing.state.take_over(0)
    assert sharing.worker.is_free
    sharing.push(1, 8.0)
    sharing.state.apply([WeightedPush(0, 0, 1.0)])
    assert torch.equal(sharing.state.flat, torch.full((LENGTH,), -2.0))
    assert not sharing.worker.is_free
    sharing.state.apply([WeightedPush(0, 1, 1.0)])
    assert torch.equal(sharing.state.flat, torch.full((LENGTH,), -10.0))


def test_memory_of_another_process_is_refused():
    one, other = OwnSegment(4096), OwnSegment(4096)
    mixed = mail.SharedMemory(
        pid=one.shared.pid, handle=one.shared.handle, size_bytes=4096, secret=other.shared.secret
    )
    with pytest.raises(LaunchError, match="different process"):
        map_shared(mixed)
    one.close()
    with pytest.raises(LaunchError):
        map_shared(one.shared)
    other.close()
