"""Lab files: their meaning, and the error for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.cluster.lab.spec import FaultSpec, LabSpec, parse_lab, read_lab, shipped_labs, show_rate
from echelon.errors import ConfigError, UnknownName

TWO_SITES = """
name = "two"
[[node]]
name = "a"
count = 2
site = "east"
cpu = 0.4
link = "1gbit"
latency = "1ms"
[[node]]
name = "b"
site = "west"
[[uplink]]
between = ["east", "west"]
rate = "100mbit"
latency = 0.005
"""


def parse(text: str) -> LabSpec:
    return parse_lab(text, file="my.toml", name="my")


def test_count_makes_numbered_nodes_that_share_everything_else() -> None:
    spec = parse(TWO_SITES)
    assert [node.name for node in spec.nodes] == ["a-0", "a-1", "b"]
    assert [node.site for node in spec.nodes] == ["east", "east", "west"]
    assert spec.sites == ("east", "west")
    first, second, third = spec.nodes
    assert (first.cpu, first.link_bytes_per_s, first.latency_s) == (0.4, 125e6, 0.001)
    assert (second.cpu, second.link_bytes_per_s, second.latency_s) == (0.4, 125e6, 0.001)
    assert (third.cpu, third.link_bytes_per_s, third.latency_s) == (None, None, 0.0)
    assert spec.uplinks[0].name == "east/west"
    assert (spec.uplinks[0].rate_bytes_per_s, spec.uplinks[0].latency_s) == (12.5e6, 0.005)


def test_a_lab_without_a_name_gets_the_name_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "my lab.toml"
    file.write_text('[[node]]\nname = "a"\n')
    assert read_lab(file).name == "my-lab"


def test_faults_are_read_with_their_units_and_targets() -> None:
    spec = parse(
        TWO_SITES
        + """
        [[fault]]
        at_s = 5
        action = "kill"
        node = "a-1"
        [[fault]]
        at_step = 10
        action = "slow"
        node = "b"
        cpu = 0.1
        [[fault]]
        at_step = 20
        action = "rate"
        link = "west/east"
        rate = "10mbit"
        [[fault]]
        at_step = 30
        action = "cut"
        link = "a-0"
        """
    )
    assert spec.faults == (
        FaultSpec(action="kill", at_s=5.0, node="a-1"),
        FaultSpec(action="slow", at_step=10, node="b", cpu=0.1),
        FaultSpec(action="rate", at_step=20, link="east/west", rate_bytes_per_s=1.25e6),
        FaultSpec(action="cut", at_step=30, node="a-0"),
    )
    assert [fault.target for fault in spec.faults] == ["a-1", "b", "east/west", "a-0"]


FAULT = TWO_SITES + "[[fault]]\n"

MISTAKES = {
    "unknown key at the top": ('nodes = 3\n[[node]]\nname = "a"', "nodes", "'node'"),
    "unknown key of a node": ('[[node]]\nname = "a"\ncpus = 1', "[[node]] 1", "'cpu'"),
    "unknown key of an uplink": (TWO_SITES + 'rates = "1gbit"', "[[uplink]] 1", "'rate'"),
    "unknown key of a fault": (FAULT + "at_sec = 3", "[[fault]] 1", "'at_s'"),
    "wrong type": ('[[node]]\nname = "a"\ncpu = "fast"', "[[node]] 1, cpu", "float"),
    "a number where a rate belongs": ('[[node]]\nname = "a"\nlink = 1000', "[[node]] 1, link", "100mbit"),
    "a rate without unit": ('[[node]]\nname = "a"\nlink = "1000"', "[[node]] 1, link", "100mbit"),
    "a rate of zero": ('[[node]]\nname = "a"\nlink = "0mbit"', "[[node]] 1, link", "1kbit"),
    "a negative rate": ('[[node]]\nname = "a"\nlink = "-1mbit"', "[[node]] 1, link", "100mbit"),
    "a negative latency": ('[[node]]\nname = "a"\nlatency = -1', "[[node]] 1, latency", "0 to 10"),
    "a latency of another kind": ('[[node]]\nname = "a"\nlatency = true', "[[node]] 1, latency", "5ms"),
    "a cpu of zero": ('[[node]]\nname = "a"\ncpu = 0', "[[node]] 1, cpu", "0.001"),
    "a negative cpu": ('[[node]]\nname = "a"\ncpu = -0.5', "[[node]] 1, cpu", "0.001"),
    "a cpu that is no number": ('[[node]]\nname = "a"\ncpu = nan', "[[node]] 1, cpu", "0.001"),
    "a count of zero": ('[[node]]\nname = "a"\ncount = 0', "[[node]] 1, count", "1 to"),
    "a node without a name": ("[[node]]\ncpu = 1", "[[node]] 1", "name"),
    "a name that is a path": ('[[node]]\nname = "../a"', "[[node]] 1, name", "letters"),
    "two nodes of a name": (
        '[[node]]\nname = "a-0"\n[[node]]\nname = "a"\ncount = 2',
        "[[node]] 2, name",
        "rename",
    ),
    "no node": ('name = "empty"', "my.toml", "[[node]]"),
    "too many nodes": (
        '[[node]]\nname = "a"\ncount = 200\n[[node]]\nname = "b"\ncount = 200',
        "my.toml",
        "1 to",
    ),
    "a single table": ('[node]\nname = "a"', "node", "[[node]]"),
    "an uplink to nowhere": (
        TWO_SITES + '[[uplink]]\nbetween = ["east", "wset"]',
        "[[uplink]] 2, between",
        "'west'",
    ),
    "an uplink to itself": (
        TWO_SITES + '[[uplink]]\nbetween = ["east", "east"]',
        "[[uplink]] 2, between",
        "another",
    ),
    "an uplink with one end": (
        TWO_SITES + '[[uplink]]\nbetween = ["east"]',
        "[[uplink]] 2, between",
        "another",
    ),
    "an uplink twice": (
        TWO_SITES + '[[uplink]]\nbetween = ["west", "east"]',
        "[[uplink]] 2, between",
        "once",
    ),
    "sites without an uplink": (
        '[[node]]\nname = "a"\nsite = "x"\n[[node]]\nname = "b"\nsite = "y"',
        "my.toml",
        '["x", "y"]',
    ),
    "an unknown action": (
        FAULT + 'at_s = 1\naction = "kil"\nnode = "b"',
        "[[fault]] 1, action",
        "'kill'",
    ),
    "a fault on an unknown node": (
        FAULT + 'at_s = 1\naction = "kill"\nnode = "a-7"',
        "[[fault]] 1, node",
        "'a-1'",
    ),
    "a fault on an unknown link": (
        FAULT + 'at_s = 1\naction = "cut"\nlink = "east/wset"',
        "[[fault]] 1, link",
        "'east/west'",
    ),
    "a fault on node and link": (
        FAULT + 'at_s = 1\naction = "cut"\nlink = "b"\nnode = "b"',
        "[[fault]] 1",
        "exactly one",
    ),
    "a fault on nothing": (FAULT + 'at_s = 1\naction = "cut"', "[[fault]] 1", "exactly one"),
    "killing a link": (
        FAULT + 'at_s = 1\naction = "kill"\nlink = "east/west"',
        "[[fault]] 1, link",
        "give node",
    ),
    "a fault at two times": (
        FAULT + 'at_s = 1\nat_step = 1\naction = "kill"\nnode = "b"',
        "[[fault]] 1",
        "exactly one",
    ),
    "a fault at no time": (FAULT + 'action = "kill"\nnode = "b"', "[[fault]] 1", "exactly one"),
    "a fault before the beginning": (
        FAULT + 'at_s = -1\naction = "kill"\nnode = "b"',
        "[[fault]] 1, at_s",
        "0 or more",
    ),
    "slow without a speed": (
        FAULT + 'at_s = 1\naction = "slow"\nnode = "b"',
        "[[fault]] 1, cpu",
        "cpu = 0.1",
    ),
    "kill with a speed": (
        FAULT + 'at_s = 1\naction = "kill"\nnode = "b"\ncpu = 0.1',
        "[[fault]] 1, cpu",
        "slow",
    ),
    "rate without a rate": (FAULT + 'at_s = 1\naction = "rate"\nnode = "b"', "[[fault]] 1, rate", "10mbit"),
    "slow to nothing": (
        FAULT + 'at_s = 1\naction = "slow"\nnode = "b"\ncpu = 0',
        "[[fault]] 1, cpu",
        "0.001",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_names_the_place_and_a_fix(mistake: str) -> None:
    text, where, fix = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.where.startswith("my.toml")
    assert where in f"{caught.value.where} {caught.value.message}"
    assert fix in caught.value.fix


def test_text_that_is_not_toml_names_the_line() -> None:
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        parse("[[node]]\nname = a\ncpu = 1\n")
    assert caught.value.where == "my.toml, line 2"


def test_text_that_ends_too_early_names_its_last_line() -> None:
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        parse('[[node]]\nname = "a"\ncpu = [1,\n')
    assert caught.value.where == "my.toml, line 3"


def test_an_unknown_lab_names_the_nearest_shipped_one() -> None:
    with pytest.raises(UnknownName) as caught:
        read_lab("two-site")
    assert caught.value.nearest == "two-sites"


def test_the_error_for_a_missing_file_names_shipped_labs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        read_lab(tmp_path / "two-sites.toml")
    assert "'two-sites'" in caught.value.fix


def test_a_folder_or_a_binary_file_is_not_a_lab(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "x.toml"):
        with pytest.raises(ConfigError, match="cannot read the lab file"):
            read_lab(path)


def test_a_file_in_the_current_folder_is_preferred_to_a_shipped_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two-sites").write_text('name = "mine"\n[[node]]\nname = "a"\n')
    monkeypatch.chdir(tmp_path)
    assert read_lab("two-sites").name == "mine"


@pytest.mark.parametrize("name", shipped_labs())
def test_a_shipped_lab_is_valid_and_needs_at_most_two_cores(name: str) -> None:
    spec = read_lab(name)
    assert spec.name == name
    assert all(node.cpu is not None for node in spec.nodes)
    assert sum(node.cpu or 0 for node in spec.nodes) < 2
    assert spec.notes(cores=2, netem=True) == ()


def test_the_shipped_labs_are_those_that_the_help_names() -> None:
    assert shipped_labs() == ["four-unequal", "seed1-table1", "two-sites"]


def test_table_one_of_the_first_seed_has_its_groups_and_magnitudes() -> None:
    spec = read_lab("seed1-table1")
    sizes = [sum(node.site == site for node in spec.nodes) for site in spec.sites]
    assert sizes == [4, 4, 3, 3]
    speed = {node.site: node.cpu or 0 for node in spec.nodes}
    assert 0.5 < speed["group1"] / speed["group2"] < 2
    for slow in ("group3", "group4"):
        assert 5 <= speed["group1"] / speed[slow] <= 20
    assert {node.link_bytes_per_s for node in spec.nodes} == {125e6}
    for uplink in spec.uplinks:
        if set(uplink.between) & {"group3", "group4"}:
            assert (uplink.rate_bytes_per_s or 0) < 125e6


def test_speeds_beyond_the_machine_are_a_note_not_an_error() -> None:
    spec = parse('[[node]]\nname = "a"\ncount = 4\ncpu = 0.75')
    (note,) = spec.notes(cores=2, netem=False)
    assert "3 cores" in note
    assert "has 2" in note
    assert spec.notes(cores=4, netem=False) == ()


def test_latency_that_the_kernel_cannot_emulate_is_a_note() -> None:
    (note,) = parse(TWO_SITES).notes(cores=2, netem=False)
    assert "latency is not emulated" in note
    assert parse(TWO_SITES).notes(cores=2, netem=True) == ()


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "unlimited"), (125e6, "1gbit"), (12.5e6, "100mbit"), (1250.0, "10kbit"), (312.5e6, "2.5gbit")],
)
def test_a_rate_is_shown_in_the_notation_of_lab_files(rate: float | None, text: str) -> None:
    assert show_rate(rate) == text
