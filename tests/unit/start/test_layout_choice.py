"""`--parallel auto`: which layouts are tried, which one is taken, and what is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.config.resolve import resolve
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError, PlanError
from echelon.observe.events import LayoutsPredicted
from echelon.parallel.candidates import candidate_layouts
from echelon.parallel.layout import extents, parse_layout
from echelon.start import layout_choice
from echelon.start.few_steps import TriedRun
from echelon.start.layout_choice import KeptLayout, chosen_layout
from echelon.start.run import Target

TARGET = Target(argv=["-m", "echelon.train.job"], name="mlp")


@given(st.integers(1, 64))
def test_every_layout_that_is_tried_is_for_these_workers(workers):
    layouts = candidate_layouts(workers)
    assert layouts[0] == "data"
    assert len(layouts) == len(set(layouts)) <= 17
    assert set(candidate_layouts(workers, predicted=False)) <= set(layouts)
    assert len(candidate_layouts(workers, predicted=False)) <= 6
    for text in layouts:
        extents(parse_layout(text), workers)


def test_a_later_layout_has_to_be_clearly_faster():
    assert KeptLayout(steps_s={"data": 1.0, "sharded(level=1)": 0.98}).best == "data"
    assert KeptLayout(steps_s={"data": 1.0, "a": 0.9, "b": 0.88}).best == "a"


def test_the_layout_with_the_shortest_step_is_taken_kept_and_explained(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    calls: list[str] = []

    def tried(settings, origins, target, steps):
        calls.append(settings.parallel)
        if settings.parallel in ("auto", candidate_layouts(2)[1]):
            raise PlanError("the model needs 2.0 MiB, the 2 stages have 1.0 MiB: 1.0 MiB are missing")
        steps_s = {"data": 0.3, "sharded(level=1)": 0.1, "sharded(level=3)": 0.2}
        return TriedRun(step_s=steps_s[settings.parallel], samples=64)

    monkeypatch.setattr(layout_choice, "tried", tried)
    said: list[str] = []
    resolved = resolve(TrainSettings, {"parallel": "auto", "workers": 2})
    found = chosen_layout(resolved, TARGET, said.append)
    assert found.resolved.settings.parallel == "sharded(level=1)"
    assert calls == [
        "auto",
        *candidate_layouts(2, predicted=False),
        "sharded(level=1)",
        "sharded(level=3)",
        "data",
    ], "workers that cannot rank layouts: all are tried"
    assert said[1] == "trying layout 1 of 4: data"
    assert "sharded(level=1), 100.0 ms a step; data 300.0 ms" in found.notes[0]
    assert "1.0 MiB are missing" in found.notes[1], "what was left out is named with its reason"
    again = chosen_layout(resolved, TARGET, said.append)
    assert again.resolved.settings.parallel == "sharded(level=1)"
    assert again.notes[0].endswith("(from an earlier run)")
    assert len(calls) == 8, "nothing is tried again"


def test_the_best_of_the_ranking_and_data_are_tried_and_other_hopeless_ones_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    calls: list[str] = []
    predicted = {"sharded(level=1)": 0.1, "sharded(level=3)": 0.9, "data": 1.0}
    ranking = LayoutsPredicted(
        t=0.0,
        rank=0,
        chosen="sharded(level=1)",
        steps_s=predicted,
        worth=["sharded(level=1)"],
        left_out={"pipeline(stages=2)": "batch normalisation would see one micro-batch at a time"},
    )

    def tried(settings, origins, target, steps):
        calls.append(settings.parallel)
        if settings.parallel == "auto":
            return TriedRun(step_s=0.1, samples=64, layouts=ranking)
        return TriedRun(step_s={"data": 0.05, "sharded(level=1)": 0.1}[settings.parallel], samples=64)

    monkeypatch.setattr(layout_choice, "tried", tried)
    resolved = resolve(TrainSettings, {"parallel": "auto", "workers": 2})
    found = chosen_layout(resolved, TARGET, lambda text: None)
    assert calls == ["auto", "data", "data", "sharded(level=1)"]
    assert found.resolved.settings.parallel == "data", "measured, whatever was predicted"
    notes = "; ".join(found.notes)
    assert "sharded(level=3) was left out: 900.0 ms a step were predicted" in notes
    assert "pipeline(stages=2) was left out: batch normalisation" in notes


def test_if_no_layout_works_the_error_says_why(monkeypatch):
    def tried(settings, origins, target, steps):
        raise PlanError("the model needs 2.0 MiB: 1.0 MiB are missing")

    monkeypatch.setattr(layout_choice, "tried", tried)
    resolved = resolve(RunSettings, {"parallel": "auto", "workers": 2})
    with pytest.raises(ConfigError, match=r"no layout works; data: .*1\.0 MiB are missing"):
        chosen_layout(resolved, Target(argv=["none.py"], name="none"), print)


def test_a_plans_file_contradicts_it():
    resolved = resolve(RunSettings, {"parallel": "auto", "plan": "plan.toml"})
    with pytest.raises(ConfigError, match="says how workers are used"):
        chosen_layout(resolved, TARGET, print)
