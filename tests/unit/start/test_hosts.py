"""Hosts in a list and in a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.start.hosts import Host, read_hosts
from echelon.start.remote import fitted

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}[a-z0-9]", fullmatch=True)
ONE = st.builds(Host, NAMES, st.integers(1, 9))
HOSTS = st.lists(ONE, min_size=1, max_size=5, unique_by=lambda host: host.name)


@given(HOSTS)
def test_hosts_are_read_as_they_are_written(hosts):
    assert read_hosts(",".join(f"{host.name}:{host.slots}" for host in hosts)) == hosts
    assert read_hosts(",".join(host.name for host in hosts)) == [Host(host.name, 1) for host in hosts]


def test_a_file_may_be_written_in_several_ways(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a\nb:2  # fast\n\n# c\nd slots=3\ne 4\nme@f:5\n[fe80::1]:6\nfe80::2\n")
    found = {"a": 1, "b": 2, "d": 3, "e": 4, "me@f": 5, "fe80::1": 6, "fe80::2": 1}
    assert {host.name: host.slots for host in read_hosts(str(file))} == found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,a", "a is named twice"),
        ("a:0", "a has no workers"),
        ("a:x", "'a:x' names no host"),
        ("", "names no host"),
        ("-oProxyCommand=x", "names no host"),
        ("a b", "names no host"),
        ("no/such/file", "there is no file"),
    ],
)
def test_what_is_no_host_is_refused(text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        read_hosts(text)
    assert caught.value.fix


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(ConfigError, match="no host is named"):
        read_hosts(str(tmp_path / "hosts"))


@given(HOSTS, st.data())
def test_workers_fill_the_hosts_from_the_first_on(hosts, data):
    slots = sum(host.slots for host in hosts)
    workers = data.draw(st.integers(1, slots))
    used = fitted(hosts, workers)
    assert sum(host.slots for host in used) == workers
    assert [host.name for host in used] == [host.name for host in hosts[: len(used)]]
    assert used[:-1] == hosts[: len(used) - 1]
    with pytest.raises(ConfigError, match="do not fit"):
        fitted(hosts, slots + 1)
