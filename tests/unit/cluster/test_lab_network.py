"""The commands that build a lab's network, without running them."""

from __future__ import annotations

from echelon.cluster.lab.names import Names, short_id, stem_id
from echelon.cluster.lab.network import (
    Network,
    cable_lines,
    forwarding_lines,
    node_lines,
    shaping_lines,
    switch_lines,
)
from echelon.cluster.lab.spec import parse_lab

SPEC = parse_lab(
    """
    [[node]]
    name = "a-rather-long-name-of-a-node"
    site = "x"
    link = "1gbit"
    [[node]]
    name = "b"
    site = "y"
    [[node]]
    name = "c"
    site = "z"
    [[uplink]]
    between = ["x", "y"]
    rate = "10mbit"
    [[uplink]]
    between = ["z", "y"]
    """,
    file="f",
    name="f",
)
NAMES = Names("0a1b2c3d")


def test_no_interface_name_is_longer_than_the_kernel_allows() -> None:
    words = " ".join([*switch_lines(SPEC), *cable_lines(SPEC, NAMES)]).split()
    devices = {words[i + 1] for i, word in enumerate(words) if word in ("name", "add", "set", "master")}
    assert {"eth0", "p0", "br2", "u1b"} <= devices
    assert all(len(device) <= 15 for device in devices)


def test_bridges_forward_to_other_sites_over_the_right_uplink() -> None:
    lines = forwarding_lines(SPEC)
    # From x, both b (in y) and c (in z, behind y) are reached over the first uplink, at its x end.
    assert "fdb add 02:ec:00:00:00:01 dev u0a master static" in lines
    assert "fdb add 02:ec:00:00:00:02 dev u0a master static" in lines
    # From z, a is behind the second uplink, at its z end; from y, behind the first, at its y end.
    assert "fdb add 02:ec:00:00:00:00 dev u1a master static" in lines
    assert "fdb add 02:ec:00:00:00:00 dev u0b master static" in lines
    assert "fdb add 02:ec:00:00:00:00 dev p0 master static" in lines
    assert len(lines) == 9


def test_a_node_has_static_entries_for_all_its_neighbours() -> None:
    lines = node_lines(SPEC, NAMES, 1)
    assert "address add 10.10.0.2/16 brd + dev eth0" in lines
    neighbours = [line for line in lines if line.startswith("neighbour")]
    assert [line.split()[2] for line in neighbours] == ["10.10.0.1", "10.10.0.3"]


def test_nothing_is_flooded_or_learnt_across_uplinks() -> None:
    guarded = [line.split()[2] for line in switch_lines(SPEC) if "bcast_flood off" in line]
    assert guarded == ["u0a", "u0b", "u1a", "u1b"]


def test_a_rate_alone_is_a_token_bucket_with_a_burst_of_a_millisecond() -> None:
    assert shaping_lines("eth0", 125e6, 0.0) == [
        "qdisc replace dev eth0 root handle 2: tbf rate 1000000000bit burst 125000 limit 12625000"
    ]


def test_a_slow_rate_still_allows_a_burst_of_some_packets() -> None:
    (line,) = shaping_lines("eth0", 1250.0, 0.0)
    assert "rate 10000bit burst 16384 limit 81920" in line


def test_latency_is_netem_with_the_rate_as_its_child() -> None:
    lines = shaping_lines("eth0", 125e6, 0.0015)
    assert lines[0].startswith("qdisc replace dev eth0 root handle 1: netem delay 1500us")
    assert lines[1].startswith("qdisc replace dev eth0 parent 1:1 handle 2: tbf rate 1000000000bit")


def test_an_unlimited_link_has_no_queue() -> None:
    assert shaping_lines("eth0", None, 0.0) == ["qdisc replace dev eth0 root noqueue"]


def test_an_uplink_is_cut_at_both_ends_and_a_node_at_its_port() -> None:
    network = Network(SPEC, NAMES, netem=False)
    assert network.link("z/y").ports == ("u1a", "u1b")
    assert network.link("c").ports == ("p2",)
    assert network.link("c").ends == (("echl-0a1b2c3d-c", "eth0"), ("echl-0a1b2c3d.switch", "p2"))


def test_only_names_with_the_prefix_and_an_id_belong_to_a_lab() -> None:
    lab = short_id("some run")
    assert len(lab) == 8
    assert stem_id(f"echl-{lab}") == lab
    assert stem_id(f"echl-{lab}.switch") == lab
    assert stem_id(f"echl-{lab}-node") == lab
    for foreign in (
        "echl",
        "echl-",
        "echl-switch",
        f"echl-{lab}0",
        f"echlx-{lab}",
        f"my-echl-{lab}",
        "eth0",
    ):
        assert stem_id(foreign) is None
