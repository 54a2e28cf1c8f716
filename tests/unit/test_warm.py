"""The warm workers do what their docstring says, also when a test misbehaves in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from echelon.errors import PeerLost
from warm import WarmPool, WorkerFailure


@dataclass(frozen=True)
class Greeting:
    text: str
    rank: int


def _greet(greeting):
    return Greeting(f"{greeting.text} of {os.environ['WORLD_SIZE']}", int(os.environ["RANK"]))


def _sum_of_ranks():
    dist.init_process_group("gloo")
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total


def _surroundings():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "EXTRA")
    return {name: os.environ.get(name) for name in names} | {
        "folder": str(Path.cwd()),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "initialised": dist.is_initialized(),
        "usr2": signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL,
        "random": torch.rand(1).item(),
    }


def _disturb():
    os.environ["EXTRA"] = "left"
    os.environ.pop("RANK")
    os.chdir("/")
    torch.set_num_threads(2)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    dist.init_process_group("gloo", rank=0, world_size=1)


def _raise_on(rank):
    if int(os.environ["RANK"]) == rank:
        print("printed before the end")
        raise PeerLost("rank 7 is gone", ranks=(7,))
    return "fine"


class Unsendable(Exception):
    def __init__(self, first, second):
        super().__init__("cannot be pickled", threading.Lock())


def _raise_unsendable():
    raise Unsendable(1, 2)


def _return_unsendable():
    return threading.Lock()


def _die_on(rank):
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def _hang_on(rank):
    if int(os.environ["RANK"]) == rank:
        threading.Event().wait()
    return os.getpid()


def _leave_thread():
    threading.Thread(target=threading.Event().wait, daemon=True, name="left").start()
    return os.getpid()


def _leave_process():
    return os.getpid(), subprocess.Popen(["sleep", "100"]).pid


def _warn():
    warnings.warn("something", UserWarning, stacklevel=1)


def _pid():
    return os.getpid()


def _outlive_the_leader():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        return None  # it holds the store that the other still asks
    time.sleep(0.3)
    dist.distributed_c10d._get_default_store().set("late", "1")
    return True


def test_results_come_back_by_rank(warm_pool):
    assert warm_pool.run(3, _greet, Greeting("one", 0)) == [Greeting("one of 3", rank) for rank in range(3)]


def test_workers_communicate_in_repeated_calls(warm_pool):
    for world_size in (2, 3, 2):
        assert warm_pool.run(world_size, _sum_of_ranks) == [sum(range(world_size))] * world_size


def test_each_call_has_its_place_port_and_folder(warm_pool):
    first, second = (warm_pool.run(2, _surroundings, env={"EXTRA": "given"}) for _ in range(2))
    for rank, seen in enumerate(first):
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert (seen["MASTER_ADDR"], seen["OMP_NUM_THREADS"], seen["EXTRA"]) == ("127.0.0.1", "1", "given")
    assert first[0]["folder"] == first[1]["folder"] != second[0]["folder"]
    assert first[0]["MASTER_PORT"] == first[1]["MASTER_PORT"] != second[0]["MASTER_PORT"]
    assert not Path(first[0]["folder"]).exists()


def test_worker_state_is_restored_after_a_call(warm_pool):
    before = warm_pool.run(1, _surroundings)[0]
    warm_pool.run(1, _disturb)
    after = warm_pool.run(1, _surroundings)[0]
    assert after["EXTRA"] is None
    for name in ("pid", "threads", "initialised", "usr2", "random"):
        assert after[name] == before[name], name


def test_exception_is_raised_with_rank_traceback_and_output(warm_pool):
    with pytest.raises(WorkerFailure, match="rank 1 raised") as caught:
        warm_pool.run(2, _raise_on, 1)
    assert isinstance(caught.value.error, PeerLost)
    assert caught.value.error.ranks == (7,)
    assert "in _raise_on" in caught.value.detail
    assert "printed before the end" in caught.value.detail
    assert caught.value.outcomes == ["fine", caught.value]


def test_outcomes_contain_every_rank(warm_pool):
    outcomes = warm_pool.outcomes(3, _raise_on, 0)
    assert (outcomes[0].rank, outcomes[0].how) == (0, "raised")
    assert outcomes[1:] == ["fine", "fine"]


@pytest.mark.parametrize("function", [_raise_unsendable, _return_unsendable])
def test_unpicklable_result_or_error_is_a_failure_with_its_traceback(warm_pool, function):
    with pytest.raises(WorkerFailure, match=r"cannot (be )?pickle") as caught:
        warm_pool.run(1, function)
    assert caught.value.how == "raised"


def test_killed_worker_is_reported_and_replaced(warm_pool):
    outcomes = warm_pool.outcomes(2, _die_on, 0)
    assert outcomes[0].how == "died"
    assert "SIGKILL" in str(outcomes[0])
    assert psutil.pid_exists(outcomes[1])
    assert set(warm_pool.run(2, _pid)) >= {outcomes[1]}


def test_hanging_worker_is_killed_and_replaced(warm_pool):
    outcomes = warm_pool.outcomes(2, _hang_on, 1, timeout_s=5)
    assert outcomes[1].how == "hung"
    assert "_hang_on" in outcomes[1].detail, "the stack of the hanging worker is shown"
    pids = warm_pool.run(2, _pid)
    assert outcomes[0] in pids
    assert len(set(pids)) == 2


def test_a_worker_with_a_thread_left_is_replaced(warm_pool):
    [pid] = warm_pool.run(1, _leave_thread)
    assert pid not in warm_pool.pids()
    assert not psutil.pid_exists(pid)


def test_a_worker_with_a_child_left_is_replaced_and_the_child_ended(warm_pool):
    [(pid, child)] = warm_pool.run(1, _leave_process)
    assert pid not in warm_pool.pids()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_warnings_are_errors_in_workers_too(warm_pool):
    with pytest.raises(WorkerFailure, match="UserWarning: something"):
        warm_pool.run(1, _warn)


def test_a_worker_that_returned_keeps_its_group_until_all_are_done(warm_pool):
    assert warm_pool.run(2, _outlive_the_leader) == [None, True]


def test_a_function_inside_another_is_refused(warm_pool):
    with pytest.raises(ValueError, match="top of its module"):
        warm_pool.run(1, lambda: None)


def test_more_workers_than_the_pool_has_are_refused(warm_pool):
    with pytest.raises(ValueError, match="no 5 workers"):
        warm_pool.run(5, _pid)


def test_workers_die_with_a_killed_test_session(tmp_path):
    module = tmp_path / "stays.py"
    module.write_text("import os\n\ndef pid():\n    return os.getpid()\n")
    script = f"""
        import sys, os, signal
        sys.path[:0] = [{str(Path(sys.modules[WarmPool.__module__].__file__).parent)!r}, {str(tmp_path)!r}]
        from stays import pid
        from warm import WarmPool
        print(WarmPool().run(1, pid)[0], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    for _ in range(6000):
        if not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.01)
    pytest.fail("the worker lives on")
