"""How fast is an all-reduce? Echelon's transports against Gloo, taking turns in one run.

    python benchmarks/allreduce.py [--quick] [--json] [--only shm|tcp|lab|small]

shm    workers of one machine, buffers in shared memory, 2 and 4 workers
tcp    two workers over loopback; also the bare exchange of the same bytes over one plain socket, without
       sums, frames or checksums, which is what the kernel's copying takes
lab    four emulated nodes at 1 Gb/s (root): also as part of the wire limit, 2(P-1)/P of the bytes at
       the rate that one plain TCP stream reaches there, measured in the same run
small  4 kB among 8 workers: the chosen collective against the ring
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import sys
import time
from typing import Any

import torch

import cluster
from echelon.comm.c10d import C10dGroup
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.group import Group
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous, interface_address, meet
from echelon.comm.schedule.collectives.auto import AutoCollective


def work(kind: str, sizes: list[float], repeats: int) -> None:
    """One worker's part."""
    torch.set_num_threads(1)
    place = Place.from_environment(os.environ)
    rendezvous = meet(
        place, node=os.environ["BENCH_NODE"], host=socket.gethostname(), pid=os.getpid(), timeout_s=120
    )
    gloo = C10dGroup.connect(rendezvous, place, deadline_s=60)
    engine = Engine.connect(rendezvous, place, shared_memory=kind == "shm", deadline_s=60, timeout_s=60)
    ours = EngineGroup(engine, "auto")
    peer: Group = EngineGroup(engine, "ring") if kind == "small" else gloo
    rows = [compare(ours, peer, size, repeats) for size in sizes]
    found: dict[str, Any] = {"rows": rows}
    if kind == "tcp":
        for row in rows:
            row["bare"] = bare(rendezvous, place, int(row["MB"] * 1e6), repeats)
    if kind == "lab":
        found["stream_bytes_per_s"] = stream(rendezvous, place)
    if place.rank == 0:
        print(json.dumps(found), flush=True)
    gloo.barrier()
    ours.close()
    gloo.close()


def compare(ours: Group, peer: Group, megabytes: float, repeats: int) -> dict[str, float]:
    """Median seconds of each; the barrier before each turn is the peer's for both."""
    length = int(megabytes * 1e6 / 4)
    buffers = {
        "ours": (ours, ours.buffer(length, torch.float32, torch.device("cpu"))),
        "peer": (peer, torch.zeros(length)),
    }
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for turn in range(repeats + 2):
        for name in ("ours", "peer") if turn % 2 else ("peer", "ours"):
            group, tensor = buffers[name]
            peer.barrier()
            begun = time.perf_counter()
            group.all_reduce(tensor).wait()
            if turn >= 2:
                times[name].append(time.perf_counter() - begun)
    return {"MB": megabytes, **{name: statistics.median(values) for name, values in times.items()}}


def stream(rendezvous: Rendezvous, place: Place) -> float:
    """The rate of one plain TCP stream from rank 1 to rank 0, in bytes per second; others do nothing."""
    count = 64 << 20
    if place.rank == 0:
        with socket.create_server((interface_address(rendezvous, place), 0)) as listener:
            rendezvous.store.set("stream", f"{listener.getsockname()[0]} {listener.getsockname()[1]}")
            sock, _ = listener.accept()
            with sock:
                buffer = bytearray(1 << 20)
                got = sock.recv_into(buffer)
                begun, first = time.perf_counter(), got
                while got < count:
                    got += sock.recv_into(buffer)
                rate = (got - first) / (time.perf_counter() - begun)
        rendezvous.store.set("streamed", "1")
        return rate
    if place.rank == 1:
        host, port = rendezvous.store.get("stream").decode().split()
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(bytes(count))
            rendezvous.store.get("streamed")
    return 0.0


