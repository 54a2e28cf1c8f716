import os
import signal
import subprocess
import sys
import time

from echelon.observe import readiness, stacks
from echelon.observe.run_folder import RunFolder

WORKER = """
from echelon.observe import stacks
stacks.answer()
def spin():
    print("here", flush=True)
    while True:
        pass
spin()
"""


def test_a_worker_that_computes_says_where_it_is_and_a_stopped_one_that_it_is_stopped(tmp_path):
    folder = RunFolder(tmp_path).with_subfolders()
    readiness.ask(folder)
    script = tmp_path / "script.py"
    script.write_text(WORKER)
    env = {**os.environ, "ECHELON_RUN": str(tmp_path), "RANK": "3"}
    with subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE) as worker:
        try:
            worker.stdout.readline()
            said = _until(lambda: stacks.ask(folder, 3, worker.pid))
            assert said.startswith("at script.py:")
            assert "in spin, called from script.py:8 in <module>" in said
            assert readiness.told(folder) == {}
            worker.send_signal(signal.SIGSTOP)
            _until(lambda: _stopped(folder, worker.pid))
        finally:
            worker.kill()


ENDING = """
import faulthandler, signal, time
from echelon.observe import stacks
stacks.answer()
faulthandler.unregister(signal.SIGRTMAX - 1)  # as when Python ends
print("here", flush=True)
input()
"""


def test_a_worker_that_is_about_to_end_is_not_killed_by_the_question(tmp_path):
    folder = RunFolder(tmp_path).with_subfolders()
    readiness.ask(folder)
    env = {**os.environ, "ECHELON_RUN": str(tmp_path), "RANK": "3"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ENDING], env=env, stdin=pipe, stdout=pipe) as worker:
        worker.stdout.readline()
        assert stacks.ask(folder, 3, worker.pid) == ""
        worker.communicate(b"\n")
    assert worker.returncode == 0


def _stopped(folder, pid):
    return stacks.ask(folder, 3, pid).startswith("stopped")


def _until(condition):
    deadline = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_nothing_is_asked_of_a_worker_that_is_not_ready_for_the_signal(tmp_path):
    assert stacks.ask(RunFolder(tmp_path), 0, os.getpid()) == ""


def test_a_stack_is_described_from_the_inside_without_what_starts_the_script():
    dump = """Current thread 0x1 (most recent call first):
  File "/x/data.py", line 7 in read
  File "/x/train.py", line 31 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "/y/echelon/start/worker.py", line 64 in run_program
"""
    assert stacks.described(dump) == "data.py:7 in read, called from train.py:31 in <module>"
