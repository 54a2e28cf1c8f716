from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.observe.events import (
    LAUNCHER,
    FaultInjected,
    Logged,
    Noted,
    RunStarted,
    ServerEnded,
    WorkerFailed,
)
from echelon.observe.page.charts import Bar, Segment, row_chart
from echelon.observe.page.history import RoundPoint, collect_history, middle_steps, throughput
from echelon.observe.page.markup import safe
from echelon.observe.page.scale import value_axis
from echelon.observe.report import write_report

_VOID = {"meta", "line", "rect", "circle", "polyline", "polygon"}
_NASTY = """<script>alert("1")</script> & 'quoted' "double" </style> ]]> \x1b[31m"""


class Page(HTMLParser):
    """Reads a page as a browser would, and fails where a tag does not close."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    def headings(self) -> list[str]:
        return [text for text in self.texts if text in _HEADINGS]

    def charts(self) -> list[str]:
        return [attrs["aria-label"] or "" for tag, attrs in self.tags if tag == "svg"]


_HEADINGS = (
    "Synchronisation",
    "Who kept the others waiting",
    "Learning",
    "Throughput",
    "Where the time went",
    "Communication",
    "A few steps close up",
    "The plan",
    "What happened",
)


@pytest.fixture
def page_of(folder, imagined, a_plan, written, tmp_path):
    def make(extra=(), **situation) -> Page:
        written(folder, [*imagined(a_plan(**situation)), *extra], torn=True)
        return Page(write_report(folder, tmp_path / "report.html").read_text(encoding="utf-8"))

    return make


def test_the_page_has_all_its_parts(page_of):
    page = page_of(faults=True)
    assert page.headings() == [
        h for h in _HEADINGS if h not in ("Synchronisation", "Communication", "The plan")
    ]
    assert page.charts() == [
        "how long each worker kept the others waiting",
        "spread of arrivals over time",
        "loss by step",
        "test accuracy by step",
        "throughput over time",
        "where each worker's time went",
        "a few steps, worker by worker",
    ]
    assert "Rank 3 (node-d) arrived last in" in page.text
    assert "slowed node-b down to 0.5 cores" in page.text
    assert "92.5 %" in page.text
    assert "completed" in page.text


def test_the_page_loads_nothing_from_elsewhere(page_of, tmp_path):
    page = page_of(faults=True)
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "srcset", "data", "action"} & set(attrs)
        assert not any(name.startswith("on") for name in attrs)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttpRequest", html)


@pytest.mark.parametrize(
    "situation",
    [
        {"dies": (2, 50)},
        {"dies": (2, 0)},
        {"gaps": (3, 4, 5)},
        {"gaps": tuple(range(120))},
        {"losses": False, "evaluate": False},
        {"losses": False},
        {"speeds": (800.0,), "shares": (32,), "nodes": ("laptop",)},
        {"skew_s": (0.0, 5.0, -3.0, 1.0)},
        {"epochs": 1, "steps_per_epoch": 1},
        {"epochs": 0},
        {"buckets": 1, "epochs": 1, "steps_per_epoch": 1},
        {"buckets": 4, "timed": False},
        {"buckets": 4, "skew_s": (0.0, 5.0, -3.0, 1.0), "links": ((0, 1, 1e7), (3, 9, 1e6))},
        {"buckets": 4, "dies": (2, 0)},
        {
            "speeds": (800.0,) * 25,
            "shares": (8,) * 25,
            "nodes": tuple(f"n{i}" for i in range(25)),
            "epochs": 1,
        },
    ],
)
def test_any_run_has_a_complete_page_without_impossible_numbers(page_of, situation, tmp_path):
    page_of(**situation)
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    drawn = html[html.index("<main>") : html.index("</main>")]
    assert not re.search(r"\b(nan|inf|None)\b", drawn)
    assert not re.search(r'(?:width|height)="-', drawn)


def test_communication_has_a_sentence_and_a_row_per_worker(page_of):
    page = page_of(buckets=4, links=((0, 1, 180e4), (1, 0, 360e4)))
    assert page.headings() == [heading for heading in _HEADINGS[1:] if heading != "The plan"]
    assert (
        "times its lower limit: 100.0 ms for 180.0 kB at 1.8 MB/s on the link from rank 0 (node-a) to "
        in (page.text)
    )
    assert "100.0 ms" in page.texts
    assert "50.0 ms" in page.texts
    assert "1.8 MB/s to rank 1" in page.texts
    assert "% of communication was hidden" in page.text


def test_without_links_the_worker_that_computes_longest_sets_the_limit(page_of):
    page = page_of(buckets=4)
    assert " ms of computing on rank 3 (node-d)." in page.text
    assert "the link from" not in page.text


def test_the_close_up_shows_when_buckets_were_in_flight(page_of):
    page = page_of(buckets=4)
    lane = [attrs for tag, attrs in page.tags if tag == "rect" and attrs["class"] == "fill wire"]
    assert len(lane) == 16, "of four workers in four steps; buckets that overlap are one piece"
    assert all(attrs["height"] == "4" for attrs in lane)
    assert all("4 buckets in flight: " in attrs["data-tip"] for attrs in lane)
    assert "buckets in flight" in page.texts


def test_runs_without_buckets_have_no_communication_section(page_of):
    page = page_of()
    assert "hidden" not in page.text
    assert "buckets" not in page.text


def test_a_failed_run_opens_with_its_reason(page_of):
    page = page_of(dies=(2, 50))
    assert "rank 2 (node-c): killed by signal 9" in page.texts[:8]


def test_a_run_without_steps_says_so(page_of):
    page = page_of(epochs=0)
    assert "No step was recorded, so there is nothing to draw." in page.texts
    assert page.charts() == []
    assert "no latency shaping in this kernel" in page.text


def test_text_from_outside_is_escaped(folder, page_of):
    folder.config.write_text(f"# {_NASTY}\n", encoding="utf-8")
    folder.plan.write_bytes(b"note = '\xff\xfe'\n")
    page = page_of(
        nodes=(_NASTY,) * 4,
        faults=True,
        extra=[
            Noted(t=1_700_000_003.0, rank=0, text=_NASTY),
            WorkerFailed(t=1_700_000_003.5, rank=LAUNCHER, failed=1, node=_NASTY, cause=_NASTY),
            Logged(t=1_700_000_003.6, rank=0, step=1, values={_NASTY: 1.0}),
            RunStarted(t=1_700_000_000.0, rank=LAUNCHER, run=_NASTY, command=[_NASTY], world_size=4),
        ],
    )
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert sum(tag == "style" for tag, _ in page.tags) == 1
    assert """<script>alert("1")</script> & 'quoted'""" in page.text
    assert "\x1b" not in page.text


@settings(max_examples=60)
@given(st.text())
def test_escaped_text_can_be_read_back_and_stays_in_its_attribute(text):
    page = Page(f'<p title="{safe(text)}">{safe(text)}</p>')
    assert [tag for tag, _ in page.tags] == ["p"]
    assert page.tags[0][1]["title"] == "".join(page.texts)
    assert [c for c in "".join(page.texts) if c.isprintable()] == [c for c in text if c.isprintable()]


def test_every_curve_has_tooltips(page_of):
    page = page_of()
    curves = [
        json.loads(attrs["data-hover"] or "")
        for tag, attrs in page.tags
        if tag == "svg" and "data-hover" in attrs
    ]
    assert len(curves) == 4
    spread = curves[0][0]["points"]
    assert len(spread) == 120
    assert spread[0][2].startswith("step 0: ")
    assert spread[0][2].endswith("rank 3 was last")


def test_long_curves_are_thinned(page_of, tmp_path):
    page = page_of(epochs=1, steps_per_epoch=3000, speeds=(800.0, 400.0), shares=(8, 8), nodes=("a", "b"))
    for tag, attrs in page.tags:
        if tag in ("polyline", "polygon"):
            assert len((attrs["points"] or "").split()) <= 1002
    assert (tmp_path / "report.html").stat().st_size < 600_000


def test_configuration_and_plan_are_shown_if_they_exist(folder, page_of):
    folder.config.write_text('model = "lenet"\n')
    page = page_of()
    assert 'model = "lenet"\n' in page.texts
    assert [text for text in page.texts if text in ("Configuration", "Plan")] == ["Configuration"]


def test_numbers_the_script_logged_are_listed(page_of):
    page = page_of(
        extra=[
            Logged(t=1_700_000_002.0 + n, rank=0, step=n, values={"grad norm": float(n)}) for n in range(5)
        ]
    )
    assert "grad norm" in page.texts


def test_a_note_reported_by_all_workers_is_listed_once(page_of):
    page = page_of(
        extra=[Noted(t=1_700_000_002.0 + rank, rank=rank, text="all say so") for rank in range(4)]
    )
    assert page.texts.count("all say so") == 1


def test_a_fault_that_happened_twice_is_listed_twice(page_of):
    times = (1_700_000_002.0, 1_700_000_003.0)
    page = page_of(
        extra=[FaultInjected(t=t, rank=LAUNCHER, action="stop", target="node-a", detail="") for t in times]
    )
    assert page.texts.count("stop node-a") == 2 + 2 * 2  # in the list, and as marks in two charts


def test_disagreeing_clocks_are_corrected_in_the_close_up(page_of):
    page = page_of(skew_s=(0.0, 50.0, -30.0, 10.0))
    assert "were corrected for this chart" in page.text
    assert "time [ms]" in page.texts


def test_an_empty_segment_is_not_drawn_and_a_short_one_is():
    def drawn(end: float) -> int:
        piece = Segment(begin=0.0, end=end, look="late", tip="")
        axis = value_axis([1e6], "x")
        return row_chart([Bar(label="rank 0", segments=[piece])], axis, label="").count("<rect")

    assert (drawn(0.0), drawn(1e-6), drawn(1.0)) == (0, 1, 1)


def test_in_a_long_list_faults_are_kept_and_notes_are_dropped(page_of):
    notes = [Noted(t=1_700_000_000.5 + n / 1000, rank=0, text=f"note {n}") for n in range(300)]
    page = page_of(faults=True, extra=notes)
    assert "slowed node-b down to 0.5 cores" in page.texts
    assert any(re.fullmatch(r"and \d+ more", text) for text in page.texts)


def test_a_run_without_events_is_refused_with_its_folder(folder, tmp_path):
    with pytest.raises(ConfigError, match="no events yet") as caught:
        write_report(folder, tmp_path / "report.html")
    assert caught.value.where == str(folder.events)


def test_a_file_that_cannot_be_written_is_named(folder, imagined, written, tmp_path):
    written(folder, imagined())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write report\.html"):
        write_report(folder, tmp_path / "file" / "report.html")


def _point(step: int, begin_s: float, end_s: float, samples: int = 8, epoch: int = 0, **more) -> RoundPoint:
    return RoundPoint(
        step=step, epoch=epoch, begin_s=begin_s, end_s=end_s, samples=samples, loss=None, **more
    )


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.floats(0, 50), st.integers(0, 1000)), min_size=1, max_size=60
    ).filter(lambda rounds: any(length > 1e-3 for _, length, _ in rounds)),
    st.integers(1, 40),
)
def test_the_throughput_curve_integrates_to_the_samples(rounds, most):
    points = [
        _point(i, begin, begin + length, samples) for i, (begin, length, samples) in enumerate(rounds)
    ]
    curve = throughput(points, most)
    width = (max(p.end_s for p in points) - min(p.begin_s for p in points)) / len(curve)
    assert 1 <= len(curve) <= most
    assert sum(rate * width for _, rate in curve) == pytest.approx(sum(p.samples for p in points), rel=1e-6)
    assert all(rate >= -1e-6 * max(1, sum(p.samples for p in points)) / width for _, rate in curve)


def test_samples_are_spread_over_the_time_their_round_took():
    rounds = [_point(n, float(n), n + 1.0, samples=n) for n in range(7)]
    # Two stretches of 3.5 s: rounds 0 to 2 and half of round 3, and the rest.
    first, second = throughput(rounds, most=2)
    assert first == pytest.approx((1.75, 4.5 / 3.5))
    assert second == pytest.approx((5.25, 16.5 / 3.5))


def test_a_run_without_duration_has_no_throughput_curve():
    assert throughput([]) == throughput([_point(0, 1.0, 1.0)]) == []


def test_the_close_up_comes_from_the_middle_and_stays_within_an_epoch():
    points = [_point(n, n, n + 1, epoch=n // 50, spread_s=0.1, last=0) for n in range(100)]
    assert middle_steps(points) in ((46, 47, 48, 49), (50, 51, 52, 53))
    assert middle_steps(points[:2]) == (0, 1)
    assert middle_steps([]) == ()


def test_the_close_up_prefers_steps_that_all_workers_reported():
    points = [_point(n, n, n + 1, **({"spread_s": 0.1, "last": 0} if n < 20 else {})) for n in range(100)]
    assert max(middle_steps(points)) < 20


def test_history_is_collected_from_events_and_counted_from_the_first_step(imagined, a_plan):
    history = collect_history(imagined(a_plan(faults=True)))
    assert len(history.rounds) == 120
    assert all(point.last in range(4) and point.spread_s > 0 for point in history.rounds)
    assert history.rounds[0].begin_s == 0.0
    assert history.incidents[0].at_s == pytest.approx(-0.4)
    assert [evaluation.epoch for evaluation in history.evaluations] == [0, 1, 2]
    assert [incident.kind for incident in history.incidents] == ["note", "fault", "checkpoint", "end"]
    assert history.incidents[2].text == "3 saved, the last at step 120: ck/120"


@pytest.mark.parametrize(
    ("plan", "charts"),
    [
        ({}, ["what became of each worker's pushes over time"]),
        (
            {"need": 1, "rounds": False, "sync": "async"},
            ["what became of each worker's pushes over time", "age of gradients over time"],
        ),
        (
            {"step_s": (0.01,) * 60, "need": 60, "steps": 120},
            ["what became of each worker's pushes over time"],
        ),
        ({"steps": 1}, []),
    ],
)
def test_a_served_run_has_charts_of_its_updates(
    folder, imagined_served, a_served_plan, written, tmp_path, plan, charts
):
    written(folder, imagined_served(a_served_plan(**plan)))
    html = write_report(folder, tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert "Who kept the others waiting" not in page.headings()
    assert [chart for chart in page.charts() if "pushes" in chart or "gradients" in chart] == charts
    drawn = html[html.index("<main>") : html.index("</main>")]
    assert not re.search(r"\b(nan|inf|None)\b", drawn)
    assert not re.search(r'(?:width|height)="-', drawn)
    assert "arrived last" not in page.text


@pytest.mark.parametrize("codec", ["none", "one-bit"])
def test_a_served_run_shows_what_its_codec_saved(folder, imagined_served, written, tmp_path, codec):
    costs = {"queue_s": 0.001, "apply_s": 0.001, "hand_s": 0.001}
    carried = {
        "pushed_bytes": 32,
        "dense_pushed_bytes": 1024,
        "pulled_bytes": 64,
        "dense_pulled_bytes": 256,
    }
    ended = ServerEnded(t=1_700_000_900.0, rank=4, pushes=1, codec=codec, **costs, **carried)
    written(folder, [*imagined_served(), ended])
    page = Page(write_report(folder, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert ("Communication" in page.headings()) == (codec != "none")
    saved = "32.0 times fewer bytes; the weights it received took 4.0 times fewer bytes"
    assert (saved in page.text) == (codec != "none")
    assert "Logged by the script" not in page.headings(), "costs of servers are not the script's"


def test_learning_is_drawn_over_time_if_workers_do_not_step_together(
    folder, imagined_served, written, tmp_path
):
    written(folder, imagined_served())
    page = Page(write_report(folder, tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "Synchronisation" in page.headings()
    assert "A few steps close up" in page.headings()
    assert "loss over time" in page.charts()
    assert "loss by step" not in page.charts()
    assert "its round is over" in page.texts
    assert "balanced share" not in page.texts


def test_a_run_without_server_and_rounds_shows_its_exchanges(folder, page_of):
    folder.plan.write_text('sync = "local(4)"\n')
    page = page_of()
    assert "local(4): workers exchanged weights after 100 % of their steps" in page.text
    assert "exchanges" in page.texts
    assert "spread of arrivals over time" not in page.charts()


def test_the_throughput_curve_of_a_served_run_integrates_to_the_samples(imagined_served, a_served_plan):
    history = collect_history(imagined_served(a_served_plan(need=1, rounds=False, sync="async")))
    curve = throughput(history.rounds)
    width = curve[1][0] - curve[0][0]
    assert sum(rate * width for _, rate in curve) == pytest.approx(history.summary.samples)


def test_the_plan_is_drawn_and_its_prediction_is_compared_with_what_was_measured(folder, page_of):
    page = page_of()
    assert "The plan" not in page.headings()
    workers = [f'{{ rank = {rank}, node = "node-{rank}", weight = 8 }}' for rank in range(4)]
    folder.plan.write_text(
        f"batch = 32\nworkers = [{', '.join(workers)}]\n"
        "[predicted]\nstep_s = 10.0\nsamples_per_s = 3.2\nbottleneck = 'the link a/b'\n"
    )
    page = page_of()
    assert "The plan" in page.headings()
    assert "the plan's 4 workers, their groups and links" in page.charts()
    assert "A step was to take 10.0 s and took" in page.text
    assert "the link a/b limits it" in page.text
