"""How a stack that faulthandler wrote is told in a line."""

from __future__ import annotations

from pathlib import Path

from echelon.observe import stacks

_PACKAGE = Path(stacks.__file__).parents[1]


def dump(*frames: str) -> str:
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in (f.split() for f in frames)]
    return "\n".join(["Current thread 0x1 (most recent call first):", *lines, ""])


def test_the_innermost_frames_are_told_without_those_that_start_the_script():
    said = stacks.described(
        dump("/home/a/load.py 7 read", "/home/a/train.py 30 <module>", f"{_PACKAGE}/start/worker.py 9 main")
    )
    assert said == "load.py:7 in read, called from train.py:30 in <module>"


def test_of_a_worker_that_waits_in_echelon_the_scripts_line_is_told():
    said = stacks.described(
        dump(
            f"{_PACKAGE}/comm/future.py 218 wait",
            "/usr/lib/python3/site-packages/torch/autograd/graph.py 3 backward",
            f"{_PACKAGE}/train/weighing.py 5 backward",
            "/home/a/train.py 30 step",
            "/home/a/train.py 40 <module>",
        )
    )
    assert said == "train.py:30 in step, in a call of Echelon, called from train.py:40 in <module>"


def test_a_worker_that_hangs_in_torch_is_told_as_it_is():
    said = stacks.described(
        dump("/site-packages/torch/utils/data.py 3 next", "/home/a/train.py 30 <module>")
    )
    assert said == "data.py:3 in next, called from train.py:30 in <module>"


def test_a_deep_stack_is_cut():
    said = stacks.described(dump(*(f"/home/a/train.py {line} go" for line in range(9))))
    assert said.endswith("train.py:3 in go, ...")
    assert stacks.described("") == ""
