"""Workers that make different calls are stopped within seconds, and told who is doing what.

The deadline of a round is far longer than a test may take. Workers that are slow, or stopped for a while,
are not stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import meet
from echelon.comm.open import open_group
from echelon.errors import EchelonError, MismatchedCalls, PeerLost, RoundTimeout
from echelon.observe.events import WorkersAwaited, read_events
from echelon.observe.run_folder import RunFolder
from warm import WorkerFailure, wait_for

CPU = torch.device("cpu")
HERE = Path(__file__).name
ROUND_S = 3000.0  # longer than pytest lets a test run

on_each_transport = pytest.mark.parametrize("transport", ["tcp", "shm"])


def join(transport, **options):
    settings = {"record": False, "round_timeout_s": ROUND_S, "timeout_s": 90, **options}
    return echelon.join(transport=transport, **settings)


def prepared(session, *things, **options):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), *things, **options)


def forward(model):
    return model(torch.ones(4, 3) + torch.arange(4.0)[:, None]).mean()


def backward(loss):
    loss.backward()


def take(model, optimizer, steps):
    model.eval()  # BatchNorm exchanges nothing
    for _ in range(steps):
        optimizer.zero_grad()
        backward(forward(model))
        optimizer.step()


def line_of(text):
    """Where a text is in this file, as errors name it."""
    lines = Path(__file__).read_text().splitlines()
    return f"({HERE}:{1 + next(at for at, line in enumerate(lines) if text in line)})"


BACKWARD = f"in a backward pass {line_of('    loss.backward()')}"


def attempt(act):
    """The error of a call. All workers stay until all have one: an earlier departure would change it."""
    try:
        result = act()
    except EchelonError as error:
        result = error
    wait_for(int(os.environ["WORLD_SIZE"]))
    return result


def assert_all_say(outcomes, *parts, fix):
    for error in outcomes:
        assert type(error) is MismatchedCalls, error
        for part in ("workers make different calls: ", *parts):
            assert part in error.message
        assert error.fix.startswith(fix)
        assert "rank 0 on " in error.where
        assert error.ranks == tuple(range(len(outcomes)))
    assert len({str(error) for error in outcomes}) <= 2, "those who noticed it say nearly the same"


# The situations ----------------------------------------------------------------------------------


def save_on_the_leader(transport, options):
    with join(transport, **options) as session:
        model, optimizer = prepared(session)
        take(model, optimizer, 2)

        def go_on():
            if session.is_leader:
                session.save("checkpoints")  # by the leader alone
            take(model, optimizer, 2)

        return attempt(go_on)


@on_each_transport
@pytest.mark.parametrize("workers", [2, 4])
def test_save_on_the_leader_only_is_named_beside_the_others_backward_pass(warm_pool, transport, workers):
    outcomes = warm_pool.run(workers, save_on_the_leader, transport, {})
    others = "rank 1" if workers == 2 else "ranks 1 to 3"
    assert_all_say(
        outcomes,
        f"rank 0 is in save() {line_of('# by the leader alone')}",
        f"{others} {BACKWARD}",
        fix="all workers must call save(): move it out of `if session.is_leader`",
    )


@pytest.mark.parametrize("options", [{"codec": "top-k(ratio=0.5)"}, {"overlap": "step"}], ids=str)
def test_save_on_the_leader_only_is_named_with_gradients_in_flight_or_encoded(warm_pool, options):
    outcomes = warm_pool.run(2, save_on_the_leader, "tcp", options)
    for error in outcomes:
        assert type(error) is MismatchedCalls
        assert "rank 0 is in save()" in error.message


def save_before_the_next_pass(transport):
    with join(transport) as session:
        data = TensorDataset(torch.randn(8, 3))
        model, optimizer, loader = prepared(session, DataLoader(data, batch_size=4, shuffle=True))

        def go_on():
            for _ in range(3):
                for (x,) in loader:
                    optimizer.zero_grad()
                    model(x).mean().backward()
                    optimizer.step()
                if session.is_leader:
                    session.save("checkpoints")

        return attempt(go_on)


@on_each_transport
def test_save_on_the_leader_while_others_begin_the_next_pass_is_an_error_on_all(warm_pool, transport):
    """Both are calls on the same channel: whoever gets the other's message first says so."""
    for error in warm_pool.run(2, save_before_the_next_pass, transport):
        assert isinstance(error, EchelonError)
        assert "workers make different calls" in error.message


