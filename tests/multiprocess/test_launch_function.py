"""`echelon.launch`: a function on real workers, its results, its errors, and what is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import echelon
from echelon.observe.run_folder import RunFolder


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def runs(place):
    return sorted((place / "runs").glob("*"))


def work(base, *, fails=None, leaves=None, bad=False):
    session = echelon.join()
    session.print(f"here is rank {session.rank}")
    total = round(session.mean(session.rank + 1) * session.world_size)
    if session.rank == fails:
        raise KeyError("a fault of its own")
    if session.rank == leaves:
        os._exit(0)
    return threading.Lock() if bad else base + total * 10 + session.rank


def test_results_come_back_by_rank_and_the_leaders_output_is_shown(place, capsys):
    def closure(base):
        return work(base)

    assert echelon.launch(closure, (100,), workers=2, name="mine", seed=5) == [130, 131]
    printed = capsys.readouterr()
    assert printed.out == "here is rank 0\n"
    assert "starting 2 workers on " in printed.err
    assert "2 workers joined after " in printed.err
    (folder,) = runs(place)
    assert folder.name.endswith("-mine")
    assert sorted(path.name for path in folder.iterdir()) == [
        "command.json", "config.toml", "errors", "events", "logs", "plan.toml", "summary.json",
    ]  # fmt: skip
    assert "seed = 5" in (folder / "plan.toml").read_text()
    assert RunFolder(folder).log_of(1).exists()


def test_an_exception_names_the_worker_and_carries_the_workers_own(place, capsys):
    with pytest.raises(echelon.FunctionFailed) as caught:
        echelon.launch(work, (0,), {"fails": 1}, workers=2, quiet=True)
    assert caught.value.ranks == (1,)
    assert "rank 1 on " in caught.value.message
    assert "failed: KeyError: 'a fault of its own'" in caught.value.message
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.args == ("a fault of its own",)
    (note,) = caught.value.__notes__
    assert 'raise KeyError("a fault of its own")' in note
    assert "echelon/start/" not in note
    assert capsys.readouterr().out == ""
    (folder,) = runs(place)
    assert not (folder / "results").exists()
    assert not (folder / "call").exists()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"bad": True}, "what the function returned cannot be pickled: lock"),
        ({"leaves": 1}, "rank 1 "),
    ],
)
def test_a_worker_without_a_result_is_named(place, kwargs, message):
    with pytest.raises(echelon.FunctionFailed) as caught:
        echelon.launch(work, (0,), kwargs, workers=2, quiet=True)
    assert message in caught.value.message


def _fine():
    return 1


class Unloadable:
    def __reduce__(self):
        return Unloadable._made, ()

    @staticmethod
    def _made():
        raise OSError("there is nothing to load from")


@pytest.mark.parametrize(
    ("function", "args", "settings", "kind", "message"),
    [
        (3, (), {}, echelon.ConfigError, "3 is not a function"),
        (_fine, "ab", {}, echelon.ConfigError, "which is not a tuple"),
        (_fine, (), {"synk": "full"}, echelon.ConfigError, "synk"),
        (_fine, (), {"workers": 0}, echelon.ConfigError, "workers"),
        (_fine, (), {"on": "locl"}, echelon.UnknownName, "unknown launcher 'locl'"),
        (_fine, (threading.Lock(),), {}, echelon.LaunchError, "cannot be pickled"),
        (_fine, (bytes(210_000_000),), {}, echelon.LaunchError, "too much to send to workers"),
    ],
)
def test_calls_that_cannot_work_are_refused_before_anything_starts(
    place, function, args, settings, kind, message
):
    with pytest.raises(kind, match=message):
        echelon.launch(function, args, **{"workers": 2, **settings})
    assert runs(place) == []


def test_a_call_that_cannot_be_unpickled_is_told(place):
    with pytest.raises(echelon.FunctionFailed, match="the call cannot be unpickled: OSError: there is"):
        echelon.launch(_fine, (Unloadable(),), workers=2, quiet=True)


PROGRAM = """
import sys, time
sys.path.insert(0, "modules")
import beside
import echelon

def wait():
    session = echelon.join()
    print("joined", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    if sys.argv[1] == "beside":
        print(echelon.launch(beside.double, (21,), workers=2, quiet=True))
    else:
        try:
            echelon.launch(wait, workers=2)
        except KeyboardInterrupt:
            print("interrupted")
            sys.exit(9)
"""


@pytest.fixture
def program(place):
    (place / "program.py").write_text(textwrap.dedent(PROGRAM))
    (place / "modules").mkdir()
    (place / "modules" / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    return [sys.executable, "program.py"]


def test_a_function_of_a_module_beside_the_program_is_found(place, program):
    done = subprocess.run([*program, "beside"], capture_output=True, text=True)
    assert done.stdout == "[42, 42]\n", done.stderr


def test_ctrl_c_ends_the_workers_and_raises_keyboard_interrupt(place, program):
    process = subprocess.Popen(
        [*program, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "joined\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 9, err
    assert out.endswith("interrupted\n")


def test_it_works_from_a_thread_that_is_not_the_main_one(place):
    found = []
    thread = threading.Thread(target=lambda: found.append(echelon.launch(_fine, workers=2, quiet=True)))
    thread.start()
    thread.join()
    assert found == [[1, 1]]
