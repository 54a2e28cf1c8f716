"""The closing table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from echelon.config.units import show_seconds
from echelon.observe.closing import closing_table
from echelon.observe.summary import summarise


def _closing(summary, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(closing_table(summary))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_closing_table_fits_80_columns_and_has_all_figures(imagined):
    text = _closing(summarise(imagined()))
    assert all(len(line) <= 80 for line in text.splitlines())
    header = next(line for line in text.splitlines() if "rank" in line)
    assert " ".join(header.split()) == "rank node share samples/s compute wait sent last delayed"
    row = next(line for line in text.splitlines() if "node-d" in line).split()
    assert row[:3] == ["3", "node-d", "16"]
    assert "21.6 MB" in " ".join(row)
    assert "120 steps in" in text
    assert "accuracy 92.5 %" in text
    assert "Rank 3 (node-d) arrived last" in text


def test_long_names_and_figures_still_fit(imagined, a_plan):
    nodes = [f"a-rather-long-node-name-{index}" for index in range(4)]
    text = _closing(summarise(imagined(a_plan(nodes=nodes, shares=(1600,) * 4))))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "delayed" in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("situation", "missing"),
    [
        ({"speeds": (800.0,), "shares": (32,), "nodes": ("laptop",)}, "delayed"),
        ({"losses": False, "evaluate": False}, "loss"),
        ({"epochs": 0}, "samples/s"),
        ({"gaps": tuple(range(120))}, "delayed"),
    ],
)
def test_the_closing_table_leaves_out_unknown_figures(imagined, a_plan, situation, missing):
    assert missing not in _closing(summarise(imagined(a_plan(**situation))))


def test_without_counted_samples_the_closing_table_has_steps_per_second_and_no_shares(imagined, a_plan):
    summary = summarise(imagined(a_plan(shares=(0, 0, 0, 0), buckets=4)))
    text = " ".join(_closing(summary).split())
    assert f"120 steps in {show_seconds(summary.seconds)}, {120 / summary.seconds:.3g} steps/s" in text
    assert "samples/s" not in text
    assert "share " not in text.replace("share of", "")
    assert "lower limit" not in text


def test_without_events_the_closing_table_is_a_sentence():
    assert _closing(summarise([])) == "No step was recorded.\n"


def test_the_closing_table_says_what_limits_a_step_where_buckets_were_reported(imagined, a_plan):
    told = _closing(summarise(imagined(a_plan(buckets=4))), width=200)
    assert " ms of computing on rank 3 (node-d)." in told
    assert "times its lower limit" not in _closing(summarise(imagined()), width=200)


def test_the_closing_table_of_a_served_run_has_its_drops_and_no_arrivals(imagined_served):
    summary = summarise(imagined_served())
    text = _closing(summary)
    assert all(len(line) <= 80 for line in text.splitlines())
    header = next(line for line in text.splitlines() if "rank" in line)
    assert " ".join(header.split()) == "rank node steps samples/s compute wait dropped held"
    assert f"{summary.all_steps} steps of 4 workers and 6" in text
    assert "delayed" not in text
