"""What do strangers cost a run? Two workers train over TCP in peace, and while a third process attacks.

    python benchmarks/attack.py [--rounds 3] [--seconds 8]

The attacker holds 1,500 idle connections to the port where workers meet, opens new ones as fast as the port
takes them up to `--rate` a second, and sends junk on some. Workers may open 1,024 files. Printed: steps per
second and the leader's peak memory, medians of rounds that take turns, and ratios. The attacker runs on
the same machine at the lowest priority, so that its own computing counts little.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

_IDLE = 1500
_FILES = 1024
_JOIN_S = 60.0


def work(seconds: float) -> None:
    """One worker; the leader prints steps per second and its peak memory in MB."""
    import torch
    from torch import nn

    import echelon

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, limit), limit))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with echelon.join(record=False, transport="tcp", timeout_s=_JOIN_S, round_timeout_s=_JOIN_S) as session:
        model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        steps, begun, until = 0, 0.0, time.monotonic() + seconds
        go_on = True
        while go_on:
            optimizer.zero_grad()
            model(torch.randn(64, 512)).square().mean().backward()
            optimizer.step()
            steps += 1
            if steps == 20:
                begun = time.monotonic()  # what came before is measuring and choosing
            if steps % 20 == 0:  # all workers end together
                late = torch.tensor([float(time.monotonic() > until)])
                go_on = session.all_reduce(late).item() == 0
        if session.rank == 0:
            peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
            rate = (steps - 20) / (time.monotonic() - begun)
            print(f"result {rate} {int(peak.group(1)) / 1024 if peak else 0}")


def attack(port: int, rate: float) -> None:
    """Until it is ended."""
    os.nice(19)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    held: list[socket.socket] = []
    count = 0
    while True:
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", port), timeout=1)
            count += 1
            held.append(sock)
            if count % 4 == 0:
                sock.sendall(os.urandom(2000))
        if len(held) > _IDLE:
            held.pop(0).close()
        time.sleep(1 / rate)


def run(seconds: float, rate: float | None) -> tuple[float, float]:
    """Steps per second and peak MB of one run; attacked at a rate, or in peace."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    env |= {"ECHELON_SECRET": secrets.token_hex(32), "LOCAL_WORLD_SIZE": "2"}
    here = [sys.executable, __file__, "--seconds", str(seconds)]
    attacker = None
    if rate is not None:
        attacker = subprocess.Popen([*here, "--attack", str(port), "--rate", str(rate)])
    try:
        workers = [
            subprocess.Popen(
                [*here, "--work"],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        said = [worker.communicate(timeout=seconds + 2 * _JOIN_S)[0] for worker in workers]
    finally:
        if attacker is not None:
            attacker.kill()
            attacker.wait()
    found = re.search(r"result (\S+) (\S+)", said[0])
    if found is None or any(worker.returncode for worker in workers):
        raise SystemExit(f"a worker failed: exit codes {[worker.returncode for worker in workers]}")
    return float(found.group(1)), float(found.group(2))


def main() -> None:
    """Print the figures."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--seconds", type=float, default=8.0, help="of each training")
    asked.add_argument("--rate", type=float, default=300.0, help="new connections in a second")
    asked.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    asked.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    told = asked.parse_args()
    if told.work:
        work(told.seconds)
        return
    if told.attack:
        attack(told.attack, told.rate)
        return
    peace, attacked = [], []
    for _ in range(told.rounds):
        peace.append(run(told.seconds, None))
        attacked.append(run(told.seconds, told.rate))
    for name, found in (("in peace", peace), ("attacked", attacked)):
        rates = ", ".join(f"{rate:.1f}" for rate, _ in found)
        print(f"{name}: {rates} steps/s; peak {statistics.median(mb for _, mb in found):.0f} MB")
    ratio = statistics.median(a[0] for a in attacked) / statistics.median(p[0] for p in peace)
    grown = statistics.median(a[1] for a in attacked) - statistics.median(p[1] for p in peace)
    print(f"attacked / peace: {ratio:.3f} of the steps, {grown:+.1f} MB at the leader")


if __name__ == "__main__":
    main()