def save_at_the_end(transport):
    with join(transport) as session:
        model, optimizer = prepared(session)
        take(model, optimizer, 2)
        if session.is_leader:
            session.save("checkpoints")  # at the end
        return session.step


@on_each_transport
def test_a_leader_that_saves_when_the_others_have_ended_says_what_it_needed_them_for(warm_pool, transport):
    outcomes = warm_pool.outcomes(2, save_at_the_end, transport)
    assert outcomes[1] == 2
    assert isinstance(outcomes[0], WorkerFailure)
    error = outcomes[0].error
    assert type(error) is PeerLost
    assert error.ranks == (1,)
    assert "ended while the others were still training" in error.message
    assert f"rank 0 is in save() {line_of('# at the end')}" in error.message
    assert error.fix == "all workers must call save(): move it out of `if session.is_leader`"


def call_on_one(transport, who, call):
    with join(transport) as session:
        model, optimizer = prepared(session)
        take(model, optimizer, 2)

        def go_on():
            if session.rank == who:
                if call == "all_reduce":
                    session.all_reduce(torch.ones(3))
                session.barrier()  # of one worker
            take(model, optimizer, 2)
            session.barrier()

        return attempt(go_on)


@on_each_transport
def test_all_reduce_on_one_rank_only_is_named(warm_pool, transport):
    assert_all_say(
        warm_pool.run(3, call_on_one, transport, 1, "all_reduce"),
        "rank 1 in all_reduce()",
        f"ranks 0 and 2 are {BACKWARD}",
        fix="all workers must call all_reduce(): look for `break`",
    )


@on_each_transport
def test_a_worker_that_leaves_its_loop_for_a_barrier_is_named(warm_pool, transport):
    assert_all_say(
        warm_pool.run(2, call_on_one, transport, 1, "barrier"),
        f"rank 0 is {BACKWARD}",
        f"rank 1 in barrier() {line_of('# of one worker')}",
        fix="all workers must call barrier(): look for `break`",
    )


def forward_on_the_leader(transport):
    with join(transport) as session:
        model, optimizer = prepared(session)
        take(model, optimizer, 2)

        def go_on():
            if session.is_leader:
                model.train()
                forward(model)
                model.eval()
            take(model, optimizer, 2)

        return attempt(go_on)


@on_each_transport
def test_a_forward_pass_with_batchnorm_on_the_leader_only_is_named(warm_pool, transport):
    place = line_of("return model(torch.ones(4, 3)")
    assert_all_say(
        warm_pool.run(2, forward_on_the_leader, transport),
        f"rank 0 is in a forward pass {place}",
        f"rank 1 {BACKWARD}",
        fix="all workers must run this forward pass, in which BatchNorm exchanges statistics: call ",
    )


def search_along_a_line(transport):
    """As LBFGS does: the number of backward passes of a step depends on the worker's own loss.

    At the first step workers decide together how linear layers send their gradients.
    """
    with join(transport) as session:
        model, optimizer = prepared(session)
        model.eval()

        def go_on():
            for _ in range(3):
                for _ in range(1 + session.rank):
                    backward(forward(model))
                optimizer.step()
                session.all_reduce(torch.ones(1))

        return attempt(go_on)


@on_each_transport
def test_different_numbers_of_backward_passes_are_named(warm_pool, transport):
    assert_all_say(
        warm_pool.run(2, search_along_a_line, transport),
        "rank 0 is in an optimizer step",
        f"rank 1 {BACKWARD}",
        fix="all workers must make the same number of backward passes: look for `break`",
    )


