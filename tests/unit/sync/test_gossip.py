import pytest

from echelon.errors import ConfigError, UnknownName
from echelon.sync.policy import POLICIES, ClusterInfo


def test_on_a_ring_a_worker_takes_a_third_of_itself_and_of_each_neighbour():
    averaging = POLICIES.build("gossip").averaging(0, 0, ClusterInfo(workers=5))
    assert averaging.weights == pytest.approx({0: 1 / 3, 1: 1 / 3, 4: 1 / 3})


def test_neighbours_average_after_every_period():
    policy, cluster = POLICIES.build("gossip(ring, period=3)"), ClusterInfo(workers=4)
    assert [step for step in range(9) if policy.averaging(step, 1, cluster)] == [2, 5, 8]


def test_single_worker_does_not_average():
    policy, cluster = POLICIES.build("gossip"), ClusterInfo(workers=1)
    policy.check(cluster)
    assert policy.averaging(0, 0, cluster) is None


def test_random_pairs_take_the_mean_and_change_every_round():
    policy, cluster = POLICIES.build("gossip(matching)"), ClusterInfo(workers=8)
    policy.check(cluster)
    partners = []
    for step in range(12):
        weights = policy.averaging(step, 0, cluster).weights
        assert sorted(weights.values()) == [0.5, 0.5]
        partners += [rank for rank in weights if rank != 0]
    assert len(set(partners)) > 3


def test_random_pairs_depend_on_the_round_and_not_on_the_step():
    every, third = POLICIES.build("gossip(matching)"), POLICIES.build("gossip(matching, period=3)")
    cluster = ClusterInfo(workers=8)
    assert [every.averaging(step, 2, cluster) for step in range(6)] == [
        third.averaging(3 * step + 2, 2, cluster) for step in range(6)
    ]


def test_a_graph_can_have_options():
    cluster = ClusterInfo(workers=8)
    assert set(POLICIES.build("gossip(torus(rows=2))").averaging(0, 0, cluster).weights) == {0, 1, 3, 4}
    assert set(POLICIES.build("gossip(torus(rows=8))").averaging(0, 0, cluster).weights) == {0, 1, 7}


def test_a_disconnected_graph_is_refused_by_a_worker_that_cannot_be_reached():
    policy = POLICIES.build('gossip(edges("0-1, 2-3"))')
    with pytest.raises(ConfigError, match="worker 2 cannot be reached from worker 0") as caught:
        policy.check(ClusterInfo(workers=4))
    assert "0-2" in caught.value.fix


def test_a_graph_that_does_not_fit_the_workers_is_refused_by_check():
    with pytest.raises(ConfigError, match="7 workers do not fill a torus of 2 rows"):
        POLICIES.build("gossip(torus(rows=2))").check(ClusterInfo(workers=7))
    with pytest.raises(ConfigError, match="names worker 4"):
        POLICIES.build('gossip(edges("0-1, 1-4"))').check(ClusterInfo(workers=4))


def test_invalid_options_are_refused():
    with pytest.raises(ConfigError, match="every 0 steps"):
        POLICIES.build("gossip(period=0)")
    with pytest.raises(UnknownName, match="unknown graph 'rign'") as caught:
        POLICIES.build("gossip(rign)")
    assert caught.value.nearest == "ring"
    with pytest.raises(ConfigError, match="1 neighbours"):
        POLICIES.build("gossip(random(degree=1))")
