"""A checkpoint is on disk completely or not at all, and any damage is detected."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import stat
import threading
import time
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from echelon.checkpoint import store as checkpoint
from echelon.checkpoint.folder import unfinished
from echelon.checkpoint.state_tree import flatten
from echelon.checkpoint.store import exists, read_newest, write
from echelon.errors import CheckpointError

FILES = ("state.json", "tensors.safetensors")


def state_of(step, size=8):
    return {"step": step, "model": {"weight": torch.full((size,), float(step)), "notes": (step, None)}}


def anything(state):
    return None


def newest(root):
    return read_newest(root, anything)


def names(root):
    return sorted(path.name for path in root.iterdir())


def damage(folder, file="tensors.safetensors", at=-1):
    data = bytearray((folder / file).read_bytes())
    data[at] ^= 1
    (folder / file).write_bytes(data)


def test_the_written_state_can_be_read_back(tmp_path):
    written = write(tmp_path / "deep" / "root", 123, state_of(123))
    assert written.path == tmp_path / "deep" / "root" / "step-000000123"
    assert written.size_bytes == sum((written.path / name).stat().st_size for name in FILES)
    found = newest(tmp_path / "deep" / "root")
    assert (found.path, found.step, found.rejected) == (written.path, 123, {})
    assert torch.equal(found.state["model"]["weight"], torch.full((8,), 123.0))
    assert found.state["model"]["notes"] == (123, None)


def test_state_without_tensors_can_be_read_back(tmp_path):
    write(tmp_path, 0, {"a": 1})
    assert newest(tmp_path).state == {"a": 1}


def test_state_that_was_read_does_not_depend_on_the_file(tmp_path):
    folder = write(tmp_path, 1, state_of(1, size=4096)).path
    found = newest(tmp_path)
    with (folder / "tensors.safetensors").open("r+b") as file:
        file.write(b"\xff" * 16384)
    assert torch.equal(found.state["model"]["weight"], torch.full((4096,), 1.0))


def test_the_umask_decides_who_may_read_both_files(tmp_path):
    old = os.umask(0o027)
    try:
        folder = write(tmp_path, 1, state_of(1)).path
    finally:
        os.umask(old)
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in FILES} == {0o640}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept_and_older_ones_removed(tmp_path, keep):
    for step in (10, 20, 30, 40):
        write(tmp_path, step, state_of(step), keep=keep)
    assert names(tmp_path) == [f"step-{step:09d}" for step in (10, 20, 30, 40)[-keep:]]


def test_a_run_resumed_from_an_earlier_step_keeps_later_checkpoints(tmp_path):
    for step in (10, 20, 15):
        write(tmp_path, step, state_of(step), keep=1)
    assert names(tmp_path) == ["step-000000015", "step-000000020"]


@pytest.mark.parametrize(("step", "keep"), [(-1, 2), (1, 0)])
def test_invalid_numbers_are_refused(tmp_path, step, keep):
    with pytest.raises(CheckpointError, match="cannot write step"):
        write(tmp_path, step, {}, keep=keep)


def test_an_existing_step_is_replaced(tmp_path):
    write(tmp_path, 5, {"try": 1})
    write(tmp_path, 5, {"try": 2})
    assert names(tmp_path) == ["step-000000005"]
    assert newest(tmp_path).state == {"try": 2}


def test_a_crash_in_the_middle_of_replacing_loses_nothing(tmp_path):
    """The old checkpoint was moved away, the new one not yet renamed."""
    folder = write(tmp_path, 5, {"try": 1}).path
    folder.rename(tmp_path / "step-000000005.replaced")
    assert exists(tmp_path)
    assert newest(tmp_path).state == {"try": 1}
    write(tmp_path, 5, {"try": 2})
    assert names(tmp_path) == ["step-000000005"]
    assert newest(tmp_path).state == {"try": 2}


def test_after_a_crash_the_replacement_is_preferred(tmp_path):
    folder = write(tmp_path, 5, {"try": 2}).path
    shutil.copytree(folder, tmp_path / "step-000000005.replaced")
    assert newest(tmp_path).path == folder
    write(tmp_path, 6, {})
    assert names(tmp_path) == ["step-000000005", "step-000000006"]


def test_a_failed_replacement_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    folder = write(tmp_path, 5, {"try": 1}).path
    rename = Path.rename

    def fail(path, target):
        if path.name.startswith(".") and target == folder:
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="Permission denied"):
        write(tmp_path, 5, {"try": 2})
    assert names(tmp_path) == ["step-000000005"]
    assert newest(tmp_path).state == {"try": 1}


def test_leftovers_of_dead_writers_are_removed_and_those_of_live_ones_are_not(tmp_path):
    (tmp_path / ".checkpoint-dead").mkdir()
    (tmp_path / ".checkpoint-dead" / "tensors.safetensors").write_text("half")
    (tmp_path / "notes").mkdir()
    with unfinished(tmp_path) as live:
        write(tmp_path, 1, {})
        assert names(tmp_path) == sorted([live.name, "notes", "step-000000001"])


def test_several_writers_at_once_do_not_disturb_each_other(tmp_path):
    problems = []

    def work(number):
        try:
            for step in range(number, 40, 4):
                write(tmp_path, step, state_of(step), keep=100)
        except Exception as error:  # noqa: BLE001 - raised below
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert names(tmp_path) == [f"step-{step:09d}" for step in range(40)]


# Damage


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("pristine")
    write(root, 1, state_of(1))
    write(root, 2, state_of(2))
    return root


@pytest.fixture
def pair(pristine, tmp_path):
    """A folder with the checkpoints of steps 1 and 2."""
    shutil.copytree(pristine, tmp_path / "pair")
    return tmp_path / "pair"


@given(data=st.data(), file=st.sampled_from(FILES))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_is_detected_and_the_previous_checkpoint_used(pair, data, file):
    path = pair / "step-000000002" / file
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    changed = bytearray(whole)
    changed[at // 8] ^= 1 << at % 8
    path.write_bytes(changed)
    try:
        found = newest(pair)
        assert found.step == 1
        assert file in found.rejected["step-000000002"]
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("file", FILES)
def test_a_file_truncated_at_any_byte_is_detected(pair, file):
    path = pair / "step-000000002" / file
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = newest(pair)
        assert found.step == 1
        assert file in found.rejected["step-000000002"]


def test_truncated_tensors_are_detected_by_their_size(pair):
    path = pair / "step-000000002" / "tensors.safetensors"
    size = path.stat().st_size
    os.truncate(path, 10)
    rejected = newest(pair).rejected
    assert rejected == {"step-000000002": f"tensors.safetensors has 10 bytes, but {size} were written"}


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_grew_is_detected(pair, file):
    with (pair / "step-000000002" / file).open("ab") as end:
        end.write(b"\n")
    assert newest(pair).step == 1


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_detected(pair, file):
    (pair / "step-000000002" / file).unlink()
    assert newest(pair).rejected == {"step-000000002": f"{file}: No such file or directory"}


def test_tensors_of_another_checkpoint_are_detected(pair):
    shutil.copy(pair / "step-000000001" / "tensors.safetensors", pair / "step-000000002")
    assert newest(pair).rejected == {
        "step-000000002": "tensors.safetensors is damaged: its checksum differs"
    }


def test_a_file_in_place_of_a_folder_is_skipped(pair):
    (pair / "step-000000003").write_text("not a folder")
    assert newest(pair).step == 2


def test_a_format_of_another_version_is_skipped(tmp_path, monkeypatch):
    write(tmp_path, 1, {})
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", 3)
        write(tmp_path, 2, {})
    found = newest(tmp_path)
    assert found.step == 1
    assert found.rejected == {
        "step-000000002": "it has format 3; this version of Echelon reads formats 1 and 2"
    }


def test_a_checkpoint_of_the_first_format_can_be_read(tmp_path):
    """As it was written before checkpoints had parts."""
    folder = tmp_path / "step-000000007"
    folder.mkdir()
    state = {"step": 7, "weight": torch.arange(5.0), "random": [{"a": (1, 2)}]}
    tree, tensors = flatten(state)
    save_file(tensors, folder / "tensors.safetensors")
    data = (folder / "tensors.safetensors").read_bytes()
    facts = {
        "format": 1,
        "step": 7,
        "tensors_bytes": len(data),
        "tensors_xxh3": xxhash.xxh3_64_hexdigest(data),
    }
    rest = b'",' + json.dumps(facts)[1:-1].encode() + b',"tree":' + tree + b"}\n"
    (folder / "state.json").write_bytes(b'{"checksum":"' + xxhash.xxh3_64_hexdigest(rest).encode() + rest)
    found = newest(tmp_path)
    assert (found.step, list(found.workers)) == (7, [])
    assert found.state["random"] == state["random"]
    assert torch.equal(found.state["weight"], state["weight"])
    damage(folder)
    with pytest.raises(CheckpointError, match="its checksum differs"):
        newest(tmp_path)


def test_an_unsuitable_checkpoint_is_skipped_with_the_reason(pair):
    found = read_newest(pair, lambda state: "of another model" if state["step"] == 2 else None)
    assert (found.step, found.rejected) == (1, {"step-000000002": "of another model"})


def test_if_no_checkpoint_can_be_used_the_error_has_every_reason(pair):
    damage(pair / "step-000000002")
    with pytest.raises(CheckpointError) as caught:
        read_newest(pair, lambda state: "of another model")
    assert "step-000000002: tensors.safetensors is damaged" in caught.value.message
    assert "step-000000001: of another model" in caught.value.message
    assert caught.value.where == str(pair)


def test_the_folder_of_one_checkpoint_is_read_alone(pair):
    assert newest(pair / "step-000000001").step == 1
    damage(pair / "step-000000002")
    with pytest.raises(CheckpointError, match="step-000000002: tensors"):
        newest(pair / "step-000000002")


def test_a_renamed_checkpoint_folder_can_be_read(pair):
    (pair / "step-000000001").rename(pair.parent / "best")
    found = newest(pair.parent / "best")
    assert (found.step, found.path) == (1, pair.parent / "best")


def test_a_missing_folder_is_an_error(tmp_path):
    assert not exists(tmp_path / "none")
    with pytest.raises(CheckpointError, match="none does not exist"):
        newest(tmp_path / "none")


def test_an_empty_folder_contains_no_checkpoint(tmp_path):
    (tmp_path / ".checkpoint-dead").mkdir()
    assert not exists(tmp_path)
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        newest(tmp_path)


def test_checkpoints_exist_even_if_damaged(pair):
    damage(pair / "step-000000001")
    damage(pair / "step-000000002")
    assert exists(pair)
    assert exists(pair / "step-000000002")


# Writing that fails


def test_state_that_cannot_be_stored_writes_nothing(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path / "root", 1, {"hook": print})
    assert caught.value.where == "hook"
    assert not (tmp_path / "root").exists()


def test_a_file_in_the_way_is_an_error_with_a_fix(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="a file is in the way"):
        write(tmp_path / "file", 1, {})
    with pytest.raises(CheckpointError, match="a file is in the way"):
        write(tmp_path / "file" / "root", 1, {})


@pytest.mark.parametrize(
    ("number", "fix"), [(28, "free space"), (30, "can be written to"), (13, "may write to")]
)
def test_system_errors_have_a_fix_and_leave_earlier_checkpoints(pair, monkeypatch, number, fix):
    def fail(handle):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError) as caught:
        write(pair, 3, state_of(3))
    assert os.strerror(number) in caught.value.message
    assert fix in caught.value.fix
    assert names(pair) == ["step-000000001", "step-000000002"]
    assert newest(pair).step == 2


def _write_beyond_limit(root, size, limit_bytes):
    """Write under a file size limit, which fails in the middle of a write, like a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        write(Path(root), 3, {"text": "x" * size, "weight": torch.zeros(size)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


@pytest.mark.parametrize("limit_bytes", [0, 100, 50_000, 399_000, 400_200])
def test_a_disk_that_fills_up_leaves_the_previous_checkpoints(warm_pool, pair, limit_bytes):
    outcome = warm_pool.outcomes(1, _write_beyond_limit, str(pair), 100_000, limit_bytes)[0]
    if limit_bytes > 400_100:  # the tensors fit, including their header, and so does the rest
        assert outcome is None
        assert newest(pair).step == 3
        return
    assert isinstance(outcome.error, CheckpointError), outcome
    assert outcome.error.message == "the checkpoint cannot be written: File too large"
    assert "ulimit" in outcome.error.fix
    assert "earlier checkpoints are intact" in outcome.error.fix
    assert names(pair) == ["step-000000001", "step-000000002"]
    assert newest(pair).step == 2


def test_a_disk_that_fills_up_at_the_second_file_leaves_the_previous_checkpoints(warm_pool, pair):
    outcome = warm_pool.outcomes(1, _write_text_beyond_limit, str(pair))[0]
    assert isinstance(outcome.error, CheckpointError), outcome
    assert names(pair) == ["step-000000001", "step-000000002"]


def _write_text_beyond_limit(root):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        write(Path(root), 3, {"text": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


# Writers that are killed


def _kill_writers(root, rounds):
    """Fork writers, kill each at some moment, and check what can be read afterwards."""
    chance = random.Random(1)
    root, done, seen = Path(root), 0, []
    for _ in range(rounds):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _write_for_ever(root, done, writer)
        os.close(writer)
        with os.fdopen(reader) as reports:
            done = int(reports.readline())
            time.sleep(chance.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            done = max([done, *(int(line) for line in reports)])
        seen.append(_look(root, done))
    return done, seen


def _write_for_ever(root, done, writer):
    step = done
    while True:
        # Every other step is written twice, so that replacing is interrupted as well.
        step += 1
        for _ in range(1 + step % 2):
            write(root, step, state_of(step, size=200_000))
        os.write(writer, b"%d\n" % step)


def _look(root, done):
    """The problem with the files of a killed writer, if any."""
    found = newest(root)
    if found.step < done:
        return f"step {done} was complete, {found.step} was found; rejected: {found.rejected}"
    if found.rejected:
        return f"rejected: {found.rejected}"
    if not torch.equal(found.state["model"]["weight"], torch.full((200_000,), float(found.step))):
        return f"step {found.step} has other values"
    return None


def test_writers_killed_at_any_moment_leave_an_intact_checkpoint(warm_pool, tmp_path):
    [(done, seen)] = warm_pool.run(1, _kill_writers, str(tmp_path), 40)
    assert done >= 40, "every writer completed one, and was killed in a later one"
    assert seen == [None] * 40
    last = newest(tmp_path).step
    write(tmp_path, last + 1, {})
    assert names(tmp_path) == [f"step-{step:09d}" for step in (last, last + 1)], "all leftovers are swept"
