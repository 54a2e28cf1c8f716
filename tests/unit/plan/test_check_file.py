from __future__ import annotations

import pytest

from echelon.codec.codec import CODECS
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.plan.check_file import PlanSurroundings, contradictions, listed
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.plan import LeftOut, Plan, PlannedUplink, PredictedStep, WorkerPlan
from echelon.plan.plan_file import parse_plan, plan_text
from echelon.sync.policy import POLICIES

_GOOD = """\
batch = 10
collective = "hierarchical(sizes=[2, 1])"
groups = [[0, 2], [1]]
workers = [
    { rank = 0, node = "a", weight = 5 },
    { rank = 1, node = "b", weight = 3 },
    { rank = 2, node = "c", weight = 2 },
]
"""
_HERE = PlanSurroundings(
    place="lab small",
    nodes={"a": 1, "b": 1, "c": 1, "west-1": 2},
    strategies={"collective": COLLECTIVES.build, "codec": CODECS.build, "sync": POLICIES.build},
    with_servers=lambda text: text.startswith("async"),
)


def _said(text: str, around: PlanSurroundings = _HERE) -> list[tuple[int, str]]:
    return [(one.line, one.message) for one in contradictions(text, around)]


def test_a_plan_without_contradictions_has_none_and_its_ranks_follow_the_file():
    assert _said(_GOOD) == []
    plan = parse_plan(
        _GOOD.replace("rank = 0", "rank = 9").replace("rank = 2", "rank = 0").replace("9", "2")
    )
    assert [worker.node for worker in plan.workers] == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("before", "after", "line", "words"),
    [
        ('node = "b"', 'node = "west1"', 6, "there is no node 'west1' in lab small"),
        ('node = "b"', 'node = "a"', 6, "a has place for 1 worker"),
        ("rank = 1", "rank = 0", 6, "rank 0 is given twice, first on line 5"),
        ("rank = 1", "rank = 7", 6, "rank 7 does not exist: 3 workers have ranks 0 to 2"),
        ("[[0, 2], [1]]", "[[0], [1]]", 3, "rank 2 is in no group"),
        ("[[0, 2], [1]]", "[[0, 2],\n [1, 0]]", 4, "rank 0 is in two groups"),
        ("[[0, 2], [1]]", "[[0, 2], [1, 5]]", 3, "there is no rank 5"),
        ("sizes=[2, 1]", "sizes=[2, 2]", 2, "groups of [2, 2] are 4 workers, but there are 3"),
        ("sizes=[2, 1]", "sizes=[1, 2]", 2, "the collective has groups of [1, 2]"),
        ("weight = 3", "weight = 0", 6, "nothing to compute"),
        ("weight = 3", "weight = -1", 6, "nothing to compute"),
        ("weight = 3", "weight = nan", 6, "nothing to compute"),
        ("weight = 3", "weight = inf", 6, "infinite"),
        ("weight = 3", "weight = 4", 1, "the weights sum to 11, and the batch is 10"),
        ("batch = 10", "batch = 2", 1, "a batch of 2 cannot be shared by 3 workers"),
        ("batch = 10", 'batch = 10\nservers = ["a"]', 2, "has no use for servers"),
        ("batch = 10", 'batch = 10\nsync = "async"', 2, "sync async needs a server"),
        ("batch = 10", 'batch = 10\nsync = "asinc"', 2, "unknown sync 'asinc'"),
        ("batch = 10", 'batch = 10\ncodec = "one-bits"', 2, "unknown codec 'one-bits'"),
        ("hierarchical(", "hierarchicl(", 2, "unknown collective 'hierarchicl'"),
        ("batch = 10", "batch = 10\ncolective = 1", 2, "unknown key 'colective'"),
        ("batch = 10", 'batch = "10"', 1, "batch is '10' does not fit"),
        ("weight = 3", "wieght = 3", 6, "unknown key 'wieght'"),
        ('node = "b", ', "", 6, "the worker has no node"),
        ("batch = 10", "batch = = 10", 1, "not valid TOML"),
        ("weight = 3", "weight = 3, speed = 2", 6, "a speed of 2 cannot be emulated"),
    ],
)
def test_a_contradiction_is_named_with_its_line(before, after, line, words):
    assert before in _GOOD
    found = _said(_GOOD.replace(before, after, 1))
    assert [(at, text) for at, text in found if words in text and at == line], found


def test_all_contradictions_are_reported_at_once_in_the_order_of_lines():
    text = _GOOD.replace("rank = 1", "rank = 0").replace('"c"', '"d"').replace("batch = 10", "batch = 12")
    found = contradictions(text, _HERE)
    assert [one.line for one in found] == [1, 6, 7]
    error = listed(found, "plan.toml")
    assert "3 places" in error.message
    assert "line 6: rank 0 is given twice, first on line 5 (nobody has rank 1)" in error.message
    assert error.where == "plan.toml"


def test_a_share_that_needs_more_memory_than_the_node_has_is_named_with_what_fits():
    job = JobProfile(
        name="x",
        batch=10,
        cost=ComputeCost(fixed_s=0, per_sample_s=1),
        layers=(Layer(name="l", size_bytes=4),),
        base_bytes=1e9,
        sample_bytes=1e9,
    )
    around = PlanSurroundings(memory_bytes={"a": 4.5e9, "b": 4e9}, job=job)
    found = contradictions(_GOOD, around)
    assert [(one.line, one.fix) for one in found] == [(5, "give it at most 3 samples")]
    assert "5 samples need 6.0 GB, a has 4.5 GB" in found[0].message


def test_nobody_is_planned_in_an_empty_file():
    assert _said("") == [(1, "the plan has no workers")]
    assert _said("workers = 3")[0][1] == "workers is not a list of tables"


def test_a_plan_is_the_same_after_it_was_written_for_people_and_read():
    plan = Plan(
        run="",
        batch=10,
        collective="hierarchical(sizes=[2, 1])",
        groups=((0, 1), (2,)),
        workers=(
            WorkerPlan(rank=0, node="a", weight=5, site="east", link="1gbit", node_speed=0.8),
            WorkerPlan(rank=1, node="b", weight=2.5, threads=2),
            WorkerPlan(rank=2, node='c"#', weight=2.5, delay="normal(0, 1)", speed=0.5),
        ),
        servers=("a",),
        left_out=(LeftOut(node="d", why='it has a "slow" link'),),
        uplinks=(PlannedUplink(between=("east", "west"), rate="100mbit"),),
        predicted=PredictedStep(
            step_s=0.1, samples_per_s=100, efficiency=0.5, compute_s=0.1, exposed_s=0.0
        ),
        reasons={"shares": "by speed", "a b": "c"},
    )
    text = plan_text(plan)
    assert parse_plan(text) == plan
    assert max(line.count("rank = ") for line in text.split("\n")) == 1
    assert _said(text, PlanSurroundings(strategies=_HERE.strategies)) == []


def test_a_share_is_checked_against_the_memory_that_the_file_itself_knows():
    text = _GOOD.replace("weight = 5", 'weight = 5, memory = "300MiB"').replace(
        "batch = 10", 'batch = 10\nmemory = { worker = "200MiB", sample = "30MiB" }'
    )
    assert [(line, "has 314.6 MB" in message) for line, message in _said(text)] == [(6, True)]
    assert _said(text.replace("30MiB", "20480KiB")) == []
    assert "is not a size" in _said(text.replace("200MiB", "many"))[0][1]
