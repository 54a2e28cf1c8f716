"""What a worker records when gradients travel in another way: the collective, and who are neighbours."""

from __future__ import annotations

from types import SimpleNamespace

from echelon.comm.meet.links import Links
from echelon.train.arranging import Arranger

_SITES = ((0, 2), (1, 3))  # ranks are not in the order of sites
_FAST, _SLOW = 1e8, 1e6


def _arranger(arranged, events) -> Arranger:
    pairs = [(one, other) for one in range(4) for other in range(4) if one != other]
    near = {pair for site in _SITES for pair in (site, site[::-1])}
    links = Links(
        size=4,
        latency_s={pair: 1e-4 if pair in near else 5e-3 for pair in pairs},
        bytes_per_s={pair: _FAST if pair in near else _SLOW for pair in pairs},
    )
    group = SimpleNamespace(rank=0, arrange=lambda *given: arranged.append(given))
    clock = SimpleNamespace(step=0)
    return Arranger(group, links, [[rank] for rank in range(4)], clock, events.append, lambda *_: None)


def test_the_event_has_the_groups_that_the_workers_are_arranged_in():
    arranged, events = [], []
    _arranger(arranged, events).prepared(4_000_000)
    ((collective, groups),) = arranged
    (event,) = events
    assert event.collective == collective
    assert event.groups == [list(group) for group in groups]
    neighbours = [rank for group in event.groups for rank in group]
    assert {frozenset(neighbours[:2]), frozenset(neighbours[2:])} == {frozenset(site) for site in _SITES}
