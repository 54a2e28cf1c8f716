import dataclasses
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cluster.machine import cpu_quota, describe_machine, usable_cores, version_of


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


V2_MOUNT = "30 20 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNT = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def test_quota_of_version_2_is_read(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/user/job/cpu.max": "150000 100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 1.5


def test_the_smallest_quota_of_all_ancestors_counts(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user/job/part\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/user/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user/job/part/cpu.max": "400000 100000\n",
            "sys/fs/cgroup/other/cpu.max": "1000 100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 2.0


def test_quota_of_version_1_is_read_where_the_container_mounts_its_own_group(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/docker/abc\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/docker/abc"),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "20000\n",
        },
    )
    assert cpu_quota(tmp_path) == 2.5


def test_quota_of_a_group_made_inside_the_container_is_found(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/abc/worker\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc"),
            "sys/fs/cgroup/worker/cpu.max": "300000 100000\n",
        },
    )
    assert cpu_quota(tmp_path) == 3.0


def test_group_without_limit_has_no_quota(tmp_path):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n0::/\n",
            "proc/self/mountinfo": V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
        },
    )
    assert cpu_quota(tmp_path) is None


def test_machine_without_cgroups_has_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None


@settings(deadline=None, max_examples=25)
@given(text=st.text(max_size=60))
def test_unreadable_cgroup_files_mean_no_quota(tmp_path_factory, text):
    root = _write(tmp_path_factory.mktemp("root"), {"proc/self/cgroup": "0::/\n"})
    _write(root, {"proc/self/mountinfo": V2_MOUNT.format(root="/")})
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text(text, encoding="utf-8", errors="replace")
    quota = cpu_quota(root)
    assert quota is None or quota > 0


@pytest.mark.parametrize(("quota", "cores"), [("max", 8), ("1600000", 8), ("390000", 3), ("20000", 1)])
@pytest.mark.usefixtures("eight_cores")
def test_usable_cores_are_limited_by_affinity_and_quota(tmp_path, quota, cores):
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/cpu.max": f"{quota} 100000\n",
        },
    )
    assert usable_cores(tmp_path) == cores
    assert describe_machine(tmp_path).cores_usable == cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_process_pinned_to_one_core_may_use_one():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_facts_are_read_from_the_systems_files(tmp_path):
    _write(
        tmp_path,
        {
            ".dockerenv": "",
            "proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n",
            "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n",
            "sys/devices/system/cpu/cpu0/cache/index0/size": "48K\n",
            "sys/devices/system/cpu/cpu0/cache/index2/level": "2\n",
            "sys/devices/system/cpu/cpu0/cache/index2/size": "2048K\n",
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mountinfo": V2_MOUNT.format(root="/"),
            "sys/fs/cgroup/job/memory.max": "1048576\n",
        },
    )
    machine = describe_machine(tmp_path)
    assert machine.cpu == "Some CPU @ 2 GHz"
    assert machine.container == "docker"
    assert machine.l2_bytes == 2**21
    assert machine.memory_limit_bytes == 2**20
    assert machine.shm_bytes is None


def test_a_machine_with_few_system_files_is_still_described(tmp_path):
    machine = describe_machine(tmp_path)
    assert machine.l2_bytes is None
    assert machine.container is None
    assert machine.cpu_quota is None
    assert machine.memory_limit_bytes is None
    assert machine.cpu


def test_container_is_known_by_its_first_process_group(tmp_path):
    _write(tmp_path, {"proc/1/cgroup": "0::/kubepods/burstable/pod1\n"})
    assert describe_machine(tmp_path).container == "kubepods"


def test_this_machine_is_described_and_cannot_be_changed():
    machine = describe_machine()
    assert machine.cpu
    assert 1 <= machine.cores_usable <= machine.cores_allowed <= machine.cores_logical
    assert 0 < machine.memory_available_bytes <= machine.memory_bytes
    assert machine.python == ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        machine.cpu = "other"


def test_the_version_of_a_package_is_the_installed_one_or_none():
    assert version_of("msgspec") == importlib.metadata.version("msgspec")
    assert version_of("no-such-package-of-that-name") is None


def test_describing_the_machine_does_not_import_torch():
    code = """
import sys
import echelon.cluster.interfaces
import echelon.cluster.pace
from echelon.cluster.delay import DELAYS
from echelon.cluster.machine import describe_machine
DELAYS.describe()
assert describe_machine().torch is not None
assert "torch" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
