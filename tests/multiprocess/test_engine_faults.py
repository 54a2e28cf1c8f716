"""Real processes and real signals: killed, stopped and misbehaving workers; unknown connections."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch

import echelon
from echelon.comm.meet import mesh
from echelon.comm.meet.handshake import Refused
from echelon.comm.memory import segment
from echelon.errors import EchelonError, MismatchedCalls, PeerLost, RoundTimeout
from warm import WorkerFailure, wait_for

LENGTH = 4_000_000
DEADLINE_S = 90.0
SHORT_S = 5.0
CPU = torch.device("cpu")


def join(transport, deadline_s=DEADLINE_S, **options):
    return echelon.join(
        record=False, transport=transport, round_timeout_s=deadline_s, timeout_s=90, **options
    )


def attempt(act):
    """The result or error of a call, and its duration."""
    begun = time.monotonic()
    try:
        result = act()
    except EchelonError as error:
        result = error
    return result, time.monotonic() - begun


def kill_me_soon():
    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()


# A worker is killed ------------------------------------------------------------------------------


def killed_in_a_reduction(transport, who, collective):
    """Survivors wait in `session.all_reduce`, and their tensor is unchanged."""
    with join(transport, collective=collective) as session:
        tensor = torch.full((LENGTH,), float(session.rank))
        session.barrier()
        if session.rank == who:
            reduce = session._group.all_reduce

            def all_reduce(given, *args, **options):
                if given.numel() == LENGTH:
                    kill_me_soon()
                return reduce(given, *args, **options)

            session._group.all_reduce = all_reduce
            session.all_reduce(tensor)
            time.sleep(100)
        error, _ = attempt(lambda: [session.all_reduce(tensor) for _ in range(2)][-1])
        again, _ = attempt(session.barrier)
        wait_for(session.world_size - 1)
        return error, bool((tensor == tensor[0]).all()), again


def killed_with_shared_buffers(who):
    with join("shm") as session:
        group = session._group.fork()
        buffers = [group.buffer(LENGTH, torch.float32, CPU) for _ in range(2)]
        session.barrier()
        pending = [group.all_reduce(buffer) for buffer in buffers]
        if session.rank == who:
            pending[0].wait()
            os.kill(os.getpid(), signal.SIGKILL)
        error, _ = attempt(lambda: [one.wait() for one in pending])
        again, _ = attempt(session.barrier)
        wait_for(session.world_size - 1)
        return error, True, again


def assert_all_name(outcomes, who):
    dead = outcomes.pop(who)
    assert isinstance(dead, WorkerFailure)
    assert dead.how == "died"
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        error, unharmed, again = outcome
        for one in (error, again):
            assert type(one) is PeerLost, "at once, and not at the deadline"
            assert one.ranks == (who,)
            assert f"rank {who} on " in one.message
        assert unharmed


@pytest.mark.parametrize(
    ("transport", "who", "collective"),
    [("tcp", 2, "ring"), ("tcp", 0, "ring"), ("tcp", 3, "direct"), ("auto", 1, "auto")],
)
def test_survivors_name_a_worker_killed_in_a_reduction_at_once_and_keep_their_tensors(
    warm_pool, transport, who, collective
):
    """Includes the worker across the ring, and a killed leader, which holds the store."""
    outcomes = warm_pool.outcomes(4, killed_in_a_reduction, transport, who, collective)
    assert_all_name(outcomes, who)


@pytest.mark.parametrize("who", [0, 2])
def test_survivors_name_a_worker_killed_with_shared_buffers_at_once(warm_pool, who):
    assert_all_name(warm_pool.outcomes(3, killed_with_shared_buffers, who), who)


# A worker is stopped -----------------------------------------------------------------------------


def stopped_in_a_reduction(transport, who):
    """Workers wait until all have raised; an earlier departure would change the others' error."""
    with join(transport, collective="ring") as session:
        group = session._group
        pids = [int(pid) for pid in session.all_gather(torch.tensor(os.getpid()))]
        buffer = group.buffer(LENGTH // 10, torch.float32, CPU)
        group.barrier()
        group._engine.deadline_s = SHORT_S  # not while all join
        if session.rank == who:
            os.kill(os.getpid(), signal.SIGSTOP)
        error, seconds = attempt(lambda: group.all_reduce(buffer).wait())
        if session.rank == who:
            return error, seconds
        wait_for(session.world_size - 1)
        if session.rank == (who + 1) % session.world_size:
            os.kill(pids[who], signal.SIGCONT)
        return error, seconds


@pytest.mark.parametrize(("transport", "who"), [("tcp", 0), ("tcp", 2), ("shm", 0), ("shm", 1)])
def test_all_others_name_a_stopped_worker_at_the_deadline(warm_pool, transport, who):
    outcomes = warm_pool.outcomes(4, stopped_in_a_reduction, transport, who)
    error, _ = outcomes.pop(who)
    assert isinstance(error, PeerLost), "it finds the others gone, or hears that they gave up on it"
    for error, seconds in outcomes:
        assert type(error) is RoundTimeout
        assert error.ranks == (who,)
        assert f"rank {who} on " in error.message
        assert f"did not arrive within {SHORT_S:g} s" in error.message
        assert seconds >= SHORT_S


# Workers that differ -----------------------------------------------------------------------------


def differing():
    """The errors of all workers; no process dies."""
    with join("tcp") as session:
        odd = session.rank == 1
        calls = [
            lambda: session.all_reduce(torch.ones(3 if odd else 2)),
            lambda: session.all_reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
            lambda: session.broadcast(torch.ones(4, 1) if odd else torch.ones(2, 2)),
        ]
        return [(attempt(call)[0], session.all_reduce(torch.ones(1)).item()) for call in calls]


def differing_below():
    """Differing tensors below the session's own check raise an error on all workers."""
    with join("tcp") as session:
        tensor = torch.ones(3000 if session.rank == 1 else 2000)
        return attempt(lambda: session._group.all_reduce(tensor).wait())[0]


def test_tensors_that_differ_between_workers_are_refused_on_all_and_no_process_dies(warm_pool):
    for told in warm_pool.run(3, differing):
        for error, after in told:
            assert type(error) is MismatchedCalls
            assert "workers make different calls" in error.message
            assert "rank 1" in error.message
            assert after == 3


def test_messages_of_unexpected_size_raise_an_error_and_no_process_dies(warm_pool):
    for error in warm_pool.run(3, differing_below):
        assert isinstance(error, EchelonError)


# Secrets and unknown connections -----------------------------------------------------------------


def join_with_secret(secrets):
    os.environ["ECHELON_SECRET"] = secrets[int(os.environ["RANK"])] * 16
    with echelon.join(record=False, transport="tcp", timeout_s=3) as session:
        return session.all_reduce(torch.ones(1)).item()


def test_workers_with_the_same_secret_connect(warm_pool):
    assert warm_pool.run(2, join_with_secret, ["a", "a"]) == [2, 2]


def test_all_workers_report_a_worker_with_a_wrong_secret(warm_pool):
    outcomes = warm_pool.outcomes(3, join_with_secret, ["a", "a", "b"])
    errors = [outcome.error for outcome in outcomes]
    assert type(errors[2]) is Refused
    for error in errors:
        assert "does not know the run's secret" in error.message
    for error in errors[:2]:
        assert error.ranks == (2,)


def join_among_unknown_connections():
    """Before rank 1 connects, other processes connect to rank 0: with junk, half a handshake, nothing."""
    crowd = []
    dial = mesh._try

    def with_company(place, *rest):
        for data in [b"GET / HTTP/1.1\r\n\r\n", b"ECHI\0", bytes(500)] + [b""] * 50:
            crowd.append(socket.create_connection(place))
            crowd[-1].sendall(data)
        return dial(place, *rest)

    if os.environ["RANK"] == "1":
        mesh._try = with_company
    try:
        with join("tcp") as session:
            return session.all_reduce(torch.ones(1)).item()
    finally:
        mesh._try = dial
        for sock in crowd:
            sock.close()


def test_workers_join_despite_unknown_connections_to_the_port(warm_pool):
    assert warm_pool.run(3, join_among_unknown_connections) == [3, 3, 3]


# Machines ----------------------------------------------------------------------------------------


def reduce_here(transport):
    with join(transport) as session:
        group = session._group
        buffer = group.buffer(1000, torch.float32, CPU).fill_(session.rank + 1)
        group.all_reduce(buffer).wait()
        return buffer[0].item(), session.all_reduce(torch.ones(3)).sum().item()


@pytest.mark.parametrize("transport", ["auto", "tcp", "c10d"])
def test_workers_connect_over_ipv6(warm_pool, transport):
    assert warm_pool.run(2, reduce_here, transport, env={"MASTER_ADDR": "::1"}) == [(3, 6)] * 2


def one_of_two_runs(ports):
    """Ranks 0 and 1 are one run, ranks 2 and 3 another."""
    rank = int(os.environ["RANK"])
    os.environ.update(RANK=str(rank % 2), WORLD_SIZE="2", MASTER_PORT=str(ports[rank // 2]))
    out = []
    for transport in ("shm", "tcp"):
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        with join(transport) as session:
            group = session._group
            buffer = group.buffer(100_000, torch.float32, CPU)
            for turn in range(30):
                buffer.fill_(rank + turn)
                group.all_reduce(buffer).wait()
                out.append(buffer.unique().tolist() == [2 * (rank - rank % 2) + 1 + 2 * turn])
            session.barrier()
    return all(out)


def test_two_concurrent_runs_stay_separate(warm_pool):
    assert warm_pool.run(4, one_of_two_runs, _four_free_ports()) == [True] * 4


def _four_free_ports():
    """Two ports whose two successors are free."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            start = first.getsockname()[1]
        try:
            for port in range(start + 1, start + 7):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return [start, start + 3]


def without_shared_memory(who):
    """One worker's machine has no /dev/shm; the warnings of all workers, and their results."""
    rank = int(os.environ["RANK"])
    folder, said = segment.FOLDER, []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("echelon").addHandler(handler)
    if rank in who:
        segment.FOLDER = Path("/nonexistent/shm")
    try:
        with join("shm") as session:
            group = session._group.fork()
            buffer = group.buffer(1000, torch.float32, CPU).fill_(rank)
            group.all_reduce(buffer).wait()
            return buffer[0].item(), said
    finally:
        segment.FOLDER = folder
        logging.getLogger("echelon").removeHandler(handler)


@pytest.mark.parametrize("who", [(0, 1, 2), (0,), (2,)], ids=["nobody", "not the leader", "not the last"])
def test_all_workers_use_tcp_and_warn_if_shared_memory_is_missing(warm_pool, who):
    outcomes = warm_pool.run(3, without_shared_memory, who)
    assert [total for total, _ in outcomes] == [3, 3, 3]
    warned = [" ".join(said) for _, said in outcomes]
    for rank in {0, who[-1] if len(who) == 1 else 0}:
        assert "shared memory" in warned[rank]
        assert warned[rank].count("TCP instead") == 1, "once, and not for every fork"