def reduce_in_another_order(transport, shared):
    with join(transport) as session:
        groups = [session._group.fork() for _ in range(2)]
        buffers = [
            group.buffer(1000, torch.float32, CPU) if shared else torch.ones(1000) for group in groups
        ]
        order = [0, 1] if session.rank else [1, 0]

        def go_on():
            for at in order:
                groups[at].all_reduce(buffers[at]).wait()

        return attempt(go_on)


@pytest.mark.parametrize(("transport", "shared"), [("tcp", False), ("shm", True), ("shm", False)])
def test_two_reductions_in_different_orders_are_noticed(warm_pool, transport, shared):
    assert_all_say(
        warm_pool.run(3, reduce_in_another_order, transport, shared),
        "ranks 0 to 2 are in ",
        fix="all workers must make the same calls in the same order",
    )


def another_kind_of_operation(transport):
    """Below the session: the same tag, messages of the same size, and another operation."""
    with join(transport) as session:
        group = session._group.fork()
        message = torch.ones(1, dtype=torch.uint8)

        def go_on():
            if session.rank == 0:
                group.all_gather(torch.arange(20, dtype=torch.uint8))  # as long as the head of a message
                time.sleep(3)
            else:
                group.all_to_all([message, message]).received.wait()

        return attempt(go_on)


def test_an_operation_of_another_kind_under_the_same_tag_is_noticed(warm_pool):
    _, error = warm_pool.run(2, another_kind_of_operation, "tcp")
    assert type(error) is MismatchedCalls
    assert "workers make different calls" in error.message


def a_third_one_computes(transport):
    with join(transport) as session:
        model, optimizer = prepared(session)
        take(model, optimizer, 2)

        def go_on():
            if session.rank == 0:
                session.barrier()
            if session.rank == 2:
                deadline = time.monotonic() + 90
                while session._group._engine.loop._dead is None:  # computes until it has heard
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            take(model, optimizer, 2)

        return attempt(go_on)


@on_each_transport
def test_a_worker_that_computes_meanwhile_hears_of_it_too(warm_pool, transport):
    for error in warm_pool.run(3, a_third_one_computes, transport):
        assert type(error) is MismatchedCalls
        assert "rank 0 is in barrier()" in error.message
        assert f"rank 1 {BACKWARD}" in error.message
        assert "rank 2" not in error.message


# Across machines, and under the launcher -----------------------------------------------------------


def on_two_machines(nodes):
    """Machines are emulated by node names: shared memory within each, TCP between them."""
    place = Place.from_environment(os.environ)
    rendezvous = meet(
        place, node=nodes[place.rank], host=socket.gethostname(), pid=os.getpid(), timeout_s=90
    )
    first = open_group(
        rendezvous, place, transport="auto", collective="auto", deadline_s=ROUND_S, timeout_s=90
    )
    try:
        second = first.fork()
        buffers = [group.buffer(1000, torch.float32, CPU) for group in (first, second)]
        pairs = list(zip((first, second), buffers, strict=True))
        order = pairs[::-1] if place.rank == 0 else pairs
        return attempt(lambda: [group.all_reduce(buffer).wait() for group, buffer in order])
    finally:
        rendezvous.announce_departure()
        second.close()
        first.close()


def test_reductions_in_different_orders_are_noticed_across_machines(warm_pool):
    for error in warm_pool.run(4, on_two_machines, ["a", "a", "b", "b"]):
        assert type(error) is MismatchedCalls
        assert 0 in error.ranks


SCRIPT = """
import echelon, torch
session = echelon.join(round_timeout_s=3000)
model = torch.nn.Linear(3, 1)
model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    if session.is_leader and step == 1:
        session.save("checkpoints")
"""


