"""While a run goes on, a stranger that reaches its port neither reads nor changes anything."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

import echelon
from echelon.comm.meet import certs
from echelon.comm.meet.board import AddCount, encode
from echelon.comm.meet.strangers import opening
from echelon.comm.wire.sealed import MessageWriter


def join():
    return echelon.join(record=False, transport="tcp", timeout_s=60)


def claims_with_a_stranger():
    """Rank 1 is also the stranger: it calls at the leader's port and tries to write before each claim."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    crowd, answers = [], []
    with join() as session:
        found = []
        for _ in range(20):
            if session.rank == 1:
                crowd.append(socket.create_connection(address))
                crowd[-1].sendall(opening(encrypted=False))
                crowd[-1].sendall(
                    MessageWriter(None).sealed(encode(AddCount("claim/batches", 1000))) + bytes(99)
                )
            found.append(session._claim("batches", 1))
            session.barrier()
        if session.rank == 1:
            answers = [_answer(sock) for sock in crowd]
            store = torch.distributed.TCPStore
            try:
                store(*address, is_master=False, timeout=timedelta(seconds=1)).get("echelon")
                answers.append("torch's store")
            except (torch.distributed.DistError, RuntimeError, ValueError):
                pass
        session.barrier()
        return found, answers, session.all_reduce(torch.ones(1)).item()


def _answer(sock):
    with sock:
        sock.settimeout(30)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while data := sock.recv(1000):
                said += data
        return said


def test_a_stranger_changes_no_claim_and_reads_nothing(warm_pool):
    (mine, _, total), (theirs, answers, _) = warm_pool.run(2, claims_with_a_stranger)
    assert sorted(mine + theirs) == list(range(40)), "each claim once"
    assert len(answers) == 20
    assert set(answers) <= {b"", b"ECHM-"}, "the stranger is told nothing but what listens there"
    assert total == 2


def join_with_certificates(folder):
    os.environ["ECHELON_TLS_CERT"] = f"{folder}/here.pem"
    os.environ["ECHELON_TLS_KEY"] = f"{folder}/here.key"
    os.environ["ECHELON_TLS_CA"] = f"{folder}/authority.pem"
    with join() as session:
        return session.all_reduce(torch.ones(1)).item()


def test_a_run_with_the_certificates_of_echelon_certs_works(warm_pool, tmp_path):
    certs.make(tmp_path / "keys", [["here"]], days=3)
    found = warm_pool.run(2, join_with_certificates, str(tmp_path / "keys"))
    assert found == [2, 2]


WITH_TORCH = """
import sys, torch, torch.distributed as dist, echelon
if sys.argv[1] == "before":
    dist.init_process_group("gloo")
with echelon.join() as session:
    if sys.argv[1] == "after":
        dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    if session.rank == 0:
        print("sums", one.item(), session.all_reduce(torch.ones(1)).item(), flush=True)
    else:
        session.all_reduce(torch.ones(1))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_script_initialises_torch_distributed_before_or_after_it_joins(when, tmp_path):
    script = tmp_path / "both.py"
    script.write_text(WITH_TORCH)
    command = [sys.executable, "-m", "echelon", "run", "--workers", "2", str(script), when]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert "sums 2.0 2.0" in done.stdout, done.stderr
