"""Jitter and loss on the virtual clock: the same seed gives the same draws; each policy pays for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.simulate.averaging import ring_late_s, spread_late_s
from echelon.simulate.late import RETRANSMIT_S, LateTransfers
from echelon.simulate.run import simulate
from echelon.simulate.setting import Setting, SimulateSettings

EVERY_FAMILY = ["full", "async", "local(3)", "gossip", "levels(full, async)", "levels(local(2), local(4))"]


class Cluster:
    """As much of a virtual cluster as the lateness of collectives depends on."""

    def __init__(self, workers: int, *, jitter: str = "", loss: float = 0.0, pieces: bool = False) -> None:
        self.late = LateTransfers(Setting(workers=workers, jitter=jitter, loss=loss), seed=0)
        self.has_late_links = self.late.happen
        self.latency_s = 0.0
        self.learner = self
        self.size_bytes = 1000 if pieces else 0
        self.drawn: list[float] = []

    def late_s(self, rank: int) -> float:
        self.drawn.append(self.late.next_s(rank))
        return self.drawn[-1]

    def bytes_per_s(self, rank: int) -> float:
        return 1.0


def test_the_same_seed_gives_the_same_draws_and_workers_draw_by_themselves() -> None:
    setting = Setting(workers=3, jitter="exponential(0.01)", loss=0.2)
    one, other = LateTransfers(setting, 7), LateTransfers(setting, 7)
    assert [one.next_s(0) for _ in range(50)] == [other.next_s(0) for _ in range(50)]
    many = [one.next_s(1) for _ in range(50)]
    [other.next_s(2) for _ in range(9)]  # another worker's transfers do not disturb
    assert many == [other.next_s(1) for _ in range(50)]
    assert many != [LateTransfers(setting, 8).next_s(1) for _ in range(50)]


def test_a_lost_transfer_is_repeated_until_it_arrives() -> None:
    late = LateTransfers(Setting(workers=1, loss=0.25), 0)
    repeats = [late.next_s(0) / RETRANSMIT_S for _ in range(20_000)]
    assert sum(repeats) / len(repeats) == pytest.approx(0.25 / 0.75, rel=0.05)
    assert {round(one) for one in repeats} >= {0, 1, 2, 3}


def test_nothing_is_drawn_without_jitter_and_loss() -> None:
    cluster = Cluster(8)
    assert ring_late_s(cluster, range(8)) == spread_late_s(cluster, range(8)) == 0.0
    assert cluster.drawn == []


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8])
def test_a_constant_jitter_is_a_longer_latency(workers: int) -> None:
    cluster = Cluster(workers, jitter="constant(0.5)")
    assert ring_late_s(cluster, range(workers)) == pytest.approx(2 * (workers - 1) * 0.5)
    assert len(cluster.drawn) == 2 * workers * (workers - 1)
    steps = (workers - 1).bit_length()
    assert spread_late_s(cluster, range(workers)) == pytest.approx(steps * 0.5)
    pieces = Cluster(workers, jitter="constant(0.5)", pieces=True)
    in_pieces = workers > 2 and 2 * (workers - 1) / workers < steps
    rounds = steps + (workers - 1 if in_pieces else 0)
    assert spread_late_s(pieces, range(workers)) == pytest.approx(rounds * 0.5)


@given(st.integers(2, 9), st.integers(0, 100))
def test_a_ring_is_as_late_as_a_chain_of_its_transfers(workers: int, seed: int) -> None:
    cluster = Cluster(workers, jitter="exponential(1)")
    cluster.late = LateTransfers(Setting(workers=workers, jitter="exponential(1)"), seed)
    late_s = ring_late_s(cluster, range(workers))
    assert max(cluster.drawn) <= late_s <= sum(cluster.drawn)


@pytest.mark.parametrize("policy", EVERY_FAMILY)
def test_jitter_and_loss_slow_every_policy_down_reproducibly(setting: Setting, policy: str) -> None:
    setting = replace(setting, groups=((0, 1), (2, 3)), gradients=False)
    steady = simulate(setting, [policy]).runs[0]
    shaky = replace(setting, jitter="uniform(0, 0.02)", loss=0.01)
    runs = [simulate(shaky, [policy]).runs[0] for _ in range(2)]
    assert runs[0] == runs[1]
    assert 0 < runs[0].totals.gradients < steady.totals.gradients
    others = simulate(replace(shaky, seed=1, seeds=5), [policy]).runs
    assert any(other.totals != runs[0].totals for other in others)


def test_options_are_checked_by_their_names() -> None:
    setting = SimulateSettings(jitter="normal(0, 0.01)", loss=0.01).setting()
    assert (setting.jitter, setting.loss) == ("normal(0, 0.01)", 0.01)
    with pytest.raises(ConfigError) as found:
        SimulateSettings(loss=1.0)
    assert found.value.where == "--loss"