def bare(rendezvous: Rendezvous, place: Place, count: int, repeats: int) -> float:
    """Median seconds in which two workers send each other so many bytes at once, and nothing else."""
    key = f"bare/{count}"
    if place.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            rendezvous.store.set(key, str(listener.getsockname()[1]))
            sock, _ = listener.accept()
    else:
        sock = socket.create_connection(("127.0.0.1", int(rendezvous.store.get(key))))
    out, into = memoryview(bytearray(count)), memoryview(bytearray(count))
    times = []
    with sock:
        for _ in range(repeats):
            sock.setblocking(True)
            sock.sendall(b"x")
            sock.recv(1)
            begun = time.perf_counter()
            _both_ways(sock, out, into)
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def _both_ways(sock: socket.socket, out: memoryview, into: memoryview) -> None:
    sock.setblocking(False)
    poll = select.poll()
    sent = got = 0
    while sent < len(out) or got < len(into):
        wanted = (select.POLLOUT if sent < len(out) else 0) | (select.POLLIN if got < len(into) else 0)
        poll.register(sock, wanted)
        ((_, event),) = poll.poll()
        with contextlib.suppress(BlockingIOError):
            if event & select.POLLIN:
                got += sock.recv_into(into[got : got + (1 << 20)])
        with contextlib.suppress(BlockingIOError):
            if event & select.POLLOUT:
                sent += sock.send(out[sent : sent + (1 << 20)])


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--quick", action="store_true", help="fewer repeats")
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default="shm,tcp,lab,small")
    asked = options.parse_args()
    wanted = asked.only.split(",")
    repeats = "9" if asked.quick else "25"
    rows: list[dict[str, Any]] = []

    def take(kind: str, workers: int, sizes: str, lab: Any = None, target: float = 0.0) -> None:
        found = cluster.measure(__file__, workers, kind, sizes, repeats, lab=lab)
        for row in found["rows"]:
            row = {
                "what": kind,
                "workers": workers,
                **row,
                "ratio": row["peer"] / row["ours"],
                "target": target,
            }
            if kind == "lab":
                limit = 2 * (workers - 1) / workers * row["MB"] * 1e6 / found["stream_bytes_per_s"]
                row |= {"of the limit": limit / row["ours"], "peer of the limit": limit / row["peer"]}
            rows.append(row)
            if not asked.json:
                show(row)

    if "shm" in wanted:
        take("shm", 2, "1,4,16,64", target=5.0)
        take("shm", 4, "1,4,16,64", target=5.0)
    if "tcp" in wanted:
        take("tcp", 2, "16,64", target=1.5)
    if "lab" in wanted:
        take("lab", 4, "16", lab=cluster.nodes(4, "1gbit"))
    if "small" in wanted:
        take("small", 8, "0.004", target=1 / 0.6)
    if asked.json:
        print(json.dumps(rows))


def show(row: dict[str, Any]) -> None:
    """One line."""
    line = (
        f"{row['what']:6s} {row['workers']} workers {row['MB']:7.3f} MB: ours {row['ours'] * 1e3:9.3f} ms, "
        f"peer {row['peer'] * 1e3:9.3f} ms, {row['ratio']:5.2f} x"
    )
    if row["target"]:
        line += f" (target {row['target']:.2f})"
    if "of the limit" in row:
        line += f"; of the wire limit: ours {row['of the limit']:.3f}, peer {row['peer of the limit']:.3f}"
    if "bare" in row:
        line += f"; bare exchange {row['bare'] * 1e3:.3f} ms, {row['peer'] / row['bare']:.2f} x"
    if row["what"] == "small":
        chosen = AutoCollective().choose(row["workers"], int(row["MB"] * 1e6 / 4))
        line += f"; ours is {chosen}, the peer our ring"
    print(line, flush=True)


if __name__ == "__main__":
    if cluster.is_worker():
        work(sys.argv[1], [float(size) for size in sys.argv[2].split(",")], int(sys.argv[3]))
    else:
        main()
