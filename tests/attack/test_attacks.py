"""A stranger at the ports of a run, and a man in the middle: refused, named; training goes on or ends.

Two workers train over TCP; a third process attacks. What an attack costs in time is measured, not tested:
`benchmarks/attack.py`.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

import echelon
from attack.relay import Relay
from attack.strangers import (
    Impostor,
    SlowTalk,
    dial,
    files_limited_to,
    hello,
    idle,
    junk,
    send,
    tell,
    wait_until,
)
from echelon.comm.meet import mesh
from echelon.comm.meet.strangers import opening
from echelon.errors import WorkerError

STEPS = 40
IDLE = 1500
MOST_LINES = 12
MOST_GROWTH_KB = 64 << 10
ALONE = {"WORLD_SIZE": "2", "ECHELON_SECRET": "a secret of this test's run"}


class Lines(logging.Handler):
    """Keeps the warnings of this process."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []
        logging.getLogger("echelon").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())

    def end(self):
        logging.getLogger("echelon").removeHandler(self)
        return self.lines


def peak_kb():
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def train(session, before_step=lambda step: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    made = torch.Generator().manual_seed(session.rank)
    for step in range(STEPS):
        before_step(step)
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=made)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def undisturbed():
    with echelon.join(record=False, transport="tcp", timeout_s=90, round_timeout_s=90) as session:
        return train(session)


def disturbed():
    """Rank 2 is the stranger."""
    rank = int(os.environ["RANK"])
    if rank == 2:
        return strange()
    lines, publish = Lines(), mesh.publish
    before_kb = peak_kb()

    def told(rendezvous, view, here):
        if rendezvous.me.rank == 0:
            tell("data-port", f"{here.port} {view.hex()}")
        publish(rendezvous, view, here)

    def before_step(step):
        if step == STEPS // 2:  # training goes on while strangers are connected
            tell(f"halfway-{rank}")

    dialled = mesh.dial

    def later(*args):
        wait_until("data-attacked")
        return dialled(*args)

    mesh.publish, mesh.dial = told, later
    try:
        with files_limited_to(1024):
            if rank == 1:
                wait_until("flooded")
            with echelon.join(record=False, transport="tcp", timeout_s=90, round_timeout_s=90) as session:
                weights = train(session, before_step)
                tell(f"trained-{rank}")
                wait_until("gone")
                return weights, peak_kb() - before_kb, lines.end()
    finally:
        mesh.publish, mesh.dial = publish, dialled
        lines.end()


def strange():
    """At the meeting's port, from before the second worker joins; and at the leader's data port."""
    meeting = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    first = opening(encrypted=False)
    dial(meeting).close()
    junk(meeting, opening=first, view=b"echelon: meeting")
    recorded = first + hello(b"echelon: meeting") + os.urandom(32)
    for _ in range(20):
        send(meeting, recorded)  # the same one again
    with files_limited_to(1 << 16):
        opened = idle(meeting, IDLE)
        slow = SlowTalk(meeting, 20, recorded)
        tell("flooded")
        port, view = wait_until("data-port").split()
        data = (os.environ["MASTER_ADDR"], int(port))
        junk(data, view=bytes.fromhex(view))
        opened += idle(data, 300)
        tell("data-attacked")
        for rank in range(2):
            while not Path(f"trained-{rank}").exists():
                for sock in idle(meeting, 50):  # a flood of short connections
                    sock.close()
        slow.close()
        for sock in opened:
            sock.close()
    tell("gone")
    return len(opened)


def relayed(how, limit_s=90):
    """Rank 2 is the relay: the address that the leader's data port seems to have leads to it."""
    rank = int(os.environ["RANK"])
    if rank == 2:
        port = wait_until("data-port", or_until="ended-1")
        relay = Relay(("127.0.0.1", int(port)), how)
        tell("relay-port", str(relay.port))
        wait_until("ended-0")
        wait_until("ended-1")
        relay.close()
        return relay.frames
    publish = mesh.publish

    def redirected(rendezvous, view, here):
        if rendezvous.me.rank == 0:
            tell("data-port", str(here.port))
            here = mesh.ListenAddress("127.0.0.1", int(wait_until("relay-port")))
        publish(rendezvous, view, here)

    mesh.publish = redirected
    try:
        with echelon.join(record=False, transport="tcp", timeout_s=90, round_timeout_s=limit_s) as session:
            return train(session)
    except WorkerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mesh.publish = publish
        tell(f"ended-{rank}")


