"""Members on other machines ask the launcher through their agents: over real sockets and pipes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

from echelon.membership.stuck import WorkPhase
from echelon.membership.survival import SurvivorState
from echelon.start.agents.board import AgentBoard
from echelon.start.agents.channel import Channel
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.member_relay import MemberRelay
from echelon.start.agents.protocol import Interrupt, MemberGone, MemberSaid, Publish
from echelon.start.members import Members
from echelon.train.admission import AdmissionFlag
from echelon.train.progress import PROGRESS_VARIABLE, OwnProgress
from echelon.train.service import EPOCHS_KEY, MOST_KEY, MemberService, ServiceStore


class NoProcess:
    """What started an agent of these tests."""

    def why(self):
        return ""

    def end(self):
        return


class Machine:
    """An agent's part in this, in a thread."""

    def __init__(self, folder, ranks=()):
        folder.mkdir()
        (reads, far_writes), (far_reads, writes) = os.pipe(), os.pipe()
        self.agent = ConnectedAgent("far", Channel(reads, writes, peer="far"), NoProcess())
        self.channel = Channel(far_reads, far_writes, peer="the launcher")
        self.relay = MemberRelay(folder, self.channel.send, silent_s=20.0)
        self.ranks = ranks
        self.others = []
        self.services = []
        self.ended = False
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.held = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        while not self.ended:
            self.held.set()
            self.goes_on.wait()
            self.held.clear()
            for message in self.channel.poll(0.01, read=self.relay.sockets, write=self.relay.blocked):
                if isinstance(message, MemberSaid | MemberGone | Publish):
                    self.relay.hear(message)
                else:
                    self.others.append(message)
            self.relay.carry()
            self.channel.send(self.relay.progress(self.ranks))

    def service(self, members, slot):
        env = {**members.environment, **self.relay.environment}
        self.services.append(MemberService.from_environment(env, slot, 60.0))
        return self.services[-1]

    @property
    def flag(self):
        return AdmissionFlag.from_environment(self.relay.environment)

    def hold(self):
        """Read nothing until `goes_on` is set."""
        self.goes_on.clear()
        self.held.clear()
        assert self.held.wait(90)

    def close(self):
        self.ended = True
        self.goes_on.set()
        self.thread.join()
        for service in self.services:
            with suppress(OSError):
                service.close()
        self.relay.close()
        self.channel.close()
        self.agent.channel.close()


@contextmanager
def run_of(*machines):
    board = AgentBoard()
    members = Members(2, 1, limit_s=60.0, tries=0, board=board)
    board.attach([machine.agent for machine in machines])
    try:
        yield members, board
    finally:
        members.close()
        for machine in machines:
            machine.close()


def until(true):
    end = time.monotonic() + 90
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_member_elsewhere_reads_what_another_one_has_written_whatever_its_size(tmp_path):
    one, other = Machine(tmp_path / "one"), Machine(tmp_path / "other")
    with run_of(one, other) as (members, _):
        first, second = one.service(members, 0), other.service(members, 1)
        text = "x" * 3_000_000
        ServiceStore(first, -1, ()).set("log", text)
        assert ServiceStore(second, -1, ()).get("log").decode() == text
        assert ServiceStore(second, -1, ()).add("count", 2) == 2


def test_all_machines_see_the_round_before_the_first_member_goes_on(tmp_path):
    one, other = Machine(tmp_path / "one"), Machine(tmp_path / "other")
    with run_of(one, other) as (members, _):
        first, second = one.service(members, 0), other.service(members, 1)
        for service in (first, second):
            service.ask(do="ready")
        store = ServiceStore(first, -1, ())
        store.set(EPOCHS_KEY, "1")
        store.set(MOST_KEY, "8")
        assert members.leave([1], "test") == ""
        until(lambda: one.flag.undecided)
        second.ask(do="admit", round=3)
        assert other.flag.round == 0, "only the first member says when"
        other.hold()
        asked = threading.Thread(target=lambda: first.ask(do="admit", round=5))
        asked.start()
        asked.join(0.3)
        assert asked.is_alive(), "the other machine does not know it yet"
        other.goes_on.set()
        asked.join(60)
        assert (one.flag.round, other.flag.round) == (5, 5)
        views = []
        standing = [
            threading.Thread(
                target=lambda s=service, slot=slot: views.append(
                    (s.stand(SurvivorState(slot=slot, view=0, operation=9, admits=True)), other.flag.round)
                )
            )
            for slot, service in enumerate((first, second))
        ]
        for thread in standing:
            thread.start()
        for thread in standing:
            thread.join(60)
        assert [view.left for view, _ in views] == [(1,), (1,)]
        assert one.flag.round == 0, "the next view begins without a round at which to admit"


def test_the_launcher_sees_how_far_members_elsewhere_are_and_which_are_stopped(tmp_path):
    machine = Machine(tmp_path / "one", ranks=(1,))
    with run_of(machine) as (_, board):
        assert board.read(1) is None
        progress = OwnProgress.from_environment(machine.relay.environment, 1)
        progress.waits(7)
        until(lambda: (seen := board.read(1)) is not None and seen.phase is WorkPhase.WAITING)
        assert board.read(1).operation == 7
        assert board.is_current
        assert board.stopped([0, 1]) == []
        machine.hold()
        until(lambda: not board.is_current)


def test_a_stopped_process_elsewhere_is_told(tmp_path):
    machine = Machine(tmp_path / "one", ranks=(0,))
    code = (
        "import os, signal\nfrom echelon.train.progress import OwnProgress\n"
        "OwnProgress.from_environment(os.environ, 0)\nos.kill(os.getpid(), signal.SIGSTOP)"
    )
    with run_of(machine) as (_, board):
        table = machine.relay.environment[PROGRESS_VARIABLE]
        worker = subprocess.Popen(
            [sys.executable, "-c", code], env={**os.environ, PROGRESS_VARIABLE: table}
        )
        try:
            until(lambda: board.stopped([0]) == [0])
        finally:
            worker.kill()
            worker.wait()


def test_what_is_not_of_members_stays_for_the_launcher_and_a_lost_agent_is_told(tmp_path):
    machine = Machine(tmp_path / "one")
    with run_of(machine) as (members, board):
        service = machine.service(members, 0)
        machine.channel.send(Interrupt())
        until(lambda: machine.agent.receive() == [Interrupt()])
        machine.agent.send(Interrupt())
        until(lambda: Interrupt() in machine.others)
        board.publish(1, 0)
        board.detach(machine.agent)
        board.publish(2, 0)
        board.settle(600)  # nobody waits for a machine that is gone
        assert service.slot == 0
