"""Teams of threads that reduce in shared memory: right sums, no leaks, bounded waits."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from echelon.comm.memory import segment
from echelon.comm.memory.segment import Handle
from echelon.comm.memory.shm import SharedMemoryTeam
from echelon.errors import LaunchError, PeerLost, RoundTimeout
from wires import values

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
]
COMBINED = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class ThreadTeam:
    """Threads as workers, and their exchange of handles."""

    def __init__(self, size):
        self.size = size
        self.names = [f"rank {rank} on n" for rank in range(size)]
        self.pids = [os.getpid()] * size
        self.lost = None
        self._barrier = threading.Barrier(size, timeout=90)
        self._said = [None] * size

    def gather(self, rank, mine):
        self._said[rank] = mine
        try:
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("a worker is gone") from None
        return said

    def die(self):
        self._barrier.abort()

    def check(self):
        if self.lost is not None:
            raise self.lost

    def team(self, rank):
        return SharedMemoryTeam(
            rank, self.names, self.pids, gather=lambda mine: self.gather(rank, mine), check=self.check
        )

    def run(self, act):
        """What `act(rank)` returned or raised, by rank."""
        found = [None] * self.size

        def work(rank):
            try:
                found[rank] = act(rank)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                found[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found


def right(results):
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_teams_of_any_size_sum_buffers_of_any_length_and_type(size):
    cluster = ThreadTeam(size)
    cases = [(length, dtype, op) for length in (1, 2, 7, 300) for dtype in DTYPES for op in COMBINED]

    def work(rank):
        team = cluster.team(rank)
        out = []
        for seed, (length, dtype, op) in enumerate(cases):
            buffer = team.buffer(length, dtype)
            assert not buffer.any(), "a new buffer is empty"
            buffer.copy_(values(rank, length, dtype, seed))
            team.finish(team.begin(buffer, op)[0], 20)
            out.append(buffer.clone())
            team.release(buffer)
        return out

    results = right(cluster.run(work))
    for seed, (length, dtype, op) in enumerate(cases):
        inputs = torch.stack([values(rank, length, dtype, seed) for rank in range(size)])
        expected = COMBINED[op](inputs.to(torch.float64), 0).to(dtype)
        for out in results:
            assert torch.equal(out[seed], expected), (length, dtype, op)


def test_all_members_and_all_runs_give_the_same_bits():
    cluster = ThreadTeam(4)

    def work(rank):
        team = cluster.team(rank)
        buffer = team.buffer(200_000, torch.float32)
        noise = torch.randn(200_000, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
        found = []
        for _ in range(3):
            buffer.copy_(noise)
            team.finish(team.begin(buffer, "sum")[0], 20)
            found.append(buffer.view(torch.int32).clone())
        return found

    results = right(cluster.run(work))
    assert all(torch.equal(found, results[0][0]) for own in results for found in own)


def test_halves_are_summed_in_float32():
    """2048 and ones: in half precision, each one alone is lost."""
    cluster = ThreadTeam(4)

    def work(rank):
        team = cluster.team(rank)
        buffer = team.buffer(3, torch.float16)
        buffer.fill_(2048 if rank == 0 else 1)
        team.finish(team.begin(buffer, "sum")[0], 20)
        return buffer.clone()

    assert [r.tolist() for r in right(cluster.run(work))] == [[2052.0] * 3] * 4


def test_no_worker_overtakes_another_in_many_rounds():
    cluster = ThreadTeam(3)

    def work(rank):
        team = cluster.team(rank)
        buffer = team.buffer(1000, torch.int64)
        for turn in range(150):
            buffer.fill_(turn * (rank + 1))
            team.finish(team.begin(buffer, "sum")[0], 20)
            if not bool((buffer == turn * 6).all()):
                return turn
        return None

    assert right(cluster.run(work)) == [None] * 3


def test_reductions_in_flight_can_be_waited_for_in_any_order():
    orders = [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)]
    cluster = ThreadTeam(3)

    def work(rank):
        team = cluster.team(rank)
        buffers = [team.buffer(50, torch.float32) for _ in range(4)]
        for turn in range(20):
            for n, buffer in enumerate(buffers):
                buffer.fill_(rank + n * 10 + turn)
            numbers = [team.begin(buffer, "sum")[0] for buffer in buffers]
            for n in orders[(rank + turn) % 3]:
                team.finish(numbers[n], 20)
                assert team.has_finished(numbers[n])
                if not bool((buffers[n] == 3 + 30 * n + 3 * turn).all()):
                    return turn, n
        return None

    assert right(cluster.run(work)) == [None] * 3


def test_a_reduction_is_not_finished_before_a_thread_waits_for_it():
    cluster = ThreadTeam(2)

    def work(rank):
        team = cluster.team(rank)
        buffer = team.buffer(4, torch.float32)
        number = team.begin(buffer.fill_(1), "sum")[0]
        before = team.has_finished(number)
        team.finish(number, 90)
        team.finish(number, 90)
        return before, team.has_finished(number), buffer.tolist()

    assert right(cluster.run(work)) == [(False, True, [2.0] * 4)] * 2


def test_only_whole_buffers_of_the_team_are_held():
    cluster = ThreadTeam(1)
    team = cluster.team(0)
    buffer = team.buffer(8, torch.float32)
    assert team.holds(buffer)
    assert not team.holds(buffer[:4])
    assert not team.holds(buffer[4:])
    assert not team.holds(buffer.view(torch.int32))
    assert not team.holds(torch.zeros(8))
    team.release(buffer)
    assert not team.holds(buffer)


# No room -----------------------------------------------------------------------------------------


def refusal(act):
    try:
        return act()
    except LaunchError as error:
        return error


def test_without_shared_memory_all_members_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(segment, "FOLDER", tmp_path / "missing")
    cluster = ThreadTeam(3)
    first, *others = cluster.run(cluster.team)
    assert isinstance(first, LaunchError)
    assert "No such file" in first.message
    assert "--transport tcp" in first.fix
    for other in others:
        assert isinstance(other, LaunchError)


@pytest.mark.parametrize("what", ["posix_fallocate", "from_file"])
def test_if_one_member_fails_all_are_refused_and_the_team_lives_on(monkeypatch, what):
    """The failing worker cannot make its segment, or cannot map another's."""
    cluster = ThreadTeam(3)
    unlucky = threading.local()
    whole, mapped = os.posix_fallocate, torch.from_file
    calls = []

    def allocate(fd, start, size):
        if what == "posix_fallocate" and getattr(unlucky, "now", False):
            raise OSError(28, "No space left on device")
        whole(fd, start, size)

    def mapping(*args, **options):
        if what == "from_file" and getattr(unlucky, "now", False):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("unable to mmap 400 bytes: Cannot allocate memory (12)")
        return mapped(*args, **options)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(torch, "from_file", mapping)

    def work(rank):
        team = cluster.team(rank)
        unlucky.now = rank == 1
        error = refusal(lambda: team.buffer(100, torch.float32))
        unlucky.now = False
        buffer = team.buffer(100, torch.float32).fill_(1)
        team.finish(team.begin(buffer, "sum")[0], 20)
        return error, buffer[0].item()

    results = right(cluster.run(work))
    for rank, (error, total) in enumerate(results):
        assert isinstance(error, LaunchError)
        assert ("no room" in error.message) == (rank == 1)
        assert total == 3


