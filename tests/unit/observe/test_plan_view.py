from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.observe.page.plan_picture import plan_picture
from echelon.observe.plan_tree import tree_lines
from echelon.observe.plan_view import measured_step_s, view_of


def _plan(count: int, sites: list[str], **more) -> dict:
    workers = [
        {
            "rank": at,
            "node": f"{sites[at % len(sites)]}-{at}",
            "weight": 1.0 + at,
            "site": sites[at % len(sites)],
        }
        for at in range(count)
    ]
    return {"workers": workers, **more}


def _drawn(plan: dict) -> ElementTree.Element:
    view = view_of(plan)
    assert view is not None
    return ElementTree.fromstring(plan_picture(view))


def _texts(root: ElementTree.Element) -> str:
    return "\n".join(text.text or "" for text in root.iter("text"))


def test_groups_of_a_hierarchy_are_blocks_below_the_level_between_them():
    plan = _plan(4, ["east", "west"], groups=[[0, 2], [1, 3]], batch=10)
    view = view_of({**plan, "collective": "hierarchical(sizes=[2, 2], inner=direct, outer=ring)"})
    assert view is not None
    assert (view.top.title, view.top.how) == ("between groups", "ring")
    assert [(b.title, b.how) for b in view.top.inside] == [
        ("group 0, site east", "direct"),
        ("group 1, site west", "direct"),
    ]
    assert [node.rank for node in view.nodes] == [0, 2, 1, 3]


def test_an_outer_hierarchy_is_a_level_of_its_own():
    outer = "hierarchical(sizes=[2, 2], inner=butterfly)"
    groups = [[0, 1], [2, 3], [4, 5], [6, 7]]
    collective = f"hierarchical(sizes=[2, 2, 2, 2], outer={outer})"
    view = view_of(_plan(8, ["a"], groups=groups, collective=collective))
    assert view is not None
    assert [(block.title, block.how) for block in view.top.inside] == [
        ("groups 0 to 1", "butterfly"),
        ("groups 2 to 3", "butterfly"),
    ]
    assert [len(block.inside) for block in view.top.inside] == [2, 2]


def test_without_groups_nodes_are_shown_by_site():
    view = view_of(_plan(4, ["east", "west"]))
    assert view is not None
    assert [block.title for block in view.top.inside] == ["site east", "site west"]
    assert view_of({"workers": [{"node": "x"}]}).top.nodes[0].name == "x"


@pytest.mark.parametrize("collective", ["hierarchical(sizes=[2, 2])", "hierarchical(group=2)"])
def test_without_groups_a_hierarchy_shows_the_groups_that_it_forms(collective):
    view = view_of(_plan(4, ["east", "west"], collective=collective))
    assert view is not None
    assert [[node.rank for node in block.nodes] for block in view.top.inside] == [[0, 1], [2, 3]]
    wrong = view_of(_plan(4, ["a"], collective="hierarchical(sizes=[2, 3])"))
    assert len(wrong.top.nodes) == 4


def test_groups_that_miss_a_worker_are_not_drawn_as_if_they_were_right():
    view = view_of(_plan(4, ["a"], groups=[[0, 1], [2]]))
    assert view is not None
    assert len(view.top.nodes) == 4


def test_the_tree_names_shares_speeds_links_and_who_is_left_out():
    plan = _plan(2, ["east"], batch=3, left_out=[{"node": "old", "why": "too slow"}], codec="one-bit")
    plan["workers"][1] |= {"node_speed": 0.25, "link": "1gbit"}
    plan["uplinks"] = [{"between": ["east", "west"], "rate": "100mbit", "latency": "5.0 ms"}]
    lines = tree_lines(view_of(plan))
    assert lines[0] == "2 workers, batch 3, codec one-bit"
    assert any(re.search(r"1  east-1  2 samples  speed 0.25\s+1gbit", line) for line in lines)
    assert any("east - west  100mbit, 5.0 ms" in line for line in lines)
    assert lines[-1].endswith("old: too slow")


@pytest.mark.parametrize("count", [1, 2, 17, 64])
def test_every_node_is_drawn_once_inside_the_picture_and_no_boxes_overlap(count):
    root = _drawn(_plan(count, ["a", "b", "c"], batch=100))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    boxes = [r for r in root.iter("rect") if r.attrib["class"] == "box"]
    assert len(boxes) == count
    spans = []
    for rect in root.iter("rect"):
        x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
        if rect.attrib["class"] == "box":
            for left, top, right, bottom in spans:
                assert x >= right or y >= bottom or x + w <= left or y + h <= top
            spans.append((x, y, x + w, y + h))
    for text in root.iter("text"):
        assert 0 < float(text.attrib["y"]) <= height


def test_many_nodes_are_summed_up_by_group():
    plan = _plan(1000, ["a", "b"], batch=500500)
    root = _drawn(plan)
    assert len([r for r in root.iter("rect") if r.attrib["class"] == "box"]) == 2
    assert "500 nodes: a-0 … a-998" in _texts(root)
    assert len(tree_lines(view_of(plan))) < 10


def test_uplinks_are_drawn_between_the_frames_of_their_sites():
    plan = _plan(4, ["east", "west"], uplinks=[{"between": ["east", "west"], "rate": "100mbit"}])
    root = _drawn(plan)
    assert len(list(root.iter("polyline"))) == 1
    assert "1  east to west: 100mbit" in _texts(root)


def test_names_from_outside_are_escaped():
    plan = {"workers": [{"node": '<script>"&'}], "left_out": [{"node": "</svg>", "why": "<b>"}]}
    assert "</svg>" in _texts(_drawn(plan))


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_keys = ["workers", "groups", "collective", "uplinks", "left_out", "servers", "predicted", "batch", "codec"]
_worker = st.dictionaries(
    st.sampled_from(["rank", "node", "weight", "node_speed", "site", "link"]), _anything
)


@given(
    st.dictionaries(st.sampled_from(_keys), _anything),
    st.lists(_worker, max_size=3),
)
def test_any_file_is_drawn_or_passed_over(values, workers):
    view = view_of({**values, "workers": workers} if workers else values)
    if view is not None:
        ElementTree.fromstring(plan_picture(view))
        assert tree_lines(view)


def test_the_measured_step_is_the_median_without_the_first_fifth():
    begins = [0.0, 5.0, 6.0, 7.0, 8.0, 19.0, 20.0, 21.0, 22.0, 23.0]
    assert measured_step_s(begins) == 1.0
    assert measured_step_s([0.0, 1.0]) is None
