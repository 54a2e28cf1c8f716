import json
import math
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from echelon.simulate.compare import compare, in_words
from echelon.simulate.outcome import Point, Run, SimulationResult, Totals
from echelon.simulate.page import page_html, show_spread
from echelon.simulate.profile import Profile
from echelon.simulate.setting import Setting

SECONDS = 10.0
TOTALS = Totals(
    gradients=40, applied=38, dropped=1, updates=10, samples=1216, staleness_mean=2.5, staleness_max=7,
    waiting_share=0.25,
)  # fmt: skip


def _run(policy, seed, accuracies, losses=None, staleness=2.5):
    losses = losses or [2.3 - accuracy for accuracy in accuracies]
    step = SECONDS / (len(accuracies) - 1)
    curve = tuple(
        Point(
            t=index * step,
            gradients=40 * index,
            updates=10 * index,
            train_loss=loss,
            test_loss=loss,
            test_accuracy=accuracy,
        )
        for index, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True))
    )
    totals = Totals(
        **{name: getattr(TOTALS, name) for name in TOTALS.__slots__} | {"staleness_mean": staleness}
    )
    return Run(policy=policy, seed=seed, curve=curve, totals=totals)


def _outcome(*runs, **fields):
    seeds = len({run.seed for run in runs})
    setting = Setting(seconds=SECONDS, seeds=seeds, **fields)
    return SimulationResult(setting=setting, profile=Profile(compute_s=0.02), runs=runs)


def _page(outcome, **more):
    return page_html(outcome, compare(outcome), **more)


TWO = _outcome(
    _run("full", 0, [0.1, 0.5, 0.7], staleness=0.0),
    _run("full", 1, [0.1, 0.4, 0.6], staleness=0.0),
    _run("async", 0, [0.1, 0.6, 0.8]),
    _run("async", 1, [0.1, 0.6, 0.9]),
)


class _Drawing(HTMLParser):
    """The charts: each with its label, the lines, the areas and the size."""

    def __init__(self, page):
        super().__init__()
        self.charts = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "svg":
            self.charts.append(
                {"label": attributes["aria-label"], "polyline": [], "polygon": [], "axis": [], "grid": []}
                | {"hover": attributes.get("data-hover")}
            )
        elif tag in ("polyline", "polygon"):
            points = [tuple(map(float, pair.split(","))) for pair in attributes["points"].split()]
            self.charts[-1][tag].append((attributes["class"], points))
        elif tag == "line" and attributes.get("class") in ("axis", "grid"):
            self.charts[-1][attributes["class"]].append(
                tuple(float(attributes[name]) for name in ("x1", "x2", "y1", "y2"))
            )

    def chart(self, label):
        return next(chart for chart in self.charts if chart["label"].startswith(label))


def _lines(chart):
    return {look: points for look, points in chart["polyline"] if "band" not in look}


def test_every_chart_has_a_line_per_policy_and_a_band_over_the_seeds():
    charts = _Drawing(_page(TWO)).charts
    assert [chart["label"].partition(" over")[0] for chart in charts] == [
        "Train loss", "Test loss", "Test accuracy", "Gradients computed", "Gradients computed per update",
    ]  # fmt: skip
    for chart in charts:
        assert list(_lines(chart)) == ["line policy p0", "line policy p1"]
        assert [look for look, _ in chart["polygon"]] == ["area policy p0 band", "area policy p1 band"]


def test_one_seed_has_no_band():
    for chart in _Drawing(_page(_outcome(_run("full", 0, [0.1, 0.5])))).charts:
        assert not chart["polygon"]


def test_everything_drawn_is_inside_the_axes():
    for chart in _Drawing(_page(TWO)).charts:
        left, right, bottom, _ = chart["axis"][0]
        top = min(y for *_, y in chart["grid"])
        for _, points in chart["polyline"] + chart["polygon"]:
            assert all(left <= x <= right and top <= y <= bottom for x, y in points), chart["label"]


def test_lines_are_drawn_at_the_means():
    chart = _Drawing(_page(TWO)).chart("Test accuracy")
    left, right, bottom, _ = chart["axis"][0]
    top = min(y for *_, y in chart["grid"])  # 100 %; the axis begins at 0
    for look, means in (("line policy p0", [0.1, 0.45, 0.65]), ("line policy p1", [0.1, 0.6, 0.85])):
        points = _lines(chart)[look]
        assert [x for x, _ in points] == pytest.approx([left, (left + right) / 2, right], abs=0.1)
        assert [y for _, y in points] == pytest.approx(
            [bottom + m * (top - bottom) for m in means], abs=0.1
        )


def test_bands_reach_from_the_smallest_to_the_largest_value():
    chart = _Drawing(_page(TWO)).chart("Test accuracy")
    *_, bottom, _ = chart["axis"][0]
    top = min(y for *_, y in chart["grid"])
    _, band = chart["polygon"][0]
    ends = {round((bottom - y) / (bottom - top), 2) for x, y in band if x == max(x for x, _ in band)}
    assert ends == {0.6, 0.7}


def test_tooltips_have_policy_time_and_value():
    curves = json.loads(unescape(_Drawing(_page(TWO)).chart("Test accuracy")["hover"]))
    assert [curve["points"][-1][2] for curve in curves] == ["full at 10 s: 65.0 %", "async at 10 s: 85.0 %"]


