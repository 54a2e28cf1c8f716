"""Labs: paths never circle, quotas are as configured, faults happen once, specs can be read back."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cluster.lab.cpu import quota_us
from echelon.cluster.lab.faults import due
from echelon.cluster.lab.paths import next_uplinks, unreachable
from echelon.cluster.lab.spec import SLOWEST_CPU, FaultSpec, LabSpec, NodeSpec

SITES = ["s0", "s1", "s2", "s3", "s4", "s5"]
uplink_lists = st.lists(
    st.tuples(st.sampled_from(SITES), st.sampled_from(SITES)).filter(lambda ends: ends[0] != ends[1]),
    max_size=12,
)


@given(uplinks=uplink_lists, here=st.sampled_from(SITES), there=st.sampled_from(SITES))
@settings(max_examples=200, deadline=None)
def test_following_uplinks_takes_a_shortest_path_if_there_is_one(
    uplinks: list[tuple[str, str]], here: str, there: str
) -> None:
    chosen = next_uplinks(SITES, uplinks)
    distance = _distance(uplinks, here, there)
    if here == there:
        assert (here, there) not in chosen
        return
    assert ((here, there) in chosen) == (distance is not None)
    site, hops = here, 0
    while distance is not None and site != there:
        ends = uplinks[chosen[site, there]]
        assert site in ends
        site = ends[1] if ends[0] == site else ends[0]
        hops += 1
        assert hops <= distance
    assert distance is None or hops == distance


@given(uplinks=uplink_lists)
@settings(max_examples=100, deadline=None)
def test_a_site_is_unreachable_exactly_if_there_is_no_path(uplinks: list[tuple[str, str]]) -> None:
    lost = unreachable(SITES, uplinks)
    first_lost = next((site for site in SITES[1:] if _distance(uplinks, SITES[0], site) is None), None)
    assert lost == first_lost


def _distance(uplinks: list[tuple[str, str]], here: str, there: str) -> int | None:
    """Computed by growing the set of reached sites, unlike the code under test."""
    reached, hops = {here}, 0
    while there not in reached:
        wider = reached | {s for ends in uplinks if set(ends) & reached for s in ends}
        if wider == reached:
            return None
        reached, hops = wider, hops + 1
    return hops


@given(cpu=st.floats(min_value=SLOWEST_CPU, max_value=256))
@settings(max_examples=200, deadline=None)
def test_a_quota_is_as_configured_and_within_the_kernels_limits(cpu: float) -> None:
    quota, period = quota_us(cpu)
    assert quota >= 1_000
    assert 1_000 <= period <= 1_000_000
    assert abs(quota / period - cpu) <= 0.03 * cpu
    assert period <= 20_000 or quota == 1_000


faults = st.builds(
    lambda timed, at: FaultSpec(
        action="cut", at_s=float(at) if timed else None, at_step=None if timed else at, node="a"
    ),
    st.booleans(),
    st.integers(0, 20),
)
ticks = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 3)), max_size=20)


@given(plan=st.lists(faults, max_size=8), moves=ticks)
@settings(max_examples=200, deadline=None)
def test_every_fault_happens_once_and_not_before_its_time(
    plan: list[FaultSpec], moves: list[tuple[float, int]]
) -> None:
    done: list[int] = []
    elapsed_s, step = 0.0, 0
    for seconds, steps in [*moves, (21.0, 21)]:
        elapsed_s, step = elapsed_s + seconds, step + steps
        for index in due(plan, done, elapsed_s, step):
            at_s, at_step = plan[index].at_s, plan[index].at_step
            assert (at_s is not None and at_s <= elapsed_s) or (at_step is not None and at_step <= step)
            done.append(index)
    assert sorted(done) == list(range(len(plan)))


nodes = st.builds(
    NodeSpec,
    name=st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True),
    site=st.sampled_from(SITES),
    cpu=st.none() | st.floats(0.01, 4),
    link_bytes_per_s=st.none() | st.floats(1e3, 1e10),
    latency_s=st.floats(0, 1),
)


@given(members=st.lists(nodes, min_size=1, max_size=4), plan=st.lists(faults, max_size=3))
@settings(max_examples=50, deadline=None)
def test_a_lab_state_can_be_written_and_read_back(members: list[NodeSpec], plan: list[FaultSpec]) -> None:
    spec = LabSpec(name="x", nodes=tuple(members), faults=tuple(plan))
    assert msgspec.json.decode(msgspec.json.encode(spec), type=LabSpec) == spec
