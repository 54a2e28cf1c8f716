"""Which worker of pytest-xdist runs which test, and when those run that need the machine for themselves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import scheduler
from scheduler import FilesThenAlone

ROOT = Path(__file__).parents[2]
UNIT = [f"tests/unit/test_{letter}.py::test_{n}" for letter in "ab" for n in range(4)]
LONG = [f"tests/multiprocess/test_{letter}.py::test_{n}" for letter in "cd" for n in range(4)]
ALONE = [f"{file}::test_{n}" for file in scheduler.ALONE[:2] for n in range(2)]
BESIDE = [f"tests/emulated/test_lab_cli.py::test_{n}" for n in range(2)]


class Node:
    """Like a real worker it keeps its last test until it knows what is next."""

    def __init__(self, name):
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.queue = []
        self.ran = []

    def send_runtest_some(self, indices):
        self.queue += indices

    def shutdown(self):
        self.shutting_down = True

    def can_run(self):
        return len(self.queue) > (0 if self.shutting_down else 1)


@pytest.fixture
def play():
    """Lets nodes run tests in turns, the first `lead` times as often; returns (node, test) in order."""

    def run(tests, nodes, lead=1):
        config = SimpleNamespace(
            option=SimpleNamespace(loadscopereorder=True),
            getvalue=lambda name: [f"{nodes}*popen"] if name == "tx" else None,
        )
        plan = FilesThenAlone(config)
        workers = [Node(f"gw{n}") for n in range(nodes)]
        for node in workers:
            plan.add_node(node)
            plan.add_node_collection(node, tests)
        plan.schedule()
        story = []
        turns = [workers[0]] * lead + workers[1:]
        while any(node.can_run() for node in workers):
            for node in turns:
                if node.can_run():
                    index = node.queue.pop(0)
                    story.append((node.gateway.id, tests[index]))
                    plan.mark_test_complete(node, index)
        assert all(node.shutting_down for node in workers)
        return story

    return run


@pytest.mark.parametrize("lead", [1, 5])
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_every_test_runs_once_and_those_that_measure_last_and_on_one_worker(play, nodes, lead):
    story = play(ALONE + UNIT + BESIDE + LONG, nodes, lead)
    assert sorted(test for _, test in story) == sorted(ALONE + UNIT + BESIDE + LONG)
    last = story[-len(ALONE) :]
    assert [test for _, test in last] == ALONE
    assert len({node for node, _ in last}) == 1


def test_files_of_long_folders_come_first(play):
    story = play(UNIT + LONG, 2)
    assert {test for _, test in story[:6]} <= set(LONG)


def test_the_tests_of_a_file_run_on_one_worker(play):
    by_file = {}
    for node, test in play(UNIT + LONG, 3):
        by_file.setdefault(test.partition("::")[0], set()).add(node)
    assert all(len(nodes) == 1 for nodes in by_file.values())


def test_files_that_measure_are_there():
    assert not [file for file in scheduler.ALONE if not (ROOT / file).is_file()]


def test_tests_that_measure_by_themselves_need_one_worker(play):
    story = play(ALONE, 3)
    assert [test for _, test in story] == ALONE
