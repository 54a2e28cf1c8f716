"""Cluster files: what is written is read back, and every mistake is named."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.lab.spec import read_lab
from echelon.errors import ConfigError, UnknownName
from echelon.plan.cluster_file import read_cluster, show_rate, write_cluster
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.told import PAYLOAD, topology_of_lab
from echelon.plan.topology import Node, Topology, Uplink

_RATES = st.one_of(st.just(0.0), st.just(math.inf), st.floats(1e2, 1e12))
_SECONDS = st.one_of(st.just(0.0), st.floats(1e-7, 1e3))
_SIZES = st.integers(0, 10**13).map(float)
_NAMES = st.text(
    st.characters(codec="utf-8", categories=["L", "N", "P", "S"]), min_size=1, max_size=12
).filter(lambda text: text.isprintable() and text == text.strip())
_COSTS = st.builds(ComputeCost, fixed_s=_SECONDS, per_sample_s=_SECONDS, apply_s=_SECONDS)


@st.composite
def _topologies(draw: st.DrawFn) -> Topology:
    names = draw(st.lists(_NAMES, min_size=1, max_size=6, unique=True))
    sites = draw(st.lists(_NAMES, min_size=1, max_size=3, unique=True))
    nodes = tuple(
        Node(
            name=name,
            site=sites[at % len(sites)],
            speed=draw(st.floats(1e-3, 1e3)),
            cores=draw(st.floats(1e-3, 1e3)),
            memory_bytes=draw(st.one_of(st.just(math.inf), _SIZES)),
            up_bytes_per_s=draw(_RATES),
            down_bytes_per_s=draw(_RATES),
            latency_s=draw(_SECONDS),
            reduce_bytes_per_s=draw(st.floats(1e3, 1e12)),
            cache_bytes=draw(st.integers(0, 1 << 24)) & ~1023,
            clock_offset_s=draw(st.floats(-1e3, 1e3)),
        )
        for at, name in enumerate(names)
    )
    used = list(dict.fromkeys(node.site for node in nodes))
    uplinks = tuple(
        Uplink(between=(used[0], other), bytes_per_s=draw(_RATES), latency_s=draw(_SECONDS))
        for other in used[1:]
    )
    return Topology(nodes=nodes, uplinks=uplinks, known=draw(st.text(max_size=20)))


@st.composite
def _jobs(draw: st.DrawFn, nodes: tuple[Node, ...]) -> JobProfile:
    return JobProfile(
        name=draw(_NAMES),
        batch=draw(st.integers(1, 10**6)),
        cost=draw(_COSTS),
        layers=tuple(
            Layer(
                name=draw(_NAMES),
                size_bytes=draw(st.integers(0, 1 << 40)),
                ready_at=draw(st.floats(0, 1)),
                factors=draw(st.sampled_from([(0, 0), (120, 256)])),
            )
            for _ in range(draw(st.integers(0, 4)))
        ),
        base_bytes=draw(_SIZES),
        sample_bytes=draw(_SIZES),
        exchanges=draw(st.integers(0, 100)),
        costs={node.name: draw(_COSTS) for node in nodes[: draw(st.integers(0, len(nodes)))]},
    )


def _close(one: object, other: object) -> bool:
    """Equal, with floats to five digits, or to a byte or a tenth of a nanosecond."""
    if isinstance(one, float) and isinstance(other, float):
        if one > 1e3 and math.isfinite(one):
            return math.isclose(one, other, rel_tol=1e-5, abs_tol=1.0)
        return math.isclose(one, other, rel_tol=1e-5, abs_tol=1.0 if one >= 1 else 1e-10)
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            _close(getattr(one, name), getattr(other, name))
            for name in one.__dataclass_fields__
            if name != "known"
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(_close(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_close, one, other))
    return one == other


@given(st.data())
def test_what_is_written_is_read_back(data: st.DataObject) -> None:
    topology = data.draw(_topologies())
    job = data.draw(st.one_of(st.none(), _jobs(topology.nodes)))
    text = write_cluster(topology, job, measured={"pairs": [["a", 'b"\\', "1gbit"]]})
    read = read_cluster(text, "cluster.toml")
    assert _close(read.topology, topology), text
    assert (read.job is None) == (job is None)
    assert _close(read.job, job), text


def test_file_that_a_person_wrote_needs_few_keys() -> None:
    read = read_cluster(
        """
        [[node]]
        name = "a"
        count = 2
        link = "1gbit"
        memory = "16GiB"
        [[node]]
        name = "b"
        site = "west"
        speed = 0.25
        up = "10mbit"
        down = "unlimited"
        clock_offset = "-2ms"
        [[uplink]]
        between = ["main", "west"]
        rate = "0bit"
        """,
        "mine.toml",
    )
    first, second, third = read.topology.nodes
    assert (first.name, second.name, third.name) == ("a-0", "a-1", "b")
    assert first.up_bytes_per_s == first.down_bytes_per_s == 125e6
    assert first.memory_bytes == 16 * 2**30
    assert (third.up_bytes_per_s, third.down_bytes_per_s) == (1.25e6, math.inf)
    assert third.clock_offset_s == pytest.approx(-2e-3)
    assert read.topology.bytes_per_s(first, third) == 0
    assert read.job is None


_NODE = '[[node]]\nname = "a"\n'
_JOB = '[job]\nname = "m"\nbatch = 8\nfixed = "1ms"\nper_sample = "1us"\n'


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("[[node]\n", "c.toml, line 1", "TOML"),
        ("", "c.toml", "no nodes"),
        ('[node]\nname = "a"', "c.toml, node", "list of tables"),
        ("[[node]]\nsite = 'x'", "c.toml, [[node]] 1", "'name' is missing"),
        (_NODE + _NODE, "c.toml, [[node]] 2, name", "two nodes"),
        (_NODE + "speed = 0", "c.toml, [[node]] 1, speed", "not a speed"),
        (_NODE + "speed = nan", "c.toml, [[node]] 1, speed", "not a speed"),
        (_NODE + "cores = -1", "c.toml, [[node]] 1, cores", "cores"),
        (_NODE + "up = 5", "c.toml, [[node]] 1, up", "rate"),
        (_NODE + 'up = "-5mbit"', "c.toml, [[node]] 1, up", "rate"),
        (_NODE + 'link = "fast"', "c.toml, [[node]] 1, up", "rate"),
        (_NODE + 'memory = "lots"', "c.toml, [[node]] 1, memory", "size"),
        (_NODE + "memory = -5", "c.toml, [[node]] 1, memory", "size"),
        (_NODE + "latency = nan", "c.toml, [[node]] 1, latency", "duration"),
        (_NODE + "latency = -1", "c.toml, [[node]] 1, latency", "duration"),
        (_NODE + 'reduce = "0bit"', "c.toml, [[node]] 1, reduce", "rate"),
        (_NODE + "count = 0", "c.toml, [[node]] 1, count", "count"),
        (_NODE + "speeds = 1", "c.toml, [[node]] 1", "unknown option 'speeds'"),
        (_NODE + '[[uplink]]\nbetween = ["main", "x"]', "c.toml, [[uplink]] 1, between", "site 'x'"),
        (_NODE + '[[uplink]]\nbetween = ["main", "main"]', "c.toml, [[uplink]] 1, between", "different"),
        (_NODE + '[[node]]\nname = "b"\nsite = "x"', "c.toml", "no uplink leads"),
        (_NODE + '[job]\nname = "m"', "c.toml, [job]", "'batch' is missing"),
        (_NODE + _JOB.replace("8", "0"), "c.toml, [job], batch", "batch cannot be 0"),
        (_NODE + _JOB.replace('"1us"', "-1"), "c.toml, [job], per_sample", "duration"),
        (_NODE + _JOB + '[job.layer]\nname = "x"', "c.toml, job.layer", "list of tables"),
        (_NODE + _JOB + '[[job.layer]]\nname = "x"', "c.toml, [[job.layer]] 1", "'gradients' is missing"),
        (
            _NODE + _JOB + '[[job.layer]]\nname = "x"\ngradients = 4\nready_at = 2',
            "c.toml, [[job.layer]] 1, ready_at",
            "ready_at",
        ),
        (
            _NODE + _JOB + '[[job.cost]]\nnode = "b"\nfixed = 1\nper_sample = 1',
            "c.toml, [[job.cost]] 1, node",
            "node 'b'",
        ),
    ],
)
def test_mistake_is_named_with_file_table_and_key(text: str, where: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_cluster(text, "c.toml")
    assert raised.value.where == where
    assert message in raised.value.message
    assert raised.value.fix


def test_unknown_key_names_its_neighbour() -> None:
    with pytest.raises(UnknownName, match="did you mean 'memory'"):
        read_cluster(_NODE + 'memmory = "1GiB"', "c.toml")


def test_rates_are_shown_with_units() -> None:
    assert show_rate(125e6) == "1gbit"
    assert show_rate(12.5e6) == "100mbit"
    assert show_rate(0.0) == "0bit"
    assert show_rate(math.inf) == "unlimited"


def test_lab_tells_its_nodes_links_and_speeds() -> None:
    told = topology_of_lab(read_lab("two-sites"), latency_emulated=False)
    assert told.known == "told by lab two-sites"
    assert told.sites == ("east", "west")
    assert {node.speed for node in told.nodes} == {0.2}
    assert told.bytes_per_s(told.node("east-0"), told.node("west-0")) == PAYLOAD * 12.5e6
    assert told.bytes_per_s(told.node("east-0"), told.node("east-1")) == PAYLOAD * 125e6
    assert told.latency_s(told.node("east-0"), told.node("west-0")) == 0
    assert read_cluster(write_cluster(told), "x").topology == told
