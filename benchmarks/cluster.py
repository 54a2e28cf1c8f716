"""Starts a benchmark's workers, here or in a lab, and brings back what rank 0 found.

A benchmark calls `measure(...)`; in the workers the same file runs again, with RANK set, and prints a line
of JSON on rank 0. Ours and the peer are measured inside one such run, taking turns.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import LabSpec, parse_lab
from echelon.plan.plan import PlanRequest, make_plan

_DEADLINE_S = 560.0


def is_worker() -> bool:
    """Whether this process is one of the workers."""
    return "RANK" in os.environ


def nodes(count: int, link: str, cpu: float | None = None) -> LabSpec:
    """A lab of equal nodes on one switch."""
    limit = f"cpu = {cpu}\n" if cpu else ""
    return parse_lab(
        f'[[node]]\nname = "n"\ncount = {count}\nlink = "{link}"\n{limit}',
        file="benchmark",
        name="benchmark",
    )


def measure(
    script: str, workers: int, *args: str, lab: LabSpec | None = None, asked: PlanRequest | None = None
) -> Any:
    """Run the script in every worker; returns the JSON that rank 0 printed last."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        seats = stack.enter_context(Lab.up(lab, uuid.uuid4().hex)).seats if lab else []
        address = seats[0].address if seats else "127.0.0.1"
        port = 29500 if seats else _free_port()
        names = [seats[rank].node if seats else "here" for rank in range(workers)]
        plan = make_plan("benchmark", names, asked or PlanRequest(), cores=1)
        (Path(folder) / "plan.toml").write_text(plan.to_toml())
        processes = []
        for rank in range(workers):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": address,
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "BENCH_NODE": names[rank],
                "ECHELON_RUN": folder,  # so that a session knows which machine it is on
            }
            if seats:
                env["GLOO_SOCKET_IFNAME"] = seats[rank].interface
            prefix = seats[rank].prefix if seats else ()
            processes.append(
                subprocess.Popen(
                    [*prefix, sys.executable, str(Path(script).resolve()), *args],
                    env=env,
                    stdout=subprocess.PIPE if rank == 0 else None,
                    text=True,
                )
            )
        try:
            out, _ = processes[0].communicate(timeout=_DEADLINE_S)
            for process in processes[1:]:
                process.wait(timeout=30)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if processes[0].returncode:
        raise SystemExit(f"the benchmark's rank 0 ended with {processes[0].returncode}")
    return json.loads(out.strip().splitlines()[-1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
