"""CPU groups of cgroup versions 1 and 2, written into an ordinary folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.cluster.lab.cpu import Controller, CpuGroups, find_controller
from echelon.errors import LabError


def test_version_1_is_found_by_its_mount(tmp_path: Path) -> None:
    (tmp_path / "cpu.cfs_quota_us").write_text("-1")
    mounts = f"tmpfs /run tmpfs rw 0 0\ncgroup {tmp_path} cgroup rw,relatime,cpu,cpuacct 0 0\n"
    assert find_controller(mounts) == Controller(1, tmp_path)


def test_version_2_is_found_if_it_has_the_cpu_controller(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io")
    assert find_controller(f"cgroup2 {tmp_path} cgroup2 rw 0 0") == Controller(2, tmp_path)


def test_groups_that_cannot_limit_cpus_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("hugetlb")
    mounts = f"cgroup2 {tmp_path} cgroup2 rw 0 0\ncgroup {tmp_path} cgroup rw,cpuset 0 0"
    assert find_controller(mounts) is None


def test_version_1_gets_quota_and_period(tmp_path: Path) -> None:
    groups = CpuGroups(Controller(1, tmp_path), "echl-1")
    groups.create()
    groups.add("a", 0.25)
    assert (groups.of("a") / "cpu.cfs_quota_us").read_text() == "5000"
    assert (groups.of("a") / "cpu.cfs_period_us").read_text() == "20000"
    assert groups.limit_of("a") == 0.25
    groups.limit("a", None)
    assert (groups.of("a") / "cpu.cfs_quota_us").read_text() == "-1"
    assert groups.limit_of("a") is None


def test_version_2_gets_one_line_and_delegates_the_controller(tmp_path: Path) -> None:
    groups = CpuGroups(Controller(2, tmp_path), "echl-1")
    groups.create()
    groups.add("a", 0.25)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (groups.path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (groups.of("a") / "cpu.max").read_text() == "5000 20000"
    assert groups.limit_of("a") == 0.25
    groups.limit("a", None)
    assert (groups.of("a") / "cpu.max").read_text() == "max 20000"
    assert groups.limit_of("a") is None


def test_processes_in_subgroups_belong_to_the_node(tmp_path: Path) -> None:
    groups = CpuGroups(Controller(1, tmp_path), "echl-1")
    groups.create()
    groups.add("a", None)
    (groups.of("a") / "job-1").mkdir()
    (groups.of("a") / "cgroup.procs").write_text("11\n12\n")
    (groups.of("a") / "job-1" / "cgroup.procs").write_text("13\n")
    assert groups.pids(groups.of("a")) == {11, 12, 13}
    assert groups.pids() == {11, 12, 13}


def test_a_group_that_does_not_empty_is_reported_with_its_processes(tmp_path: Path) -> None:
    groups = CpuGroups(Controller(1, tmp_path), "echl-1")
    groups.create()
    (groups.path / "cgroup.procs").write_text("4711")  # the file keeps the folder from being removed
    with pytest.raises(LabError, match="4711"):
        groups.remove(deadline_s=0.05)


def test_a_failed_write_is_a_lab_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="cannot make a CPU group"):
        CpuGroups(Controller(1, tmp_path / "missing"), "echl-1").create()
