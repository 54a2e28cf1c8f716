"""Messages between a launcher and an agent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import Corrupt, PeerLost
from echelon.observe.growth import FolderTail, Grown
from echelon.start.agents import agent
from echelon.start.agents.channel import Channel
from echelon.start.agents.protocol import Alive, Finish, Interrupt, Listening, WorkerEnded


def pair():
    (a_reads, b_writes), (b_reads, a_writes) = os.pipe(), os.pipe()
    return Channel(a_reads, a_writes, peer="b"), Channel(b_reads, b_writes, peer="a")


MESSAGES = st.one_of(
    st.builds(Grown, st.text(max_size=9), st.integers(0, 2**40), st.binary(max_size=300_000)),
    st.builds(WorkerEnded, st.integers(0, 99), st.integers(-64, 255)),
    st.sampled_from([Alive(), Finish(), Interrupt(), Listening(5)]),
)


@given(st.lists(MESSAGES, max_size=6))
def test_messages_arrive_whole_and_in_order_whatever_their_size(messages):
    one, other = pair()
    try:
        for message in messages:
            one.send(message)
        found = []
        while len(found) < len(messages):
            found += other.poll(1)
            one.poll()
        assert found == messages
        assert one.unsent_bytes == 0
    finally:
        one.close()
        other.close()


def test_a_peer_that_closes_is_named():
    one, other = pair()
    one.close()
    with pytest.raises(PeerLost, match="a is gone: it closed the connection"):
        other.poll(1)
    with pytest.raises(PeerLost, match="a is gone"):
        other.send(Alive())
    other.close()


@pytest.mark.parametrize("junk", [b"Welcome to this machine!\n" * 20, b"\x03\x00\x00\x00abc"])
def test_what_is_no_message_is_told(junk):
    reads, writes = os.pipe()
    channel = Channel(reads, os.dup(writes), peer="b")
    os.write(writes, junk)
    with pytest.raises(Corrupt, match="b sent what is not a message"):
        channel.poll(1)
    channel.close()
    os.close(writes)


def test_files_are_followed_from_where_they_were_left(tmp_path):
    for kind in ("events", "logs", "errors"):
        (tmp_path / kind).mkdir()
    tail = FolderTail(tmp_path)
    log = tmp_path / "logs" / "rank-0.log"
    log.write_bytes(b"one\n")
    (tmp_path / "errors" / "rank-0.tmp").write_bytes(b"not yet")
    assert list(tail.grown()) == [Grown("logs/rank-0.log", 0, b"one\n")]
    with log.open("ab") as file:
        file.write(b"two\n")
    assert list(tail.grown()) == [Grown("logs/rank-0.log", 4, b"two\n")]
    assert list(tail.grown()) == []


def test_the_folder_of_a_killed_agent_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("echelon-agent-killed", "echelon-agent-new", "other"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0) if "new" not in name else None)
    with agent._temporary_folder() as living:
        os.utime(living, (0, 0))
        assert not (tmp_path / "echelon-agent-killed").exists()
        with agent._temporary_folder() as other:
            assert Path(living).is_dir()
            assert Path(other).is_dir()
        assert Path(living).is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["echelon-agent-new", "other"]
