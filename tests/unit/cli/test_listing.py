import json

import pytest

from echelon.cli.listing import KINDS
from echelon.cluster.lab.spec import shipped_labs


def test_without_a_kind_all_kinds_and_their_names_are_listed(echelon):
    ended = echelon("list")
    assert ended.code == 0
    told = ended.out.replace("\n", " ")
    for kind, registry in KINDS.items():
        assert kind in told
        assert all(name in told for name in registry.names())
    assert all(lab in told for lab in shipped_labs())
    assert max(len(line.rstrip()) for line in ended.out.splitlines()) <= 80


def test_all_kinds_as_json_for_programs(echelon):
    answer = json.loads(echelon("list", "--json").out)
    assert answer == {**{kind: KINDS[kind].names() for kind in KINDS}, "lab": shipped_labs()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_listed_with_help_and_options(echelon, kind):
    ended = echelon("list", kind)
    assert ended.code == 0
    assert max(len(line.rstrip()) for line in ended.out.splitlines()) <= 80
    starts = [line.split()[0] for line in ended.out.splitlines() if line[:1] not in ("", " ")]
    assert starts == [kind, *KINDS[kind].names()]
    for one in KINDS[kind].describe():
        assert one.help.split()[0] in ended.out
        assert all(
            f"{option.name}=" in ended.out or f"{option.name}:" in ended.out for option in one.options
        )


@pytest.mark.parametrize("kind", KINDS)
def test_json_output_of_a_kind_has_the_same_content(echelon, kind):
    answer = json.loads(echelon("list", kind, "--json").out)
    assert [one["name"] for one in answer] == KINDS[kind].names()
    described = {one.name: one for one in KINDS[kind].describe()}
    for one in answer:
        assert one["help"] == described[one["name"]].help
        assert [o["name"] for o in one["options"]] == [o.name for o in described[one["name"]].options]


def test_a_default_is_shown_as_it_would_be_written(echelon):
    told = echelon("list", "data").out
    assert "path=none" in told
    assert "None" not in told


def test_labs_are_listed_by_name(echelon):
    assert all(lab in echelon("list", "lab").out for lab in shipped_labs())
    assert json.loads(echelon("list", "lab", "--json").out) == shipped_labs()


@pytest.mark.parametrize(
    ("asked", "meant"),
    [*((f"{kind}s", kind) for kind in [*KINDS, "lab"]), ("policies", "sync"), ("datasets", "data")],
)
def test_a_kind_may_be_asked_for_in_the_plural(echelon, asked, meant):
    assert echelon("list", asked).out == echelon("list", meant).out != ""


def test_an_unknown_kind_names_the_nearest_and_all(echelon):
    ended = echelon("list", "dta")
    assert ended.code == 2
    assert ended.out == ""
    assert "unknown kind 'dta'" in ended.err
    assert "did you mean 'data'?" in ended.err
    assert all(kind in ended.err for kind in [*KINDS, "lab"])
