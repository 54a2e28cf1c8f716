"""Stages of a pipeline in figures, report and trace."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from echelon.observe.events import AnyEvent, PassesTimed, StageAssigned
from echelon.observe.page.stages import stages_section
from echelon.observe.stages import stages_verdict
from echelon.observe.summary import summarise
from echelon.observe.trace import chrome_trace

BEGIN = 1_700_000_000.0


def stage(rank: int, at: int, ranks: list[int]) -> StageAssigned:
    return StageAssigned(
        t=BEGIN,
        rank=rank,
        replica=0,
        stage=at,
        ranks=ranks,
        begin=3 * at,
        end=3 * at + 3,
        first=f"{3 * at}",
        last=f"{3 * at + 2}",
        schedule="filled",
        micro=2,
        predicted_s=0.003,
        predicted_bytes=5e6,
    )


def batch(rank: int, step: int, passes: list[tuple[str, int, int, int, int]]) -> PassesTimed:
    return PassesTimed(
        t=BEGIN + step + 0.5,
        rank=rank,
        step=step,
        start=BEGIN + step,
        passes=passes,
        memory_bytes=7_000_000,
    )


def pipeline() -> list[AnyEvent]:
    """Ranks 4 and 2 are the stages; the first one waits 3 ms of 8, the second one 1 ms of 8."""
    events: list[AnyEvent] = [stage(4, 0, [4, 2]), stage(2, 1, [4, 2])]
    for step in range(3):
        events += [
            batch(
                4,
                step,
                [
                    ("forward", 0, 0, 0, 1000),
                    ("forward", 1, 1000, 0, 1000),
                    ("backward", 0, 2000, 1500, 1000),
                    ("weights", 0, 4500, 0, 1000),
                    ("backward", 1, 5500, 500, 1000),
                    ("result", 0, 7000, 1000, 0),
                ],
            ),
            batch(2, step, [("forward", 0, 0, 1000, 3000), ("backward", 0, 4000, 0, 4000)]),
        ]
    return events


def test_a_stage_has_its_bubble_and_for_whom_it_waited():
    second, first = summarise(pipeline()).stages
    assert (first.rank, second.rank) == (4, 2)
    assert first.bubble == pytest.approx(3 / 8)
    assert second.bubble == pytest.approx(1 / 8)
    assert first.waits_s == pytest.approx({2: 0.009})
    assert second.waits_s == pytest.approx({4: 0.003})
    assert (first.micro_s, second.micro_s) == pytest.approx((0.0025, 0.007))
    assert (first.predicted_s, first.memory_bytes) == (0.003, 7_000_000)


def test_a_sentence_names_the_slowest_stage_and_who_waits_for_whom():
    said = stages_verdict(summarise(pipeline()).stages)
    assert "stages waited 25 % of their time" in said
    assert "the slowest is rank 2 (layers 3 to 5), 7.0 ms a micro-batch" in said
    assert "rank 4 waited most, 38 %, for rank 2" in said
    assert stages_verdict(()) == stages_verdict(summarise(pipeline()).stages[:1]) == ""


def test_the_report_has_a_row_for_each_stage():
    page = stages_section(summarise(pipeline()).stages)
    for text in ("3 to 5: 3 … 5", "38 %", "rank 2 100 %", "7.0 MB", "5.0 MB", "3.0 ms"):
        assert text in page
    assert stages_section(()) == ""


def test_the_trace_has_a_lane_of_passes_and_waits():
    traced = chrome_trace(pipeline())["traceEvents"]
    lane = [one for one in traced if one["ph"] == "X" and one["pid"] == 140]
    assert [one["name"] for one in lane[:8]] == [
        "forward 0",
        "forward 1",
        "wait for rank 2",
        "backward 0",
        "weights 0",
        "wait for rank 2",
        "backward 1",
        "wait for rank 2",
    ]
    assert [one["args"]["step"] for one in lane] == [0] * 8 + [1] * 8 + [2] * 8
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(lane))
    named = [one for one in traced if one["name"] == "thread_name" and one["tid"] == lane[0]["tid"]]
    assert [one["args"]["name"] for one in named] == ["stage"]


def test_passes_of_an_unknown_stage_are_drawn_and_not_counted():
    events = [event for event in pipeline() if isinstance(event, PassesTimed)]
    assert summarise(events).stages == ()
    names = {one["name"] for one in chrome_trace(events)["traceEvents"] if one["ph"] == "X"}
    assert {"wait", "forward 0", "weights 0"} <= names


def test_a_worker_with_several_chunks_waits_for_its_neighbour_in_the_circle():
    first = msgspec.structs.replace(stage(4, 0, [4, 2]), chunks=[(0, 2), (4, 6)], end=6)
    passes = [("forward", 0, 0, 0, 1000), ("forward", 0, 1000, 500, 1000), ("backward", 0, 2500, 0, 2000)]
    events: list[AnyEvent] = [first, msgspec.structs.replace(batch(4, 0, passes), chunks=[0, 1, 1])]
    (figures,) = summarise(events).stages
    assert figures.layers == "0 to 1 and 4 to 5"
    assert figures.waits_s == pytest.approx({2: 0.0005})
    assert figures.micro_s == pytest.approx(0.004)
    names = [one["name"] for one in chrome_trace(events)["traceEvents"] if one["ph"] == "X"]
    assert names == [
        "forward 0 of chunk 0",
        "wait for rank 2",
        "forward 0 of chunk 1",
        "backward 0 of chunk 1",
    ]
