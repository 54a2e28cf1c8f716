"""A command ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

PROGRAM = """
import subprocess, sys, time
from echelon.start.agents.orphan import ending_with_this
print(subprocess.Popen(ending_with_this(["/bin/sleep", "1000"])).pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process when its parent ends")
def test_command_ends_when_the_process_that_started_it_is_killed():
    started = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE)
    assert started.stdout is not None
    command = psutil.Process(int(started.stdout.readline()))
    _until(lambda: command.name() == "sleep")
    started.kill()
    started.wait()
    started.stdout.close()
    _until(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE)


def _until(done):
    until = time.monotonic() + 60
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)
