"""Freed memory: kept for the next step after `join`, given back with shards, left alone on request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from echelon.train.freed_memory import USERS_SETTINGS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# How many pages do ten rounds touch anew, of 64 MiB each in blocks of different sizes?
FAULTS = """
import resource, sys
import torch
from echelon.train.freed_memory import give_back_freed_memory, keep_freed_memory

def round_of_blocks():
    blocks = [torch.ones(mib << 18) for mib in (1, 31, 2, 14, 16)]

if sys.argv[1] == "join":
    import echelon
    echelon.join(record=False)
if sys.argv[1] == "give back":
    keep_freed_memory()
    round_of_blocks()
    give_back_freed_memory()
torch.set_num_threads(1)
for _ in range(3):
    round_of_blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    round_of_blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

HELD = """
import sys
from pathlib import Path
from echelon.train.freed_memory import give_back_freed_memory, keep_freed_memory

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

before = resident()
if sys.argv[1] == "kept":
    assert keep_freed_memory()
else:
    keep_freed_memory()
    assert give_back_freed_memory()
blocks = [bytearray(b"x") * (1 << 20) for _ in range(64)]
kept = blocks[1::2]
del blocks
print(resident() - before - len(kept))
"""


def printed(script: str, how: str, **env: str) -> int:
    """What a fresh process prints, without settings of whoever runs the tests."""
    own = {name: value for name, value in os.environ.items() if name not in USERS_SETTINGS}
    run = [sys.executable, "-c", script, how]
    done = subprocess.run(run, env={**own, **env}, capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout.split()[-1])


def test_a_worker_touches_the_same_pages_again_in_every_step():
    assert printed(FAULTS, "join") < 200


def test_the_settings_of_the_user_stay():
    assert printed(FAULTS, "join", MALLOC_MMAP_THRESHOLD_="131072") > 10_000


def test_a_worker_with_shards_gives_back_what_was_kept():
    assert printed(FAULTS, "give back") > 10_000
    assert printed(HELD, "given back") < 5 < printed(HELD, "kept")
