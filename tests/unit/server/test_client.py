"""A client and a server in one process: steps go through the server; every wait names who is awaited."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from echelon.comm.wire.mailbox import Mailbox
from echelon.errors import ConfigError, Corrupt, RoundTimeout
from echelon.observe.recorder import Recorder
from echelon.server import mail
from echelon.server.channel import ServerChannel
from echelon.server.client import ServerClient
from echelon.server.mail import MemoryMailbox
from echelon.server.protocol import Bye, PushDone, Released, ToServer, ToWorker, WeightsPiece
from echelon.server.server import ParameterServer
from echelon.sync.policy import POLICIES, ClusterInfo
from wires import Wires

LR = 0.25


class Observer:
    """In place of a step clock."""

    def computing(self):
        pass

    arrived = computing

    def reduced(self, sent_bytes):
        pass

    def waited(self, wait_s):
        pass


class Worker:
    """Rank `rank`, with a model and a client of one server."""

    def __init__(self, wires, rank, server, sync, deadline_s=30.0, *, near=False, **options):
        names = {rank: f"rank {rank} on here" for rank in range(wires.size)}
        self.channel = ServerChannel(deadline_s, [server], names, rank)
        self.channel.connect(Mailbox(wires.loops[rank], {server}, ToWorker, place=self.channel.place))
        self.channel.near = (server,) if near else ()
        torch.manual_seed(3)
        self.model = nn.Linear(4, 2).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        policy = POLICIES.build(sync).resolved()
        self.client = ServerClient(self.channel, self.optimizer, policy, Observer(), worker=rank, **options)

    def open(self, sync, workers):
        self.client.open(sync, ClusterInfo(workers=workers, servers=1, lr=LR), list(range(workers)))
        self.client.begin()

    def step(self, value=1.0):
        self.optimizer.zero_grad()
        self.model(torch.full((1, 4), value).double()).sum().backward()
        self.client.step(lambda: torch.optim.SGD.step(self.optimizer))


@contextmanager
def serving(sync, *, workers=1, **options):
    """Some workers, and a server in a thread."""
    with Wires(workers + 1) as wires:
        server = ParameterServer(
            rank=workers, servers=[workers], workers=range(workers), recorder=Recorder(None)
        )
        mailbox = Mailbox(
            wires.loops[workers], set(range(workers)), ToServer, place=server.place, farewell=Bye
        )
        thread = threading.Thread(target=server.run, args=(mailbox,))
        thread.start()
        made = [Worker(wires, rank, workers, sync, **options) for rank in range(workers)]
        try:
            made[0].open(sync, workers)
            for other in made[1:]:
                other.client.begin()
            yield made
        finally:
            for one in made:
                one.client.detach()
                one.channel.close()
            thread.join(30)


def weights(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("defers", [False, True])
def test_steps_through_a_server_equal_steps_of_the_optimizer(defers, near):
    torch.manual_seed(3)
    plain = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    with serving("async", defers=defers, near=near) as (worker,):
        for value in (1.0, -0.5, 2.0):
            worker.step(value)
            optimizer.zero_grad()
            plain(torch.full((1, 4), value).double()).sum().backward()
            optimizer.step()
        worker.client.settle()
        assert torch.equal(weights(worker.model), weights(plain))
        assert worker.client.steps == 3


@pytest.mark.parametrize("near", [False, True])
def test_pull_installs_the_pushes_of_other_workers(near):
    with serving("async", workers=2, near=near) as (one, other):
        before = weights(other.model)
        one.step()
        assert torch.equal(weights(other.model), before)
        other.client.pull()
        assert torch.equal(weights(other.model), weights(one.model))
        assert not torch.equal(weights(other.model), before)


@pytest.mark.parametrize("near", [False, True])
def test_borrowing_server_weights_can_be_undone(near):
    with serving("downpour(3, 3)", near=near) as (worker,):
        server = weights(worker.model)
        worker.step()
        own = weights(worker.model)
        undo = worker.client.borrow()
        assert torch.equal(weights(worker.model), server)
        undo()
        assert torch.equal(weights(worker.model), own)
        worker.client.merge()
        assert torch.equal(weights(worker.model), own), "the server took the same step"


def test_a_gradient_that_the_script_changes_after_backward_is_pushed_as_changed():
    with serving("async", near=True) as (worker,):
        before = weights(worker.model)
        worker.optimizer.zero_grad()
        worker.model(torch.ones(1, 4).double()).sum().backward()
        for p in worker.model.parameters():
            p.grad.mul_(0.5)
        worker.client.step(lambda: None)
        assert torch.equal(weights(worker.model), before - 0.5 * LR)


def test_no_piece_is_sent_between_a_worker_and_a_server_that_share_memory(monkeypatch):
    sent = []
    send = MemoryMailbox.send
    monkeypatch.setattr(
        MemoryMailbox, "send", lambda self, *words: (sent.append(type(words[1])), send(self, *words))[1]
    )
    with serving("async", near=True) as (worker,):
        sent.clear()
        worker.step()
        assert sent == [PushDone, Released]


def test_a_worker_without_room_for_shared_memory_uses_tcp(monkeypatch, caplog):
    def full(size_bytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mail, "make", full)
    with serving("async", near=True) as (worker,):
        before = weights(worker.model)
        worker.step()
        assert torch.equal(weights(worker.model), before - LR)
    assert "go over TCP instead" in caplog.text


@pytest.mark.parametrize("near", [False, True])
def test_a_worker_that_waits_for_another_names_it(near):
    with serving("backup(0)", workers=2, near=near) as (one, _):
        one.channel.deadline_s = 0.3
        with pytest.raises(RoundTimeout, match="which waits for rank 1 on here") as caught:
            one.step()
        assert caught.value.ranks == (1,)
        assert caught.value.where == "rank 0 on here"


@pytest.mark.parametrize("what", ["open", "pull", "join", "fetch_state"])
def test_a_server_that_does_not_answer_is_named(what):
    with Wires(2) as wires:
        worker = Worker(wires, 0, 1, "async", deadline_s=0.1)
        worker.client.present = False
        call = partial(worker.open, "async", 1) if what == "open" else getattr(worker.client, what)
        with pytest.raises(RoundTimeout, match=r"rank 1 on here did not answer within 0\.1 s") as caught:
            call()
        assert caught.value.ranks == (1,)


def test_a_problem_of_the_server_is_raised_by_open():
    with Wires(2) as wires:
        worker = Worker(wires, 0, 1, "async")
        server = ParameterServer(rank=1, servers=[1], workers=[0], recorder=Recorder(None))
        mailbox = Mailbox(wires.loops[1], {0}, ToServer, place=server.place, farewell=Bye)
        thread = threading.Thread(target=server.run, args=(mailbox,))
        thread.start()
        with pytest.raises(ConfigError, match="asink"):
            worker.open("asink", 1)
        worker.client.detach()
        worker.channel.close()
        thread.join(30)


def test_a_message_about_an_unknown_table_is_refused_and_its_server_named():
    with Wires(2) as wires:
        worker = Worker(wires, 0, 1, "async")
        server = Mailbox(wires.loops[1], {0}, ToServer)
        server.send(0, WeightsPiece(table=3, shard=0, start=0, version=1), memoryview(b"12345678"))
        with pytest.raises(Corrupt, match=r"rank 1 on here sent a message WeightsPiece .* no table 3"):
            worker.client.pull()
