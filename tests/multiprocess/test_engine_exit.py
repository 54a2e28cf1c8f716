"""How the processes of workers end: with their own exit code, whatever torch's threads still hold."""

from __future__ import annotations

import subprocess
import sys

# Forked after the imports, since that is what takes long; each child ends as a script does.
LEAVES = """
import gc, os, socket, sys
import torch, torch._dynamo, echelon
from echelon.comm.c10d import C10dGroup

def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])

def work(rank, port, transport):
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    session = join(record=False, transport=transport, round_timeout_s=20)
    fork = session._group.fork()
    globals()["held"] = [fork, getattr(fork, "_group", None)]  # as a traceback would
    for _ in range(40):
        fork.all_reduce(torch.ones(300_000))
    sys.exit(7)

torch.set_num_threads(1)
join = echelon.join
gc.freeze()
for transport in ("c10d", "c10d", "tcp"):
    port, pids = free_port(), []
    for rank in range(4):
        pids.append(os.fork())
        if not pids[-1]:
            work(rank, port, transport)
    print(transport, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)
"""


def test_workers_that_end_with_reductions_under_way_are_not_aborted():
    """Gloo's threads let go of tensors when there is no interpreter any more."""
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=100)
    expected = [f"{transport} [7, 7, 7, 7]" for transport in ("c10d", "c10d", "tcp")]
    assert done.stdout.splitlines() == expected, done.stderr
