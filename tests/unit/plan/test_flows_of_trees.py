"""Hierarchies by closed form: the same bytes between the same workers as their schedules say."""

from __future__ import annotations

import numpy as np
import pytest

from echelon.comm.schedule.collective import COLLECTIVES
from echelon.plan.predict.flows import phases_of

SHAPES = [
    (6, "sizes=[3, 3]"),
    (6, "sizes=[3, 3], rails=false"),
    (7, "sizes=[4, 3]"),
    (9, "sizes=[5, 1, 3]"),
    (9, "sizes=[5, 1, 3], rails=false"),
    (7, "sizes=[4, 3], inner=ps, rails=false"),
    (7, "sizes=[4, 3], inner=ps, outer=ps, rails=false"),
    (8, 'sizes=[2, 2, 2, 2], outer="hierarchical(sizes=[2, 2])"'),
    (9, 'sizes=[3, 2, 2, 2], outer="hierarchical(sizes=[3, 1], inner=ps, rails=false)", rails=false'),
]


def _sent(phases, size):
    sent = np.zeros((size, size))
    for phase in phases:
        np.add.at(sent, (phase.senders, phase.receivers), phase.repeats * phase.fractions)
    return sent


def _scheduled(text, size, length=720720):
    collective = COLLECTIVES.build(text)
    sent = np.zeros((size, size))
    for rank in range(size):
        for step in collective.schedule(rank, size, length):
            for move in step.sends:
                sent[rank, move.peer] += move.length / length
    return sent


@pytest.mark.parametrize(("size", "options"), SHAPES)
def test_every_pair_of_workers_exchanges_what_the_schedules_say(size, options):
    text = f"hierarchical({options})"
    sent, scheduled = _sent(phases_of(text, size), size), _scheduled(text, size)
    # In the model a ring's results go back the way that its parts came; in the schedule they go on.
    assert sent + sent.T == pytest.approx(scheduled + scheduled.T, abs=1e-3)


@pytest.mark.parametrize(("size", "options"), SHAPES)
def test_a_worker_receives_what_it_sends_elsewhere_in_sum(size, options):
    sent = _sent(phases_of(f"hierarchical({options})", size), size)
    assert sent.sum() == pytest.approx(_scheduled(f"hierarchical({options})", size).sum(), abs=1e-3)