@contextmanager
def small_file_system(folder):
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "echelon-test", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_file_system_is_noticed_when_a_buffer_is_asked_for(monkeypatch, tmp_path):
    """And not at a write, which would end the process."""
    with small_file_system(tmp_path / "small") as folder:
        monkeypatch.setattr(segment, "FOLDER", folder)
        cluster = ThreadTeam(2)

        def work(rank):
            team = cluster.team(rank)
            error = refusal(lambda: team.buffer(1_000_000, torch.float32))
            buffer = team.buffer(1000, torch.float32).fill_(1)
            team.finish(team.begin(buffer, "sum")[0], 20)
            return error, buffer.sum().item()

        for error, total in right(cluster.run(work)):
            assert isinstance(error, LaunchError)
            assert total == 2000


def test_a_process_id_of_a_different_process_is_noticed():
    """As in containers that share /dev/shm but not process ids."""
    cluster = ThreadTeam(2)
    said = cluster.gather

    def misleading(rank, mine):
        return [Handle(one.fd, one.inode + (one.inode > 0), one.device) for one in said(rank, mine)]

    cluster.gather = misleading
    for error in cluster.run(cluster.team):
        assert isinstance(error, LaunchError)
        assert "is a different process here" in error.message


# Workers that die, leave or are late -------------------------------------------------------------


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_never_has_a_name_and_no_file_stays_open(tmp_path, monkeypatch):
    """So nothing remains when a worker is killed, and many buffers are possible."""
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    names, files = [], open_files()
    cluster = ThreadTeam(3)
    said = cluster.gather

    def looking(rank, mine):
        names.extend(tmp_path.iterdir())
        return said(rank, mine)

    cluster.gather = looking
    teams = right(cluster.run(cluster.team))
    buffers = right(cluster.run(lambda rank: [teams[rank].buffer(100, torch.float32) for _ in range(5)]))
    assert len(buffers) == 3
    assert names == []
    assert open_files() == files


