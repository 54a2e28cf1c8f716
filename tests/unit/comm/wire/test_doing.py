"""What a worker is doing, told from a stack: the call in words, and the line of the script."""

from __future__ import annotations

import inspect
import sysconfig
import threading

import pytest
import torch
from torch import nn

from echelon.comm.wire import doing
from echelon.comm.wire.doing import Doing, StackFrame, awaited, describe, listed, sentence, stack_of
from echelon.train.session import Session

PYTHON = sysconfig.get_paths()["stdlib"]
PACKAGES = sysconfig.get_paths()["purelib"]
LAUNCHER = [
    StackFrame("__main__", "main", "/opt/lib/echelon/start/worker.py", 9),
    StackFrame("echelon.start.worker", "run_program", "/opt/lib/echelon/start/worker.py", 50),
    StackFrame("runpy", "run_path", "<frozen runpy>", 1),
]
SCRIPT = StackFrame("__main__", "<module>", "/home/me/train.py", 41)
HELPER = StackFrame("helpers", "train_epoch", "/home/me/helpers.py", 7)
TORCH = StackFrame("torch._tensor", "Tensor.backward", f"{PACKAGES}/torch/_tensor.py", 500)


def ours(module, function):
    return StackFrame(f"echelon.{module}", function, "/opt/lib/echelon/any.py", 1)


WAIT = ours("comm.future", "Future._block")


LOADER = ours("train.loader", "SharedLoader.__iter__")
CASES = {
    "in save()": [
        ours("train.script_checkpoints", "ScriptCheckpoints.save"),
        ours("train.resume", "gather"),
        WAIT,
    ],
    "in all_reduce()": [ours("train.collectives", "ScriptCollectives.all_reduce"), WAIT],
    "in gather_for_metrics()": [ours("train.metrics", "ScriptMetrics.gather_for_metrics"), WAIT],
    "in prepare()": [
        ours("train.script_prepare", "ScriptPrepare.prepare"),
        ours("reduce.reducer", "Reducer._pack"),
    ],
    "in wait()": [ours("comm.future", "CallerFuture.wait"), WAIT],
    "using a parameter": [TORCH, ours("reduce.deferred", "DeferredParameter.__torch_function__"), WAIT],
}
PLACES = [
    (
        doing.AT_EPOCH_END,
        [ours("train.script_loop", "ScriptLoop.epochs"), ours("train.families.mix", "finish")],
    ),
    (doing.AT_SCRIPT_END, [ours("train.session", "Session.close"), ours("comm.engine", "Engine.close")]),
    (doing.AT_SCRIPT_END, [ours("train.session", "Session.__exit__"), WAIT]),
    (doing.AT_PASS, [LOADER, ours("train.script_loop", "ScriptLoop._on_pass")]),
    (doing.AT_PASS, [LOADER, ours("train.loader", "SharedLoader._told"), WAIT]),
    (doing.READING, [LOADER, TORCH]),
    (doing.IN_BACKWARD, [TORCH, ours("reduce.reducer", "Reducer._finish"), WAIT]),
    (doing.IN_BACKWARD, [TORCH, ours("reduce.encoded.bucket", "EncodedBucket._start"), WAIT]),
    (doing.IN_BACKWARD, [TORCH, ours("server.client", "ServerClient._gradient_ready"), WAIT]),
    (doing.IN_BACKWARD, [TORCH, ours("train.batchnorm", "_Normalise.backward"), WAIT]),
    (doing.IN_FORWARD, [TORCH, ours("train.batchnorm", "_Global.forward"), TORCH, WAIT]),
    (doing.IN_STEP, [ours("reduce.deferred", "_DeferredStep.__call__"), WAIT]),
    (doing.IN_STEP, [TORCH, ours("train.families.reduce", "ReduceSynchronizer.adopt.<locals>.<lambda>")]),
    (doing.IN_STEP, [ours("train.families.synchronizer", "_ReplacedStep.__call__"), WAIT]),
    (doing.COMPUTING, [TORCH]),
    (doing.COMPUTING, []),
]


@pytest.mark.parametrize(("call", "inside"), [*CASES.items(), *PLACES])
@pytest.mark.parametrize("outside", [[], LAUNCHER], ids=["alone", "launched"])
def test_the_outermost_call_of_the_library_inside_the_script_is_named(outside, inside, call):
    assert describe([*outside, SCRIPT, *inside]) == Doing(call, "train.py:41")