def redirected_at_the_board():
    """The leader's address on the board leads to an impostor in rank 1's machine."""
    publish, impostor = mesh.publish, Impostor()

    def elsewhere(rendezvous, view, here):
        if rendezvous.me.rank == 0:
            here = mesh.ListenAddress("127.0.0.1", impostor.port)
        publish(rendezvous, view, here)

    mesh.publish = elsewhere
    try:
        with echelon.join(record=False, transport="tcp", timeout_s=60):
            return "joined"
    except WorkerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mesh.publish = publish
        impostor.close()


def redirected_by_an_open_store():
    """Rank 0 is not the leader, but somebody who can write to torchrun's store."""
    port = int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        impostor = Impostor(first=opening(encrypted=False))
        store.set("echelon/0/2/meeting", f"127.0.0.1 {impostor.port}")
        wait_until("refused")
        impostor.close()
        return impostor.heard
    try:
        with echelon.join(record=False, transport="tcp", timeout_s=60):
            return "joined"
    except WorkerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        tell("refused")


@pytest.fixture(scope="module")
def expected(request):
    return {}


def weights_of_an_undisturbed_run(pool, expected):
    if not expected:
        expected["weights"] = pool.run(2, undisturbed, env=ALONE)
    return expected["weights"]


def test_strangers_are_refused_and_named_in_few_lines_and_training_is_the_same(warm_pool, expected):
    right = weights_of_an_undisturbed_run(warm_pool, expected)
    first, second, opened = warm_pool.run(3, disturbed, env=ALONE)
    assert opened > 100
    for (weights, grown_kb, lines), wanted in zip((first, second), right, strict=True):
        assert torch.equal(weights, wanted)
        assert grown_kb < MOST_GROWTH_KB
        assert len(lines) <= MOST_LINES, lines
    assert any("rejected a connection from 127.0.0.1" in line for line in first[2]), first[2]


def test_a_relay_that_only_reads_changes_nothing(warm_pool, expected):
    right = weights_of_an_undisturbed_run(warm_pool, expected)
    first, second, frames = warm_pool.run(3, relayed, "read", env=ALONE, timeout_s=60)
    assert frames > STEPS
    assert torch.equal(first, right[0])
    assert torch.equal(second, right[1])


@pytest.mark.parametrize("how", ["change", "drop", "repeat", "reorder", "farewell"])
def test_a_relay_that_meddles_is_noticed_and_named(warm_pool, how):
    first, second, frames = warm_pool.run(3, relayed, how, env=ALONE, timeout_s=60)
    assert frames >= 6
    assert "Corrupt: what arrived from rank 1" in first, first
    assert "was changed, repeated, left out or put in another order on its way" in first
    assert isinstance(second, str), "the other worker has not gone on by itself"
    assert "rank 0" in second


def test_a_redirected_address_on_the_board_is_refused_and_named_on_both_sides(warm_pool):
    first, second = warm_pool.run(2, redirected_at_the_board, env=ALONE, timeout_s=60)
    assert "Refused: a peer that says it is rank 0 does not know the run's secret" in second
    assert "rank 1" in first, first
    assert "does not know the run's secret" in first, first


def test_a_redirected_address_in_torchruns_store_is_refused_and_the_secret_is_not_told(warm_pool):
    env = {**ALONE, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    heard, second = warm_pool.run(2, redirected_by_an_open_store, env=env, timeout_s=60)
    assert "Refused: a peer that says it is rank 0 does not know the run's secret" in second
    assert len(heard) == 57 + 32
    assert ALONE["ECHELON_SECRET"].encode() not in heard