def test_gradients_per_update_are_counted_between_evaluations():
    chart = _Drawing(_page(TWO)).chart("Gradients computed per update")
    assert len(_lines(chart)["line policy p0"]) == 2
    curves = json.loads(unescape(chart["hover"]))
    assert curves[0]["points"][0][2] == "full at 2.5 s: 4"


def test_a_policy_that_diverges_does_not_hide_the_others():
    outcome = _outcome(
        _run("full", 0, [0.1, 0.5, 0.7], [2.0, 1.0, 0.5]),
        _run("async", 0, [0.1, 0.1, 0.1], [2.0, 1e9, math.nan]),
    )
    page = _page(outcome)
    chart = _Drawing(page).chart("Test loss")
    *_, bottom, _ = chart["axis"][0]
    top = min(y for *_, y in chart["grid"])
    diverged, good = _lines(chart)["line policy p1"], _lines(chart)["line policy p0"]
    assert len(diverged) == 2
    assert diverged[1][1] == pytest.approx(top, abs=0.1)
    assert (bottom - good[0][1]) / (bottom - top) > 0.3
    assert "Losses above 6 are drawn at the top." in page


def test_the_page_is_self_contained_and_escapes_text_from_outside():
    page = _page(TWO, command='echelon simulate --sync "<b>"')
    assert not re.search(r"""(src|href)=|@import|url\(|https?:""", page)
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "prefers-color-scheme: dark" in page


def test_more_policies_than_colours_have_distinct_lines():
    outcome = _outcome(*(_run(f"p{n}", 0, [0.1, 0.5]) for n in range(10)))
    assert len(_lines(_Drawing(_page(outcome)).chart("Test loss"))) == 10


def test_without_gradients_there_are_no_learning_curves():
    curve = tuple(Point(t=t, gradients=int(t), updates=0) for t in (0.0, SECONDS))
    run = Run(policy="none", seed=0, curve=curve, totals=TOTALS)
    outcome = _outcome(run, gradients=False)
    labels = [chart["label"] for chart in _Drawing(_page(outcome)).charts]
    assert labels == ["Gradients computed over virtual time"]
    assert in_words(outcome, compare(outcome)) == [
        "none applies 3.80 gradients per second; its workers wait for 25 % of the time."
    ]


def test_profile_and_setting_are_shown_with_their_sources():
    page = _page(TWO, sources={"compute": "measured on this machine", "link": "given"})
    assert '<td class="words">a gradient</td><td class="words wide">20.0 ms</td>' in page
    assert "measured on this machine" in page
    assert "sgd, learning rate 0.01" in page


# Comparison


def test_figures_are_over_seeds_and_differences_are_paired():
    full, other = compare(TWO, until_accuracy=0.65)
    assert full.test_accuracy.end.mean == pytest.approx(0.65)
    assert full.test_accuracy.end.deviation == pytest.approx(math.sqrt(0.005))
    assert full.test_accuracy.difference.mean == 0
    assert other.test_accuracy.difference.mean == pytest.approx(
        TWO.difference("async", "full", "test_accuracy")
    )
    assert other.test_accuracy.difference.deviation == pytest.approx(0.1 / math.sqrt(2))
    assert (full.reached, other.reached) == (1, 2)
    assert other.reached_s is not None
    assert other.reached_s.mean == 10.0


def test_sentences_compare_the_best_and_the_worst_with_the_first():
    outcome = _outcome(
        _run("full", 0, [0.1, 0.5]), _run("good", 0, [0.1, 0.9]), _run("middling", 0, [0.1, 0.6]),
        _run("bad", 0, [0.1, 0.1], staleness=0.0),
    )  # fmt: skip
    assert in_words(outcome, compare(outcome)) == [
        "good is 20.0 points ahead of full in test accuracy, averaged over the run. "
        "It applied 38 gradients, 1.00 times as many as full; they were 2.5 updates old on average.",
        "bad is 20.0 points behind full in test accuracy, averaged over the run. "
        "It applied 38 gradients, 1.00 times as many as full; they were never stale.",
    ]


def test_a_difference_smaller_than_its_spread_is_marked():
    outcome = _outcome(
        _run("full", 0, [0.5, 0.5]), _run("full", 1, [0.5, 0.5]),
        _run("async", 0, [0.5, 0.7]), _run("async", 1, [0.5, 0.4]),
    )  # fmt: skip
    (said,) = in_words(outcome, compare(outcome))
    assert "2.5 points ahead of full" in said
    assert "this is less than the spread over the seeds (± 10.6)" in said


def test_equal_policies_are_called_equal():
    outcome = _outcome(_run("full", 0, [0.1, 0.5]), _run("local(1)", 0, [0.1, 0.5]))
    assert in_words(outcome, compare(outcome))[0].startswith("local(1) is as good as full")


def test_a_loss_that_is_not_finite_is_shown_as_unknown():
    outcome = _outcome(_run("full", 0, [0.1, 0.1], [2.0, math.inf]))
    assert show_spread(compare(outcome)[0].test_loss.end) == "-"


def test_an_accuracy_never_reached_is_shown_as_never():
    page = page_html(TWO, compare(TWO, 0.99), until_accuracy=0.99)
    assert "to 99 %" in page
    assert page.count("never") == 2
