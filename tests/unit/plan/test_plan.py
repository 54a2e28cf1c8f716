from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.plan.plan import (
    LeftOut,
    Plan,
    PlanCandidate,
    PlanRequest,
    PredictedStep,
    WorkerPlan,
    make_plan,
)

NODES = ["a", "a", "b", "b"]


def _plan(asked: PlanRequest | None = None, nodes=NODES, cores=8, rated=()) -> Plan:
    return make_plan("a-run", nodes, asked or PlanRequest(), cores=cores, rated=rated)


def test_workers_have_equal_shares_by_default():
    plan = _plan()
    assert [worker.rank for worker in plan.workers] == [0, 1, 2, 3]
    assert [worker.node for worker in plan.workers] == NODES
    assert plan.weights == [1, 1, 1, 1]
    assert {(w.speed, w.delay) for w in plan.workers} == {(1.0, "")}
    assert "equal" in plan.reasons["shares"]


def test_slow_worker_gets_a_smaller_share_by_speed():
    plan = _plan(PlanRequest(shares="by-speed", speeds=(1, 0.5, 0.5, 0.25)))
    assert plan.weights == [1, 0.5, 0.5, 0.25]
    assert [worker.speed for worker in plan.workers] == [1, 0.5, 0.5, 0.25]


def test_speeds_do_not_change_shares_by_default():
    assert _plan(PlanRequest(speeds=(1, 0.5, 0.5, 0.25))).weights == [1, 1, 1, 1]


def test_shares_by_speed_use_the_ratings_of_nodes_without_emulating_them():
    plan = _plan(PlanRequest(shares="by-speed", speeds=(1, 1, 1, 0.5)), rated=(0.4, 0.4, 0.2, 0.2))
    assert plan.weights == [0.4, 0.4, 0.2, 0.1]
    assert [worker.speed for worker in plan.workers] == [1, 1, 1, 0.5]


def test_shares_can_be_given_for_each_worker():
    plan = _plan(PlanRequest(shares="4, 2,1,1"))
    assert plan.weights == [4, 2, 1, 1]
    assert plan.reasons["shares"] == "as asked"


@pytest.mark.parametrize("shares", ["4,2", "1,1,1,1,1", "3"])
def test_a_wrong_number_of_shares_is_refused(shares):
    with pytest.raises(ConfigError, match=r"\d shares? for 4 workers") as caught:
        _plan(PlanRequest(shares=shares))
    assert caught.value.where == "--shares"


def test_a_wrong_number_of_speeds_is_refused():
    with pytest.raises(ConfigError, match="2 speeds for 1 worker\n") as caught:
        _plan(PlanRequest(speeds=(1, 1)), nodes=["a"])
    assert caught.value.where == "--speed"


@pytest.mark.parametrize("share", ["0", "-1", "nan"])
def test_share_of_zero_is_refused_naming_the_rank(share):
    with pytest.raises(ConfigError, match=r"rank 2 has a share of .* nothing to compute"):
        _plan(PlanRequest(shares=f"1,1,{share},1"))


def test_infinite_share_is_refused():
    with pytest.raises(ConfigError, match="rank 1 has a share of inf: nothing would be left"):
        _plan(PlanRequest(shares="1,inf,1,1"))


@pytest.mark.parametrize("shares", ["fair", "", "1,x,1,1", "by_speed"])
def test_unknown_sharing_rule_is_refused_with_the_known_rules(shares):
    with pytest.raises(ConfigError, match="not a way to share") as caught:
        _plan(PlanRequest(shares=shares))
    assert "by-speed" in caught.value.fix


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5, float("nan")])
def test_speed_outside_zero_to_one_is_refused(speed):
    with pytest.raises(ConfigError) as caught:
        _plan(PlanRequest(speeds=(1, speed, 1, 1)))
    assert caught.value.where == "--speed"


