import pytest
import torch

from echelon.errors import ConfigError
from echelon.sync.families.mix import Average
from echelon.sync.policy import POLICIES, ClusterInfo

SIX = ClusterInfo(workers=6, groups=((0, 2, 4), (1, 3), (5,)))


def _averagings(text: str, rank: int, cluster: ClusterInfo, steps: int) -> dict[int, tuple[int, ...]]:
    policy = POLICIES.build(text)
    found = {step: policy.averaging(step, rank, cluster) for step in range(steps)}
    return {step: averaging.members for step, averaging in found.items() if averaging is not None}


def test_all_average_after_every_eight_steps_by_default():
    assert _averagings("local", 1, ClusterInfo(workers=3), 20) == {7: (0, 1, 2), 15: (0, 1, 2)}


def test_if_both_are_due_all_average_instead_of_groups():
    everybody = (0, 1, 2, 3, 4, 5)
    assert _averagings("local(periods=[2, 6])", 3, SIX, 12) == {
        1: (1, 3),
        3: (1, 3),
        5: everybody,
        7: (1, 3),
        9: (1, 3),
        11: everybody,
    }


def test_a_group_of_one_averages_only_with_all():
    assert list(_averagings("local(periods=[2, 6])", 5, SIX, 12)) == [5, 11]


def test_without_an_outer_step_a_worker_takes_the_mean_and_keeps_nothing():
    policy, cluster, own, memory = POLICIES.build("local(4)"), ClusterInfo(workers=2), torch.zeros(3), {}
    policy.start(own, memory)
    policy.settle(own, torch.ones(3), memory, Average((0, 1)), cluster)
    assert own.tolist() == [1, 1, 1]
    assert memory == {}
    assert policy.shown == "mean"


def test_with_an_outer_step_the_center_is_shown():
    policy, cluster, own, memory = (
        POLICIES.build("local(4, outer_lr=0.5)"),
        ClusterInfo(workers=2),
        torch.zeros(3),
        {},
    )
    policy.start(own, memory)
    own.fill_(3)
    policy.settle(own, torch.full((3,), 2.0), memory, Average((0, 1)), cluster)
    assert own.tolist() == memory["center"].tolist() == [1, 1, 1]
    assert policy.shown == "center"


def test_inside_a_group_the_mean_is_taken_and_the_center_stays():
    policy, memory, own = POLICIES.build("local(periods=[2, 6], outer_lr=0.5)"), {}, torch.zeros(3)
    policy.start(own, memory)
    policy.settle(own, torch.full((3,), 2.0), memory, Average((1, 3)), SIX)
    assert own.tolist() == [2, 2, 2]
    assert memory["center"].tolist() == [0, 0, 0]


def test_the_center_is_not_moved_by_the_steps_of_a_worker():
    policy, memory, own = POLICIES.build("local(2, outer_lr=0.5)"), {}, torch.zeros(3)
    policy.start(own, memory)
    policy.settle(own, torch.full((3,), 2.0), memory, Average((0,)), ClusterInfo(workers=1))
    own.fill_(100)
    assert memory["center"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("text", ["local(1)", "local(period=1, outer_lr=1, outer_momentum=0)"])
def test_an_average_after_every_step_is_full_synchronisation(text):
    assert POLICIES.build(text).resolved() == POLICIES.build("full")


@pytest.mark.parametrize("text", ["local(2)", "local(1, outer_lr=0.7)", "local(1, outer_momentum=0.5)"])
def test_other_local_policies_resolve_to_themselves(text):
    assert POLICIES.build(text).resolved() == POLICIES.build(text)


def test_period_and_periods_may_agree():
    assert POLICIES.build("local(16, periods=[4, 16])").periods == (4, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("local(0)", "every 0 steps"),
        ("local(-3)", "every -3 steps"),
        ("local(periods=[4])", "1 periods are given"),
        ("local(periods=[2, 4, 8])", "3 periods are given"),
        ("local(periods=[4, 6])", "among all, 6, is not a larger multiple of that inside groups, 4"),
        ("local(periods=[4, 4])", "among all, 4, is not a larger multiple"),
        ("local(periods=[0, 4])", "is not a larger multiple of that inside groups, 0"),
        ("local(3, periods=[4, 16])", "both period and periods"),
        ("local(outer_lr=0)", "outer_lr is 0"),
        ("local(outer_lr=nan)", "outer_lr is nan"),
        ("local(outer_lr=inf)", "outer_lr is inf"),
        ("local(outer_momentum=1)", "outer_momentum is 1"),
        ("local(outer_momentum=-0.1)", "outer_momentum is -0.1"),
        ("local(nesterov=true)", "nesterov needs momentum"),
    ],
)
def test_invalid_options_are_refused(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        POLICIES.build(text)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "not in groups"),
        (((0, 1, 2),), "not in groups"),
        (((0, 1), (1, 2)), r"\[0, 1, 1, 2\]"),
        (((0,), (1,)), "there are 3"),
    ],
)
def test_two_levels_need_groups_that_contain_each_worker_once(groups, message):
    with pytest.raises(ConfigError, match=message) as caught:
        POLICIES.build("local(periods=[4, 16])").check(ClusterInfo(workers=3, groups=groups))
    assert caught.value.fix


def test_one_level_needs_no_groups():
    POLICIES.build("local").check(ClusterInfo(workers=3))
