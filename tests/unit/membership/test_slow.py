"""Which members are left out as too slow, and when they are well again."""

from __future__ import annotations

import itertools
import sys
import types

import pytest

from echelon.config.allowed import allow_names_in
from echelon.errors import ConfigError
from echelon.membership.slow import Cycles, SlowRule
from echelon.sync.detector import DETECTORS

NUMBERS = itertools.count()


def _run(rule, seconds, shares, looks, *, count=None, now=0.0, every_s=0.5):
    """So many looks at workers whose cycles take so long; what was found in the last one."""
    count = count if count is not None else dict.fromkeys(range(len(seconds)), 0)
    found = []
    for look in range(looks):
        seen = {}
        for slot, cycle_s in enumerate(seconds):
            count[slot] += 1
            seen[slot] = Cycles(count=count[slot], total_s=_total(rule, slot, cycle_s), share=shares[slot])
        found = rule.look(seen, now + every_s * look)
    return found


def _total(rule, slot, cycle_s):
    before = rule._tracks[slot].seen
    return (before.total_s if before else 0.0) + cycle_s


@pytest.mark.parametrize("adapts", [True, False])
def test_a_worker_that_is_20_times_slower_is_left_out_and_one_that_is_not_is_not(adapts):
    rule = SlowRule(DETECTORS.build("median-mad", where="test"), adapts=adapts)
    count = dict.fromkeys(range(4), 0)
    assert _run(rule, [0.1] * 4, [6] * 4, 10, count=count) == []
    assert _run(rule, [0.1, 0.1, 2.0, 0.1], [6] * 4, 2, count=count, now=10) == [], "not at once"
    (found,) = _run(rule, [0.1, 0.1, 2.0, 0.1], [6] * 4, 3, count=count, now=11)
    assert found.slot == 2
    assert "a step took it 2.0 s" in str(found)


def test_a_worker_that_is_only_slower_stays_where_shares_follow_speeds():
    rule = SlowRule(DETECTORS.build("median-mad", where="test"), adapts=True)
    count = dict.fromkeys(range(4), 0)
    _run(rule, [0.1] * 4, [64] * 4, 10, count=count)
    assert _run(rule, [0.1, 0.1, 1.0, 0.1], [64] * 4, 20, count=count, now=10) == []
    equal = SlowRule(DETECTORS.build("median-mad", where="test"), adapts=False)
    count = dict.fromkeys(range(4), 0)
    _run(equal, [0.1] * 4, [64] * 4, 10, count=count)
    assert [one.slot for one in _run(equal, [0.1, 0.1, 1.0, 0.1], [64] * 4, 5, count=count, now=10)] == [2]


def test_a_worker_is_well_after_some_quick_steps_and_a_second():
    rule = SlowRule(DETECTORS.build("median-mad", where="test"), adapts=False)
    count = dict.fromkeys(range(4), 0)
    _run(rule, [0.1] * 4, [6] * 4, 10, count=count)
    _run(rule, [0.1, 0.1, 2.0, 0.1], [6] * 4, 4, count=count, now=10)
    rule.out(2)
    members = [0, 1, 3]
    assert not any(rule.is_well(2, 2.0, 6, members, 20.0 + at) for at in range(5))
    told = [rule.is_well(2, 0.1, 6, members, 30.0 + at / 2) for at in range(4)]
    assert told == [False, False, True, True]


def test_algorithm_3_as_written_finds_a_sudden_change_and_who_is_faster_stays():
    rule = SlowRule(DETECTORS.build("absolute(threshold=0.5)", where="test"), adapts=False)
    count = dict.fromkeys(range(3), 0)
    _run(rule, [1.0] * 3, [6] * 3, 10, count=count)
    assert _run(rule, [1.0, 1.0, 0.1], [6] * 3, 6, count=count, now=10) == []
    found = _run(rule, [1.0, 9.0, 1.0], [6] * 3, 4, count=count, now=20)
    assert [one.slot for one in found] == [1]


def test_another_process_of_a_slot_begins_anew():
    rule = SlowRule(DETECTORS.build("median-mad", where="test"), adapts=False)
    rule.look({0: Cycles(count=9, total_s=9.0, share=1), 1: Cycles(count=9, total_s=9.0, share=1)}, 0.0)
    rule.look({0: Cycles(count=1, total_s=99.0, share=1), 1: Cycles(count=10, total_s=10.0, share=1)}, 1.0)
    assert not rule._tracks[0].cycles_s
    assert list(rule._tracks[1].cycles_s) == [1.0]


def _named(monkeypatch, call):
    name = f"a_users_detector_{next(NUMBERS)}"
    module = types.ModuleType(name)
    module.limit = call
    monkeypatch.setitem(sys.modules, name, module)
    allow_names_in(f"function({name}:limit)")
    return f"function({name}:limit)"


def test_a_users_function_says_who_is_slow(monkeypatch):
    text = _named(monkeypatch, lambda own, others: 2 * max(max(one) for one in others))
    detector = DETECTORS.build(text, where="test")
    assert detector.limit([1.0] * 3, [[2.0], [3.0]]) == 6.0
    assert detector.limit([1.0] * 2, [[2.0], [3.0]]) == float("inf"), "too few times"


def test_a_users_function_that_fails_is_named(monkeypatch):
    detector = DETECTORS.build(_named(monkeypatch, lambda own: 1.0), where="test")
    with pytest.raises(ConfigError, match=r"a_users_detector_\d+:limit failed: TypeError"):
        detector.limit([1.0] * 3, [])
    nan = DETECTORS.build(_named(monkeypatch, lambda own, others: float("nan")), where="test")
    with pytest.raises(ConfigError, match="returned NaN"):
        nan.limit([1.0] * 3, [])


def test_a_function_that_the_user_did_not_name_is_not_imported():
    with pytest.raises(ConfigError, match="is not imported"):
        DETECTORS.build("function(a_trap_of_detectors:limit)", where="test")