@pytest.mark.parametrize(
    ("count", "fraction", "delayed"),
    [
        (4, 0.5, [2, 3]),
        (4, 1.0, [0, 1, 2, 3]),
        (4, 0.0, []),
        (5, 0.5, [2, 3, 4]),
        (25, 0.5, list(range(12, 25))),
        (1, 0.5, [0]),
        (4, 0.01, [3]),
        (4, 0.3, [3]),
    ],
)
def test_delays_go_to_the_highest_ranks_and_to_at_least_one(count, fraction, delayed):
    plan = _plan(PlanRequest(delay="constant(1)", delayed=fraction), nodes=["a"] * count)
    assert [w.rank for w in plan.workers if w.delay == "constant(1)"] == delayed
    assert {w.delay for w in plan.workers if w.rank not in delayed} <= {""}


def test_fraction_of_delayed_workers_without_a_delay_delays_no_worker():
    assert {worker.delay for worker in _plan(PlanRequest(delayed=1.0)).workers} == {""}


def test_delayed_fraction_above_one_is_refused():
    with pytest.raises(ConfigError, match="not a fraction"):
        _plan(PlanRequest(delay="constant(1)", delayed=1.5))


@pytest.mark.parametrize(("cores", "workers", "threads"), [(8, 4, 2), (2, 4, 1), (7, 2, 3), (1, 1, 1)])
def test_threads_are_cores_divided_by_workers_and_at_least_one(cores, workers, threads):
    plan = _plan(nodes=["a"] * workers, cores=cores)
    assert {worker.threads for worker in plan.workers} == {threads}
    assert "usable core" in plan.reasons["threads"]


def test_requested_number_of_threads_is_used():
    plan = _plan(PlanRequest(threads=3), cores=2)
    assert {worker.threads for worker in plan.workers} == {3}
    assert plan.reasons["threads"] == "as asked"


def test_seed_and_deadlines_are_part_of_the_plan():
    plan = _plan(PlanRequest(seed=5, join_timeout_s=7, round_timeout_s=11))
    assert (plan.run, plan.seed, plan.join_timeout_s, plan.round_timeout_s) == ("a-run", 5, 7, 11)


def test_a_plan_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        _plan().seed = 4


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_number = st.floats(min_value=1e-6, max_value=1e6)
_workers = st.lists(
    st.builds(
        WorkerPlan,
        rank=st.integers(0, 99),
        node=_text,
        weight=_number,
        threads=st.integers(1, 64),
        speed=_number,
        delay=_text,
    ),
    min_size=1,
    max_size=5,
).map(tuple)


@given(
    st.builds(
        Plan,
        run=_text,
        workers=_workers,
        seed=st.integers(0, 2**63 - 1),
        predicted_step_s=st.none() | _number,
        batch=st.none() | st.integers(1, 10**6),
        predicted=st.none()
        | st.builds(
            PredictedStep,
            step_s=_number,
            samples_per_s=_number,
            efficiency=_number,
            compute_s=_number,
            exposed_s=_number,
            bottleneck=_text,
        ),
        left_out=st.lists(st.builds(LeftOut, node=_text, why=_text), max_size=2).map(tuple),
        candidates=st.lists(
            st.builds(PlanCandidate, text=_text, step_s=_number, why=_text), max_size=2
        ).map(tuple),
        reasons=st.dictionaries(_text, _text, max_size=3),
    )
)
def test_written_plan_reads_back_unchanged(tmp_path_factory, plan):
    file = tmp_path_factory.getbasetemp() / "plan.toml"
    file.write_bytes(plan.to_toml().encode())
    assert Plan.read(file) == plan


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"\xff",
        b"run = ",
        b'run = "x"\nworkers = 3\n',
        b'run = "x"\nworkers = [{rank = "one", node = "a"}]\n',
        b'run = "x"\n[[workers]]\nrank = 0\n',
    ],
)
def test_unreadable_plan_is_refused_naming_the_file(tmp_path, content):
    file = tmp_path / "plan.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read the plan") as caught:
        Plan.read(file)
    assert caught.value.where == str(file)
