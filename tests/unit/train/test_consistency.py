"""A worker that joins has prepared something else than the others: it is named there."""

from __future__ import annotations

import msgspec
import pytest
from torch import nn

from echelon.comm.alone import SoloGroup
from echelon.errors import ModelError
from echelon.train import consistency


class Changes:
    """Of a worker in slot 4 that is no member yet."""

    slot = 4

    def __init__(self, first):
        self.first = first

    def described(self, mine):
        return msgspec.json.encode(self.first)


def test_a_model_that_differs_from_the_first_workers_is_named_with_the_machine_that_joins():
    group = SoloGroup()
    facts = [consistency.describe_model(nn.Linear(3, width), 0) for width in (2, 5)]
    group.changes = Changes(facts[0])
    consistency.check(group, facts[0], ["a"] * 4 + ["e"])
    with pytest.raises(ModelError) as raised:
        consistency.check(group, facts[1], ["a"] * 4 + ["e"])
    assert "parameter weight is [5, 3] torch.float32 trained on rank 4" in raised.value.message
    assert raised.value.where == "prepare, rank 4 on e"