def test_no_worker_waits_for_one_that_dies_while_memory_is_made():
    cluster = ThreadTeam(3)
    files = open_files()

    def work(rank):
        team = cluster.team(rank)
        if rank == 1:
            cluster.die()
            return None
        return team.buffer(100, torch.float32)

    assert [type(result) for result in cluster.run(work)] == [PeerLost, type(None), PeerLost]
    assert open_files() == files


def test_a_worker_that_dies_in_a_reduction_ends_it_for_the_others():
    cluster = ThreadTeam(3)

    def work(rank):
        team = cluster.team(rank)
        buffer = team.buffer(100, torch.float32)
        if rank == 2:
            cluster.lost = PeerLost("rank 2 is gone", ranks=(2,))
            return None
        number = team.begin(buffer, "sum")[0]
        errors = []
        for _ in range(2):
            try:
                team.finish(number, 600)
            except PeerLost as error:
                errors.append(error.ranks)
        return errors

    assert right(cluster.run(work)) == [[(2,)] * 2, [(2,)] * 2, None]


def test_worker_that_left_after_its_part_was_done_is_not_needed():
    """Its numbers are on the board; its departure does not matter."""
    cluster = ThreadTeam(2)
    waiting, through = threading.Event(), threading.Event()
    begun = threading.Barrier(2, timeout=90)  # then rank 0 looks when only rank 1's end is missing

    def work(rank):
        team = cluster.team(rank)
        buffer = team.buffer(100, torch.float32).fill_(1)
        number = team.begin(buffer, "sum")[0]
        begun.wait()
        if rank == 1:
            waiting.wait(90)
            team.finish(number, 90)
            cluster.lost = PeerLost("rank 1 is gone", ranks=(1,))
            through.set()
            return buffer[0].item()
        whole = team._check

        def look():
            waiting.set()
            through.wait(90)
            whole()

        team._check = look
        team.finish(number, 90)
        return buffer[0].item()

    assert right(cluster.run(work)) == [2.0, 2.0]


def test_workers_that_wait_for_different_teams_do_not_wait_for_each_other():
    """As with two prepared models: one worker waits for the first team, the other for the second."""
    cluster = ThreadTeam(2)
    first_ready = threading.Barrier(2, timeout=90)

    def work(rank):
        teams = [cluster.team(rank) for _ in range(2)]
        for team in teams:
            team.meanwhile = lambda: [other.advance() for other in teams]
        a, b = (team.buffer(100, torch.float32).fill_(1) for team in teams)
        number = teams[0].begin(a, "sum")[0]
        first_ready.wait()
        if rank == 0:
            teams[0].finish(number, 20)
            teams[1].finish(teams[1].begin(b, "sum")[0], 20)
        else:
            teams[1].finish(teams[1].begin(b, "sum")[0], 20)
            teams[0].finish(number, 20)
        return a[0].item(), b[0].item()

    assert right(cluster.run(work)) == [(2.0, 2.0)] * 2


@pytest.mark.parametrize("phase", ["begin", "finish"])
def test_a_late_worker_is_named_at_the_deadline(phase):
    cluster = ThreadTeam(3)
    over = threading.Barrier(3, timeout=90)

    def work(rank):
        team = cluster.team(rank)
        buffer = team.buffer(100, torch.float32)
        if rank == 1:
            if phase == "finish":
                team.begin(buffer, "sum")
            over.wait()
            return None
        try:
            team.finish(team.begin(buffer, "sum")[0], 1)
        except RoundTimeout as error:
            return error
        finally:
            over.wait()
        return None

    first, _, last = cluster.run(work)
    for error in (first, last):
        assert error.ranks == (1,)
        assert "rank 1 on n did not arrive within 1 s" in error.message


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_of_tensors_elsewhere_copy_only_what_others_sum_and_have_the_same_bits(size):
    cluster = ThreadTeam(size)
    cases = [(length, dtype) for length in (1, 7, 300) for dtype in DTYPES]

    def work(rank):
        team = cluster.team(rank)
        out = []
        for seed, (length, dtype) in enumerate(cases):
            buffer = team.buffer(length, dtype).fill_(3)  # must not be used where this worker sums
            own = values(rank, length, dtype, seed)
            for share in team.others_shares(buffer):
                buffer[share].copy_(own[share])
            team.finish(team.begin(buffer, "sum", own)[0], 20)
            for share in team.others_shares(buffer):
                own[share].copy_(buffer[share])
            out.append(own)
            team.release(buffer)
        return out

    results = right(cluster.run(work))
    for seed, (length, dtype) in enumerate(cases):
        inputs = torch.stack([values(rank, length, dtype, seed) for rank in range(size)])
        expected = inputs.to(torch.float64).sum(0).to(dtype)
        for own in results:
            assert torch.equal(own[seed], expected), (length, dtype)
