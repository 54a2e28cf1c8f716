"""Groups that are arranged anew between two operations: sums stay right, on the group and on its forks."""

from __future__ import annotations

import os
import socket

import pytest
import torch

from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet
from echelon.comm.open import open_group

ARRANGEMENTS = [
    ("hierarchical(outer=direct)", [[3, 1], [0, 2]]),
    ("direct(weights=[4, 2, 1, 0])", []),
    ("ring", [[2, 0, 3, 1]]),
    ("hierarchical(rails=false)", [[0, 1, 3], [2]]),
]


def sums(places, arrangements, lengths):
    place = Place.from_environment(os.environ)
    node = f"machine-{places[place.rank]}"
    rendezvous = meet(place, node=node, host=socket.gethostname(), pid=os.getpid(), timeout_s=90)
    group = open_group(rendezvous, place, transport="auto", collective="auto", deadline_s=90, timeout_s=90)
    fork = group.fork()
    found, reasons = [], []
    for at, (collective, groups) in enumerate(arrangements):
        late = fork.all_reduce(torch.full((1000,), float(place.rank)))  # in flight while it changes
        if at % 2:
            fork.arrange(collective, groups)
        else:
            group.arrange(collective, groups)
        later = group.fork()
        for length in lengths:
            for member in (group, fork, later):
                tensor = torch.full((length,), 10.0**place.rank)
                member.all_reduce(tensor).wait()
                found.append(tensor.unique().tolist())
                buffer = member.buffer(length, torch.float32, torch.device("cpu")).fill_(10.0**place.rank)
                member.all_reduce(buffer).wait()
                found.append(buffer.unique().tolist())
        found.append(late.wait().unique().tolist())
        reasons.append(group.reason(1000))
    rendezvous.announce_departure("")
    group.close()
    return found, reasons


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [0, 1, 0, 2], [0, 0, 0, 0]], ids=["apart", "pair", "one"])
def test_sums_stay_right_when_workers_are_arranged_anew(warm_pool, places):
    arrangements = ARRANGEMENTS if places[0] != places[2] else [ARRANGEMENTS[1], ("ring", [[2, 0], [3, 1]])]
    lengths = [1, 5, 70_001]
    results = warm_pool.run(4, sums, places, arrangements, lengths)
    expected = (([[1111.0]] * 2 * 3) * len(lengths) + [[6.0]]) * len(arrangements)
    for found, reasons in results:
        assert found == expected
        assert reasons == [f"{collective}, arranged for this cluster" for collective, _ in arrangements]
