"""The piece size is measured once per machine and cached; cache problems are never errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cluster import probe
from echelon.cluster.probe import PIECES_BYTES, fastest, fingerprint, piece_bytes, sweep

MEASURED = 64 << 10


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The path of the cache file, which does not exist yet."""
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "probe.json"


@pytest.fixture
def sweeps(monkeypatch):
    """Counts the measurements; all give the same result."""
    made = []

    def measured():
        made.append(1)
        return {size: [2.0 - (size == MEASURED)] for size in PIECES_BYTES}

    monkeypatch.setattr(probe, "sweep", measured)
    return made


def test_the_second_call_uses_the_cache(cache, sweeps):
    assert [piece_bytes(), piece_bytes()] == [MEASURED] * 2
    assert len(sweeps) == 1
    assert json.loads(cache.read_text()) == {fingerprint(): {"piece_bytes": MEASURED}}
    assert [file.name for file in cache.parent.iterdir()] == ["probe.json"]


def test_a_cached_value_is_used_without_measuring(cache, sweeps):
    cache.parent.mkdir()
    cache.write_text(json.dumps({fingerprint(): {"piece_bytes": 1 << 20}}))
    assert piece_bytes() == 1 << 20
    assert not sweeps


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b'"text"',
        b'{"MACHINE": 5}',
        b'{"MACHINE": {}}',
        b'{"MACHINE": {"piece_bytes": "large"}}',
        b'{"MACHINE": {"piece_bytes": -4096}}',
        b'{"MACHINE": {"piece_bytes": 12345}}',
        b'{"MACHINE": {"piece_bytes": 1099511627776}}',
        b'{"another machine": {"piece_bytes": 1048576}}',
    ],
)
def test_a_damaged_or_foreign_cache_is_measured_again_and_replaced(cache, sweeps, content):
    cache.parent.mkdir()
    cache.write_bytes(content.replace(b"MACHINE", fingerprint().encode()))
    assert [piece_bytes(), piece_bytes()] == [MEASURED] * 2
    assert len(sweeps) == 1


def test_machines_that_share_a_home_keep_each_others_entries(cache, sweeps, monkeypatch):
    piece_bytes()
    monkeypatch.setattr(probe, "fingerprint", lambda: "another machine")
    piece_bytes()
    monkeypatch.undo()
    assert len(sweeps) == 2
    assert set(json.loads(cache.read_text())) == {fingerprint(), "another machine"}


def test_a_read_only_folder_only_means_that_nothing_is_cached(tmp_path, monkeypatch, sweeps):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "file" / "below"))
    assert [piece_bytes(), piece_bytes()] == [MEASURED] * 2
    assert len(sweeps) == 2


def test_a_folder_in_place_of_the_file_only_means_that_nothing_is_cached(cache, sweeps):
    cache.mkdir(parents=True)
    assert piece_bytes() == MEASURED
    assert list(cache.parent.iterdir()) == [cache]


def test_a_user_without_a_home_only_means_that_nothing_is_cached(monkeypatch, sweeps):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ECHELON_CACHE", raising=False)
    monkeypatch.setattr(probe, "cache_folder", homeless)
    assert piece_bytes() == MEASURED


def test_without_echelon_cache_the_usual_cache_folder_is_used(tmp_path, monkeypatch, sweeps):
    monkeypatch.delenv("ECHELON_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    piece_bytes()
    assert (tmp_path / "echelon" / "probe.json").exists()


def test_another_processor_cache_or_torch_is_another_machine(tmp_path, monkeypatch):
    def made(name: str, cpu: str, l2: str) -> str:
        folder = tmp_path / name / "sys/devices/system/cpu/cpu0/cache/index2"
        folder.mkdir(parents=True)
        (folder / "level").write_text("2\n")
        (folder / "size").write_text(f"{l2}\n")
        (tmp_path / name / "proc").mkdir()
        (tmp_path / name / "proc/cpuinfo").write_text(f"model name\t: {cpu}\n")
        return fingerprint(tmp_path / name)

    prints = [made("a", "One", "1024K"), made("b", "One", "2048K"), made("c", "Two", "1024K")]
    assert len(set(prints)) == 3
    assert "One" in prints[0]
    assert "L2:1024K" in prints[0]
    assert made("d", "One", "1024K") == prints[0]
    monkeypatch.setattr("echelon.cluster.machine.version_of", lambda name: "99")
    assert fingerprint(tmp_path / "a") != prints[0]


def test_a_machine_without_cache_information_has_a_fingerprint(tmp_path):
    assert "caches unknown" in fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: [3.0], 2: [1.0], 4: [2.0]}, 2),
        ({1: [1.01], 2: [1.0], 4: [1.0]}, 1),
        ({4: [1.0], 2: [1.0]}, 2),
        ({1: [1.05], 2: [1.0]}, 2),
        ({1: [1.0, 1.0, 9.0], 2: [2.0, 2.0, 0.1]}, 1),
    ],
)
def test_the_smallest_of_the_fastest_by_median_is_chosen(seconds, chosen):
    assert fastest(seconds) == chosen


@given(
    st.dictionaries(
        st.sampled_from(PIECES_BYTES),
        st.lists(st.floats(1e-6, 1), min_size=1, max_size=1),
        min_size=1,
    )
)
@settings(max_examples=60)
def test_no_size_is_much_faster_than_the_chosen_one(seconds):
    chosen = fastest(seconds)
    assert seconds[chosen][0] <= 1.02 * min(times[0] for times in seconds.values())
    assert all(times[0] > seconds[chosen][0] for size, times in seconds.items() if size < chosen)


def test_a_sweep_times_every_size_as_often_as_the_others():
    found = sweep()
    assert tuple(found) == PIECES_BYTES
    assert len({len(times) for times in found.values()}) == 1
    assert all(seconds > 0 for times in found.values() for seconds in times)


def test_importing_the_probe_imports_neither_torch_nor_numpy():
    code = "import sys, echelon.cluster.probe; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