def test_the_line_is_that_of_the_innermost_code_of_the_user():
    """As in a closure of LBFGS, which torch calls."""
    backward = ours("reduce.reducer", "Reducer._finish")
    stack = [SCRIPT, TORCH, HELPER, TORCH, backward, WAIT]
    assert describe(stack) == Doing(doing.IN_BACKWARD, "helpers.py:7")


def test_code_of_the_user_that_the_library_calls_computes():
    dataset = StackFrame("data", "Words.__getitem__", "/home/me/data.py", 30)
    stack = [SCRIPT, ours("train.loader", "SharedLoader.__iter__"), TORCH, dataset]
    assert describe(stack) == Doing(doing.COMPUTING, "data.py:30")


@pytest.mark.parametrize(
    "foreign",
    [
        StackFrame("contextlib", "_GeneratorContextManager.__exit__", f"{PYTHON}/contextlib.py", 144),
        StackFrame("tqdm.std", "tqdm.__iter__", f"{PACKAGES}/tqdm/std.py", 1181),
        StackFrame("some.hooks", "call", "/opt/other/dist-packages/some/hooks.py", 3),
        StackFrame("torch.compiled", "call", "<eval_with_key>.3", 3),
    ],
)
def test_code_of_packages_is_not_the_script(foreign):
    stack = [SCRIPT, foreign, ours("train.session", "Session.on_leader"), foreign, WAIT]
    assert describe(stack) == Doing("in on_leader()", "train.py:41")


def test_a_thread_without_a_script_has_no_line():
    assert str(describe([ours("train.session", "Session.save")])) == "in save()"
    assert describe([]) == Doing(doing.COMPUTING, "")


@pytest.mark.parametrize(
    "name", [name for name, _ in inspect.getmembers(Session, callable) if not name.startswith("_")]
)
def test_every_public_method_of_a_session_has_words(name):
    assert describe([SCRIPT, ours("train.session", f"Session.{name}"), WAIT]).call != doing.COMPUTING


# The stacks of real threads ----------------------------------------------------------------------


def seen_in(act):
    """What the thread is doing that runs `act(look)`, at the moment at which it calls `look`."""
    found = []

    def work():
        act(lambda *_: found.append(describe(stack_of(threading.get_ident()))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[-1].site


def test_a_hook_in_a_backward_pass_is_seen_with_the_line_that_called_backward():
    def act(look):
        model = nn.Linear(2, 1)
        model.weight.register_post_accumulate_grad_hook(look)
        model(torch.ones(1, 2)).sum().backward()

    assert seen_in(act).startswith("test_doing.py:")


def test_a_generator_is_seen_inside_the_loop_that_asks_it():
    def numbers(look):
        yield 1
        look()

    def act(look):
        list(numbers(look))

    assert seen_in(act).startswith("test_doing.py:")


def test_a_thread_that_has_ended_has_no_stack():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert stack_of(-1) == []


# Sentences ---------------------------------------------------------------------------------------

SAVE, BACKWARD = Doing("in save()", "train.py:52"), Doing(doing.IN_BACKWARD, "train.py:41")


@pytest.mark.parametrize(
    ("doings", "said"),
    [
        (
            {0: SAVE, 1: BACKWARD},
            "rank 0 is in save() (train.py:52), rank 1 in a backward pass (train.py:41)",
        ),
        (
            {2: BACKWARD, 0: BACKWARD, 1: SAVE},
            "ranks 0 and 2 are in a backward pass (train.py:41), rank 1 in save() (train.py:52)",
        ),
        ({3: Doing()}, "rank 3 is computing"),
        ({}, ""),
    ],
)
def test_workers_that_do_the_same_are_named_together(doings, said):
    assert sentence(doings) == said


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([4], "rank 4"),
        ([1, 2], "ranks 1 and 2"),
        ([1, 2, 3], "ranks 1 to 3"),
        ([0, 2, 5], "ranks 0, 2 and 5"),
        ([*range(0, 40, 2)], "ranks 0, 2, 4, 6, 8, 10 and 14 more"),
    ],
)
def test_ranks_are_listed_in_words(ranks, said):
    assert listed(ranks) == said


def test_awaited_workers_are_described_as_far_as_they_answer():
    doings = {1: BACKWARD, 2: SAVE}
    assert awaited([1], doings, []) == "rank 1 is in a backward pass (train.py:41)"
    mute = "does not answer: stopped, overloaded, or cut off from the network"
    assert awaited([1], doings, [1]) == f"rank 1 {mute}", "what it did before is not what it does"
    assert awaited([1, 3], doings, [3]) == f"rank 1 is in a backward pass (train.py:41), rank 3 {mute}"
    assert awaited([5], doings, []) == ""
