from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echelon.observe.events import Noted, encode
from echelon.observe.follow import Follower, read_run
from echelon.observe.run_folder import RunFolder


def _note(t: float, rank: int = 0, text: str = "x") -> Noted:
    return Noted(t=t, rank=rank, text=text)


def test_each_event_is_returned_once_as_files_grow_and_appear(folder):
    follower = Follower(folder)
    assert follower.poll() == []
    with folder.events_of(0).open("ab") as file:
        file.write(encode(_note(1.0)) + b"\n")
    assert follower.poll() == [_note(1.0)]
    assert follower.poll() == []
    with folder.events_of(0).open("ab") as file:
        file.write(encode(_note(2.0)) + b"\n")
    with folder.events_of(1).open("ab") as file:
        file.write(encode(_note(1.5, rank=1)) + b"\n")
    assert follower.poll() == [_note(1.5, rank=1), _note(2.0)]


def test_events_of_one_poll_are_merged_by_time(folder):
    for rank in range(8):
        with folder.events_of(rank).open("ab") as file:
            for t in (10.0 - rank, 10.0 + rank):
                file.write(encode(_note(t, rank=rank)) + b"\n")
    times = [event.t for event in Follower(folder).poll()]
    assert len(times) == 16
    assert times == sorted(times)


def test_a_poll_without_new_events_opens_no_file(folder, monkeypatch):
    folder.events_of(0).write_bytes(encode(_note(1.0)) + b"\n" + b'{"half')
    follower = Follower(folder)
    assert len(follower.poll()) == 1
    monkeypatch.delattr(Path, "open")
    assert follower.poll() == []


def test_an_incomplete_line_is_read_once_it_is_complete(folder):
    follower = Follower(folder)
    line = encode(_note(1.0, text="half, então whole")) + b"\n"
    with folder.events_of(0).open("ab", buffering=0) as file:
        file.write(line[:20])
        assert follower.poll() == []
        assert follower.poll() == []
        file.write(line[20:] + line[:5])
        assert follower.poll() == [_note(1.0, text="half, então whole")]
        file.write(line[5:])
        assert follower.poll() == [_note(1.0, text="half, então whole")]


def test_a_damaged_line_does_not_hide_those_after_it(folder):
    with folder.events_of(0).open("ab") as file:
        file.write(b'{"type":"step","t":\n' + b"\xff\xfe\n\n" + encode(_note(3.0)) + b"\n")
    assert Follower(folder).poll() == [_note(3.0)]


def test_a_run_whose_folder_does_not_exist_yet_has_no_events(tmp_path):
    folder = RunFolder(tmp_path / "later")
    follower = Follower(folder)
    assert follower.poll() == []
    assert list(read_run(folder)) == []
    folder.with_subfolders()
    folder.events_of(0).write_bytes(encode(_note(1.0)) + b"\n")
    assert follower.poll() == [_note(1.0)]


def test_files_that_are_not_events_are_ignored(folder):
    (folder.events / "rank-0.jsonl.bak").write_bytes(encode(_note(1.0)) + b"\n")
    assert Follower(folder).poll() == []


def test_the_whole_run_is_read_merged_by_time(folder, imagined, written):
    events = imagined()
    written(folder, events, torn=True)
    read = list(read_run(folder))
    assert [event.t for event in read] == sorted(event.t for event in events)
    for rank in range(-1, 4):
        assert [e for e in read if e.rank == rank] == [e for e in events if e.rank == rank]
    assert sorted(Follower(folder).poll(), key=repr) == sorted(events, key=repr)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), cuts=st.lists(st.integers(1, 400), max_size=8))
def test_events_are_returned_in_order_however_their_bytes_are_split(tmp_path_factory, data, cuts):
    events = [_note(float(t)) for t in range(data.draw(st.integers(0, 12)))]
    raw = b"".join(encode(event) + b"\n" for event in events)
    folder = RunFolder(tmp_path_factory.mktemp("run")).with_subfolders()
    follower = Follower(folder)
    seen = []
    with folder.events_of(0).open("ab", buffering=0) as file:
        for cut in [*cuts, len(raw)]:
            file.write(raw[:cut])
            raw = raw[cut:]
            seen += follower.poll()
        file.write(raw)
    assert seen + follower.poll() == events
