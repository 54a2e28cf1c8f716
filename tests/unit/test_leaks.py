"""A test that leaves something behind fails and says what; one that does not, passes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import leaks
from leaks import Snapshot, left_behind, left_on_machine

TESTS = Path(__file__).parents[1]

LEAKING = """
import os, subprocess, threading, time
from pathlib import Path

import leaks

leaks._GRACE_S = 0.2
over = threading.Event()

def test_thread():
    threading.Thread(target=over.wait, name="straggler").start()

def test_daemon():
    over.set()
    threading.Thread(target=threading.Event().wait, daemon=True, name="lurker").start()

def test_thread_that_ends_soon():
    leaks._GRACE_S = 60.0
    threading.Thread(target=time.sleep, args=(0.05,)).start()

def test_process():
    leaks._GRACE_S = 0.2
    global child
    child = subprocess.Popen(["sleep", "90"])

def test_process_was_ended():
    assert child.wait(60) == -9

def test_new_variable():
    os.environ["LEFT"] = "1"

def test_changed_variable():
    os.environ["KEPT"] = "2"

def test_variables_were_put_back():
    assert "LEFT" not in os.environ
    assert os.environ["KEPT"] == "1"

def test_folder(tmp_path):
    os.chdir(tmp_path)

def test_folder_was_put_back():
    assert Path("test_inner.py").exists()

def test_patched(monkeypatch, tmp_path):
    monkeypatch.setenv("LEFT", "1")
    monkeypatch.chdir(tmp_path)

def test_last():
    pass
"""


@pytest.fixture(scope="module")
def inner(tmp_path_factory):
    """What pytest said of each leaking test."""
    folder = tmp_path_factory.mktemp("inner")
    (folder / "test_inner.py").write_text(LEAKING)
    (folder / "pytest.ini").touch()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conftest",
            "-p",
            "no:cacheprovider",
            "-rA",
            "-c",
            "pytest.ini",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(TESTS), "KEPT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("test_thread", "thread straggler"),
        ("test_daemon", "thread lurker (daemon)"),
        ("test_process", "sleep 90"),
        ("test_new_variable", "changed environment: LEFT"),
        ("test_changed_variable", "changed environment: KEPT"),
        ("test_folder", "changed current folder"),
    ],
)
def test_a_leak_is_an_error_that_names_it(inner, test, said):
    assert f"ERROR test_inner.py::{test} " in inner, inner
    assert said in inner.partition(f"ERROR at teardown of {test} ")[2].partition("ERROR at")[0]


@pytest.mark.parametrize(
    "test",
    [
        "test_thread_that_ends_soon",
        "test_process_was_ended",
        "test_variables_were_put_back",
        "test_folder_was_put_back",
        "test_patched",
    ],
)
def test_state_restored_in_time_is_not_a_leak(inner, test):
    assert f"PASSED test_inner.py::{test}\n" in inner
    assert f"ERROR test_inner.py::{test} " not in inner


def test_the_end_of_the_session_is_checked_too(inner):
    assert "ERROR test_inner.py::test_last - Failed: the test session left behind:" in inner


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Folders in place of /dev/shm and /run/netns; `make` puts something there."""
    for name, folder in (("_SHARED_MEMORY", "shm"), ("_NAMESPACES", "netns")):
        monkeypatch.setattr(leaks, name, tmp_path / folder)
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(leaks, "_GRACE_S", 0.0)

    def make(*names):
        for name in names:
            (tmp_path / name).touch()
        return tmp_path

    return make


@pytest.mark.parametrize("compare", [left_behind, left_on_machine])
def test_segments_and_namespaces_that_no_other_program_can_have_made_are_leaks(
    monkeypatch, machine, compare
):
    monkeypatch.setattr(leaks, "_another_maker", lambda others: False)
    before = Snapshot.take()
    machine("shm/segment", "netns/echl-node", "netns/of-someone")
    assert compare(before) == ["shared memory segment", "network namespace echl-node"]


def test_only_marked_objects_are_leaks_beside_another_test_session(monkeypatch, machine):
    monkeypatch.setattr(leaks, "_another_maker", lambda others: True)
    before = Snapshot.take()
    with subprocess.Popen(["true"]) as child:
        Snapshot.take({child.pid})
    ours = [f"torch_{os.getpid()}_17_0", f"torch_{child.pid}_5"]
    machine("shm/psm_17", "shm/torch_1_17_0", "netns/echl-node", f"netns/{leaks.LAB_PREFIX}-node")
    machine(*(f"shm/{name}" for name in ours))
    assert left_behind(before) == [
        *(f"shared memory {name}" for name in sorted(ours)),
        f"network namespace {leaks.LAB_PREFIX}-node",
    ]


def test_a_segment_that_another_program_uses_is_not_ours(monkeypatch, machine):
    monkeypatch.setattr(leaks, "_another_maker", lambda others: False)
    before = Snapshot.take()
    with (machine() / "shm" / "segment").open("w") as ours:
        assert left_behind(before) == ["shared memory segment"]
        # As if the process that has it open had nothing to do with this one.
        monkeypatch.setattr("leaks.descendants", lambda exempt=(): set())
        monkeypatch.setattr("leaks.os.getpid", lambda: 1)
        assert left_behind(before) == []
        assert not ours.closed


def test_a_segment_that_its_maker_removes_meanwhile_is_not_ours(monkeypatch, machine):
    """Looking at all processes takes a while on a busy machine."""
    before = Snapshot.take()
    segment = machine("shm/segment") / "shm" / "segment"
    monkeypatch.setattr(leaks, "_another_maker", lambda others: bool(segment.unlink()))
    assert left_behind(before) == []


@pytest.mark.parametrize("argument", ["pytest", "echelon", "something"])
def test_a_test_session_or_a_program_of_echelon_may_make_segments(argument):
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, argument], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        assert leaks._another_maker([other.pid]) == (argument != "something")
        other.stdin.close()


def test_exempt_process_is_not_a_leak():
    before = Snapshot.take()
    with subprocess.Popen(["sleep", "90"]) as child:
        assert left_behind(before, {child.pid}) == []
        assert child.poll() is None
        child.kill()
