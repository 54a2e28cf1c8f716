"""Workers of other launchers divide the cores of their machine."""

from __future__ import annotations

import pytest
import torch

from echelon.comm.meet.rendezvous import Member
from echelon.train import threads


def worker(rank, cores, *, node="a", usable=None, chosen=0):
    return Member(
        rank=rank,
        node=node,
        host=node,
        pid=rank,
        cores=tuple(cores),
        usable_cores=len(cores) if usable is None else usable,
        threads=chosen,
    )


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        ([worker(0, range(8)), worker(1, range(8))], [4, 4]),
        ([worker(0, range(8)), worker(1, range(8), node="b")], [8, 8]),
        ([worker(0, range(4)), worker(1, range(4, 8))], [4, 4]),
        ([worker(0, range(8), usable=4), worker(1, range(8), usable=4)], [2, 2]),
        ([worker(rank, range(2)) for rank in range(5)], [1] * 5),
        ([worker(rank, range(7)) for rank in range(3)], [2] * 3),
        ([worker(0, []), worker(1, [])], [1, 1]),
    ],
    ids=["shared", "two machines", "pinned", "a quota", "more workers than cores", "uneven", "unknown"],
)
def test_cores_are_divided_among_the_workers_that_may_use_them(workers, expected):
    assert threads.divided(workers) == expected


def test_a_chosen_number_stays():
    assert threads.taken([worker(0, range(8), chosen=3), worker(1, range(8))]) == [3, 4]


def test_only_a_number_that_nobody_chose_is_replaced(monkeypatch):
    computing = {"now": 1}
    monkeypatch.setattr(torch, "get_num_threads", lambda: computing["now"])
    assert threads.chosen({}, 8) == 1, "the script's choice"
    assert threads.chosen({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 8) == 0, "MKL's choice, because of MPI"
    assert threads.chosen({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}, 8) == 1
    computing["now"] = 8
    assert threads.chosen({}, 8) == 0
    assert threads.chosen({"MKL_NUM_THREADS": "8"}, 8) == 8
    computing["now"] = 1000003
    assert threads.chosen({}, 8) == 1000003


def test_the_plan_says_that_torchrun_left_cores_unused():
    env = {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}
    chosen = [worker(rank, range(8), chosen=1) for rank in range(2)]
    assert "there are cores for 4 threads in each worker" in threads.reason(chosen, env)
    assert threads.reason(chosen, {"OMP_NUM_THREADS": "1"}) == "OMP_NUM_THREADS=1"
    assert threads.reason([worker(0, range(8))], {}).startswith("each worker's part")