def test_the_launcher_shows_who_is_doing_what(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "echelon", "run", "--workers", "2", "train.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "400", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    said = "rank 0 is in save() (train.py:10), rank 1 in a backward pass (train.py:7)"
    assert f"MismatchedCalls: workers make different calls: {said}" in done.stderr
    assert "fix:   all workers must call save(): move it out of `if session.is_leader`" in done.stderr
    assert "PeerLost" not in done.stderr


# No mismatch -------------------------------------------------------------------------------------


def sleep_in_a_step(transport, seconds):
    """One worker is slow once; returns the leader's events about it."""
    with join(transport, record=True) as session:
        model, optimizer = prepared(session)
        take(model, optimizer, 2)
        if session.rank == 1:
            time.sleep(seconds)
        take(model, optimizer, 2)
        session.barrier()
        step, folder = session.step, session.folder.path
    events = read_events(RunFolder(folder).events_of(0))
    return step, [event for event in events if isinstance(event, WorkersAwaited)]


@on_each_transport
def test_a_slow_worker_is_waited_for_and_the_record_says_so(warm_pool, transport):
    (step, events), (other, _) = warm_pool.run(2, sleep_in_a_step, transport, 5)
    assert step == other == 4
    assert events
    for event in events:
        assert event.awaited == [1]
        assert event.t - event.since > 1.5
    place = line_of("time.sleep(seconds)")
    assert events[-1].doing == f"rank 1 is computing {place}"


@on_each_transport
def test_only_long_waits_are_recorded(warm_pool, transport):
    """On a busy machine also a short sleep may become a long wait."""
    (_, events), _ = warm_pool.run(2, sleep_in_a_step, transport, 0.2)
    assert not [event for event in events if event.t - event.since < 1.5]


def stopped_for_a_while(transport):
    with join(transport, record=True) as session:
        model, optimizer = prepared(session)
        pids = [int(pid) for pid in session.all_gather(torch.tensor(os.getpid()))]
        take(model, optimizer, 2)
        if session.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            waker = threading.Timer(6, os.kill, (pids[1], signal.SIGCONT))
            waker.start()
        take(model, optimizer, 2)
        session.barrier()
        step, folder = session.step, session.folder.path
    events = read_events(RunFolder(folder).events_of(0))
    return step, [event.doing for event in events if isinstance(event, WorkersAwaited)]


@on_each_transport
def test_a_worker_that_is_stopped_for_a_while_goes_on_afterwards(warm_pool, transport):
    (step, told), (other, _) = warm_pool.run(2, stopped_for_a_while, transport)
    assert step == other == 4
    assert "rank 1 does not answer: stopped, overloaded, or cut off from the network" in told


def late_for_a_round(transport):
    """A short deadline: the error says what the late worker does instead."""
    with join(transport) as session:
        group = session._group
        buffer = group.buffer(100, torch.float32, CPU)
        group.barrier()
        group._engine.deadline_s = 4
        if session.rank == 1:
            wait_for(2)
            return None
        try:
            group.all_reduce(buffer).wait()
        except RoundTimeout as error:
            wait_for(2)
            return error


@on_each_transport
def test_the_error_at_a_deadline_says_what_the_late_worker_does(warm_pool, transport):
    error = warm_pool.run(2, late_for_a_round, transport)[0]
    assert "did not arrive within 4 s: rank 1 is computing (warm.py:" in error.message


def bounded_wait(transport):
    """A wait with a timeout ends by itself, so it is never taken for a mismatch."""
    with join(transport) as session:
        groups = [session._group.fork() for _ in range(2)]
        mine, other = (groups[0], groups[1]) if session.rank else (groups[1], groups[0])
        first = mine.all_reduce(torch.ones(3))
        with contextlib.suppress(RoundTimeout):  # the other one's may have ended before
            first.wait(4)
        second = other.all_reduce(torch.ones(3))
        return first.wait().sum().item() + second.wait().sum().item()


def test_waits_with_a_timeout_are_not_taken_for_different_calls(warm_pool):
    assert warm_pool.run(2, bounded_wait, "tcp") == [12, 12]
