"""Which of Dask's workers are taken, what its logs show, and what is said without Dask."""

from __future__ import annotations

import pickle
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError, LaunchError
from echelon.start.engines.dask_job import Letter, chosen
from echelon.start.hosts import Host
from echelon.start.launcher import LAUNCHERS, Wanted

A1, A2, B1, B2, B3 = "tcp://a:1", "tcp://a:2", "tcp://b:1", "tcp://b:2", "tcp://b:3"
THREADS = dict.fromkeys((A1, B1, A2, B2, B3), 1)


def test_few_machines_are_better_than_many():
    assert chosen(THREADS, {}, 3) == [B1, B2, B3]
    assert chosen(THREADS, {}, 4) == [B1, B2, B3, A1]


def test_busy_workers_come_last():
    assert chosen(THREADS, {B1: 1, B2: 4}, 2) == [A1, A2]
    assert chosen(THREADS, {B1: 1, B2: 4}, 4) == [A1, A2, B3, B1]
    assert chosen({**THREADS, B1: 2}, {B1: 1}, 3) == [B1, B2, B3]


@given(st.dictionaries(st.sampled_from(sorted(THREADS)), st.integers(0, 3)), st.integers(1, 5))
def test_as_many_different_workers_as_asked_for_are_chosen(busy, count):
    assert len(set(chosen(THREADS, busy, count))) == count


def test_invitation_does_not_show_itself():
    letter = pickle.loads(pickle.dumps(Letter("a secret")))
    assert letter.text == "a secret"
    assert "secret" not in f"{letter} {letter!r} {[letter]}"


def test_without_dask_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(LaunchError, match="Dask cannot be imported") as raised:
        LAUNCHERS.build("dask").connect(Wanted(workers=2, hosts=[], timeout_s=1.0, env={}))
    assert "echelon[dask]" in raised.value.fix


@pytest.mark.parametrize("name", ["ray", "dask"])
def test_engine_that_knows_its_machines_refuses_hosts(name):
    wanted = Wanted(workers=2, hosts=[Host("a", 2)], timeout_s=1.0, env={})
    with pytest.raises(ConfigError, match="knows its machines itself"):
        LAUNCHERS.build(name).connect(wanted)
