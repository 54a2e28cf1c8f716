"""Trainings with tiny codecs, and the page about them."""

import math
import re
from dataclasses import dataclass, replace
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from typing import ClassVar

import pytest
import torch

from echelon.bench.codecs import (
    Bench,
    Comparison,
    Evaluation,
    Trial,
    asked_codecs,
    compare_codecs,
    in_words,
    show_times,
    usual_codecs,
)
from echelon.bench.codecs_page import HEAD, codecs_html, rows_of, show_worse, times_axis
from echelon.codec.codec import CODECS, Codec, StandIn
from echelon.config.call import parse_call
from echelon.errors import ConfigError, UnknownName
from echelon.simulate.learner import Problem
from echelon.simulate.order import Order
from echelon.simulate.setting import Setting

BENCH = Bench(model="mlp(8, 1)", data="digits", workers=3, steps=12, batch=4, lr=0.1, test_samples=50)
NONE = CODECS.build("none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heavy(Codec):
    """A lossless codec with momentum of its own."""

    name: ClassVar[str] = "heavy"
    travels = "gather"
    ratio: float = 1.0
    momentum: float = 0.9

    def begin(self, length):
        return {"velocity": torch.zeros(length)}

    def encode(self, values, state, turn):
        return self.write(state["velocity"].mul_(self.momentum).add_(values), state, turn)

    def write(self, values, state, turn, rest=None):
        return values.clone().view(torch.uint8)

    def read(self, payload, out, turn, *, add=False):
        out.add_(payload.view(torch.float32)) if add else out.copy_(payload.view(torch.float32))

    def bound(self, values):
        return torch.zeros_like(values)


class Signs(Heavy):
    """One byte per element: its sign."""

    name: ClassVar[str] = "signs"
    momentum = 0.0

    def encode(self, values, state, turn):
        return values.sign().to(torch.int8).view(torch.uint8)

    def read(self, payload, out, turn, *, add=False):
        assert add
        out.add_(payload.view(torch.int8), alpha=0.001)


class Exploding(Heavy):
    """Gives infinity from the third step on."""

    name: ClassVar[str] = "exploding"

    def read(self, payload, out, turn, *, add=False):
        out.fill_(math.inf if turn.step >= 2 else 0.0)


@pytest.fixture(scope="module")
def found():
    return compare_codecs(BENCH, {"none": NONE, "signs": Signs(), "exploding": Exploding()})


def test_a_lossless_codec_equals_sgd_with_the_global_batch():
    problem = Problem(Setting(model=BENCH.model, data=BENCH.data, test_samples=BENCH.test_samples))
    module = problem.build(BENCH.seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=BENCH.lr, momentum=BENCH.momentum)
    order = Order(problem.samples, BENCH.seed)
    for _ in range(BENCH.steps):
        x, y = problem.batch(order.take(BENCH.workers * BENCH.batch))
        optimizer.zero_grad()
        problem.loss(module(x), y).backward()
        optimizer.step()
    module.eval()
    with torch.no_grad():
        (loss,) = [float(problem.loss(module(x), y)) for x, y in problem.evaluation("test")]
    trained = compare_codecs(BENCH, {"none": NONE}).trials[0]
    assert trained.loss == pytest.approx(loss, rel=1e-4)
    assert trained.loss < 0.9 * trained.curve[0].loss


def test_a_codecs_momentum_replaces_the_optimizers():
    exact, heavy = compare_codecs(BENCH, {"none": NONE, "heavy": Heavy()}).trials
    assert heavy.loss == pytest.approx(exact.loss, rel=1e-4)


def test_trainings_start_alike_and_are_reproducible(found):
    again = compare_codecs(BENCH, {"signs": Signs(), "none": NONE})
    assert again.trials[0].curve == found.trials[1].curve
    assert again.trials[1].curve == found.trials[0].curve
    assert len({trial.curve[0] for trial in found.trials}) == 1
    assert found.trials[0].curve != found.trials[1].curve
    assert compare_codecs(replace(BENCH, seed=1), {"none": NONE}).trials[0].curve != found.trials[0].curve


def test_several_seeds_are_trained_separately_and_averaged():
    codecs = {"none": NONE, "signs": Signs()}
    apart = [compare_codecs(replace(BENCH, seed=seed), codecs) for seed in (3, 4)]
    both = compare_codecs(replace(BENCH, seed=3, seeds=2), codecs)
    for index, one in enumerate(both.trials):
        assert one.losses == tuple(alone.trials[index].loss for alone in apart)
        assert one.loss == pytest.approx(sum(one.losses) / 2)
        assert [seen.step for seen in one.curve] == [seen.step for seen in apart[0].trials[0].curve]
    differ = [alone.worse(alone.trials[1]) for alone in apart]
    assert both.spread(both.trials[1]) == pytest.approx((min(differ), max(differ)))
    assert min(differ) < both.worse(both.trials[1]) < max(differ)
    assert apart[0].spread(apart[0].trials[1]) is None
    assert "Losses are means of 2 seeds" in in_words(both)[-1]
    assert re.fullmatch(r"[+-][\d.]+ % \([+-]?[\d.]+ to [+-]?[\d.]+\)", rows_of(both)[1][-1])
    assert "seeds 3 to 4" in codecs_html(both)


def test_a_codec_that_stops_with_one_seed_counts_as_stopped():
    class Unlucky(Heavy):
        """Gives infinity from the third step on, if its states were not the first."""

        def begin(self, length):
            begun.append(length)
            return {"turn": torch.full((length,), float(len(begun) > of_one_seed))}

        def encode(self, values, state, turn):
            return self.write(state["turn"], state, turn)

        def read(self, payload, out, turn, *, add=False):
            second = bool(payload.view(torch.float32).any())
            out.fill_(math.inf if second and turn.step >= 2 else 0.0)

    begun = []
    module = Problem(Setting(model=BENCH.model, data=BENCH.data)).build(0)
    of_one_seed = BENCH.workers * len(list(module.parameters()))
    found = compare_codecs(replace(BENCH, seeds=2), {"none": NONE, "unlucky": Unlucky()})
    assert found.trials[1].broke_at == 4
    assert found.trials[1].loss is found.worse(found.trials[1]) is found.spread(found.trials[1]) is None
    assert len(codecs_html(found)) > 1000


def test_dropout_is_the_same_for_all_codecs(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 40)
    bench = replace(BENCH, model="char-lstm(8, 2, dropout=0.5)", data=f'text("{text}", context=8)')

    class Drawing(Heavy):
        def write(self, values, state, turn, rest=None):
            torch.rand(7)
            return Heavy.write(self, values, state, turn)

    quiet, drawing = compare_codecs(bench, {"heavy": Heavy(), "drawing": Drawing()}).trials
    assert drawing.curve == quiet.curve


def test_a_comparison_leaves_threads_and_random_state_unchanged():
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    compare_codecs(replace(BENCH, steps=1), {"none": NONE})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_bytes_are_counted_and_compared_with_a_ring_of_float32(found):
    exact, signs, _ = found.trials
    assert found.smaller(exact) == 1.0
    elements = found.gradient_bytes / 4
    assert signs.sent_bytes == 2 * elements  # to two others, a byte for each
    assert found.smaller(signs) == pytest.approx(8 / 3, rel=1e-2)  # 2 * 2/3 * 4 bytes to 2
    assert found.wire_s(signs) == signs.sent_bytes / 12.5e6
    assert found.step_s(signs) == found.compute_s + signs.coding_s + found.wire_s(signs)
    assert min(found.compute_s, signs.encode_s, signs.decode_s) > 0


def test_the_curve_includes_start_and_end():
    for steps in (1, 19, 45):
        curve = compare_codecs(replace(BENCH, steps=steps), {"none": NONE}).trials[0].curve
        assert (curve[0].step, curve[-1].step) == (0, steps)
        assert len(curve) <= 25
        assert len({seen.step for seen in curve}) == len(curve)


def test_a_codec_with_infinite_gradients_stops_and_is_named(found):
    broken = found.trials[2]
    assert broken.broke_at == 4
    assert broken.loss is None
    assert found.worse(broken) is None
    assert "exploding stopped at step 4: a gradient was not finite." in in_words(found)
    assert rows_of(found)[2][5] == "stopped at 4"


def test_progress_is_reported_step_by_step():
    told = []
    compare_codecs(replace(BENCH, steps=2), {"none": NONE, "signs": Signs()}, lambda *at: told.append(at))
    assert told == [("none", 1), ("none", 2), ("signs", 1), ("signs", 2)]
    told.clear()
    compare_codecs(replace(BENCH, steps=2, seeds=2), {"none": NONE}, lambda *at: told.append(at))
    assert told == [("none", step) for step in (1, 2, 3, 4)]


# What is asked


def test_all_registered_codecs_are_compared_by_default_and_can_be_built():
    usual = usual_codecs()
    assert usual[0] == "none"
    stand_ins = {name for name in CODECS.names() if issubclass(CODECS.get(name), StandIn)}
    assert {parse_call(text).name for text in usual} == set(CODECS.names()) - stand_ins
    assert list(asked_codecs(usual, 0.9)) == usual


def test_the_exact_codec_always_comes_first():
    assert list(asked_codecs(["top-k"], 0.9)) == ["none", "top-k"]
    assert list(asked_codecs(["top-k", "none"], 0.9)) == ["none", "top-k"]


def test_a_codec_gets_the_given_momentum_unless_it_has_its_own(monkeypatch):
    monkeypatch.setitem(CODECS._own, "heavy", Heavy)
    texts = ["heavy", "heavy(ratio=0.5)", "heavy(momentum=0.3)", "heavy(0.5, 0.4)"]
    built = asked_codecs(texts, 0.7)
    assert [built[text].momentum for text in texts] == [0.7, 0.7, 0.3, 0.4]
    assert built["heavy(ratio=0.5)"].ratio == 0.5


def test_an_unknown_or_repeated_codec_is_refused():
    with pytest.raises(UnknownName) as caught:
        asked_codecs(["topk"], 0.9)
    assert (caught.value.nearest, caught.value.where) == ("top-k", "--codecs")
    with pytest.raises(ConfigError, match="twice"):
        asked_codecs(["top-k", "top-k"], 0.9)


def test_a_codec_that_chooses_another_is_refused():
    with pytest.raises(ConfigError, match="auto only chooses another codec"):
        asked_codecs(["auto"], 0.9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("workers", 1), ("steps", 0), ("batch", 0), ("seeds", 0), ("lr", 0.0), ("lr", math.nan),
        ("momentum", 1.0), ("momentum", -0.1), ("decay", 1.1), ("decay", -0.1), ("seed", -1),
        ("test_samples", -1),
    ],
)  # fmt: skip
def test_invalid_options_are_refused(field, value):
    with pytest.raises(ConfigError) as caught:
        replace(BENCH, **{field: value})
    assert caught.value.where == "--" + field.replace("_", "-")


# What it shows


def _trial(codec, loss, sent_bytes, coding_s=0.001, broke_at=None):
    curve = (Evaluation(step=0, loss=2.0, accuracy=0.1), Evaluation(step=10, loss=loss, accuracy=0.5))
    return Trial(
        codec=codec, curve=curve, sent_bytes=sent_bytes, encode_s=coding_s, decode_s=0.0, broke_at=broke_at
    )


def _comparison(*trials):
    bench = replace(BENCH, steps=10, link_bytes_per_s=1e6)
    return Comparison(
        bench=bench, trials=trials, compute_s=0.01, gradient_bytes=75_000, exact_bytes=100_000
    )


EXACT = _trial("none", 1.0, 100_000, 0.0)


def test_sentences_name_the_smallest_good_codec_and_the_fastest():
    close, smaller, far = (
        _trial("close", 0.99, 50_000),
        _trial("smaller", 1.005, 25_000, 0.5),
        _trial("far", 1.2, 1000),
    )
    said = in_words(_comparison(EXACT, close, smaller, far))
    assert said[0] == (
        "Smallest codec whose loss is at most 1 % above none's: smaller. It sends 4.0x fewer bytes than "
        "float32; its loss is 0.5 % above none's."
    )
    assert said[1] == (
        "Fastest predicted step at this link, of these codecs: close, 1.8 times as fast as none."
    )
    assert said[2].startswith("Only one seed was trained")


def test_sentences_say_if_no_codec_is_worth_it():
    slow = _trial("slow", 1.5, 90_000, 1.0)
    said = in_words(_comparison(EXACT, slow, _trial("broken", 1.0, 10, broke_at=3)))
    assert said[0] == "No codec has a loss of at most 1 % above none's."
    assert said[1] == "No codec has a faster predicted step at this link than none."
    assert said[-1].startswith("broken stopped at step 3")
    assert len(in_words(_comparison(EXACT))) == 1


def test_the_spread_over_seeds_needs_losses_of_all_seeds():
    exact, half = (replace(_trial("x", 1.0, 10), losses=losses) for losses in ((2.0, 0.0), (2.2, 0.1)))
    found = _comparison(exact, half)
    assert replace(found, bench=replace(found.bench, seeds=2)).spread(half) is None
    exact = replace(exact, losses=(2.0, 1.0))
    found = replace(found, bench=replace(found.bench, seeds=2), trials=(exact, half))
    assert found.spread(half) == pytest.approx((-0.9, 0.1))


def test_figures_are_formatted_for_display():
    rows = rows_of(_comparison(EXACT, _trial("half", 1.05, 50_000)))
    assert rows[0] == ["none", "1.0x", "100.0 kB", "0 µs", "110.0 ms", "1.0000", ""]
    assert rows[1] == ["half", "2.0x", "50.0 kB", "1.0 ms", "61.0 ms", "1.0500", "+5.0 %"]
    assert (show_worse(-0.00001), show_worse(None), show_worse(-0.1)) == ("0.0 %", "-", "-10.0 %")
    assert (show_times(31.84), show_times(1234.5), show_times(math.inf)) == ("31.8x", "1,234x", "-")


class _Tags(HTMLParser):
    """Checks that all tags are closed, and keeps dots and labels."""

    def __init__(self):
        super().__init__()
        self.open, self.dots, self.labels = [], [], []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "circle" and found.get("r") == "5":
            self.dots.append((float(found["cx"]), float(found["cy"]), found["data-tip"]))
        if tag == "text" and found["class"] == "label":
            self.labels.append([float(found["x"]), float(found["y"]), ""])
        if tag not in ("meta", "line", "circle", "polyline", "polygon", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_data(self, data):
        if self.open and self.open[-1] == "text" and self.labels and not self.labels[-1][2]:
            self.labels[-1][2] = data

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def _read(page):
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def test_a_dot_is_further_right_for_fewer_bytes_and_lower_for_less_loss():
    page = codecs_html(
        _comparison(EXACT, _trial("ten", 1.2, 10_000), _trial("hundred", 1.1, 1000)), command="echelon x"
    )
    none, ten, hundred = _read(page).dots
    assert hundred[0] - ten[0] == pytest.approx(ten[0] - none[0], abs=0.2)  # logarithmic
    assert ten[0] > none[0]
    assert ten[1] < hundred[1] < none[1]
    assert hundred[2] == "hundred: 100x fewer bytes, loss 1.1000, coding 1.0 ms, step 12.0 ms"
    assert [label[2] for label in _read(page).labels][:3] == [
        "none, 110.0 ms",
        "ten, 21.0 ms",
        "hundred, 12.0 ms",
    ]
    assert "<code>echelon x</code>" in page


def test_labels_of_dots_in_one_place_do_not_overlap():
    trials = [_trial(f"codec-{index}", 1.0, 10_000) for index in range(12)]
    heights = sorted(y for _, y, _ in _read(codecs_html(_comparison(EXACT, *trials))).labels[1:])
    assert len(heights) == 12
    assert min(high - low for low, high in pairwise(heights)) >= 13.9


def test_the_page_has_all_codecs_and_escapes_them(found):
    page = codecs_html(found)
    tags = _read(page)
    assert len(tags.dots) == 2  # what broke has no loss to be drawn at
    text = unescape(re.sub(r"<[^>]*>", " ", page))
    for word in (*HEAD, "none", "signs", "exploding", "predicted", "measured", *in_words(found)):
        assert word in text
    assert "<b>" not in codecs_html(_comparison(EXACT, _trial("<b>", 1.0, 10)))


def test_large_losses_are_drawn_at_the_top_and_named():
    wild = _trial("wild", 1e30, 100)
    more = _trial("more", 1.5, 400_000)  # larger than float32
    page = codecs_html(_comparison(EXACT, wild, more))
    for x, y, _ in _read(page).dots:
        assert 60 <= x <= 760
        assert 28 <= y <= 340
    assert "wild (1e+30), more (1.5) are off the chart." in page
    assert "more (1.5) is off the chart." in codecs_html(_comparison(EXACT, more))


def test_the_page_says_which_codecs_are_off_the_chart():
    far = _trial("far", 9.0, 10)
    assert "far (9) is off the chart." in codecs_html(_comparison(EXACT, far))
    both = codecs_html(_comparison(EXACT, far, _trial("away", 8.0, 20)))
    assert "far (9), away (8) are off the chart." in both
    assert "off the chart" not in codecs_html(_comparison(EXACT, _trial("near", 1.1, 10)))


def test_a_page_without_a_dot_can_be_made():
    broken = _trial("none", math.inf, 0, broke_at=1)
    assert _read(codecs_html(_comparison(broken))).dots == []


def test_powers_of_ten_enclose_all_ratios():
    axis = times_axis([0.5, 30.0], "")
    assert (axis.low, axis.high, axis.labels) == (-1, 2, ("0.1x", "1x", "10x", "100x"))
    assert times_axis([1.0], "").labels == ("1x", "10x")


def test_the_learning_rate_falls_in_the_last_part_of_the_steps():
    bench = Bench(steps=10, lr=0.8, decay=0.5)
    rates = [bench.lr_at(step) for step in range(1, 11)]
    assert rates[:6] == [0.8] * 6
    assert rates[6:] == pytest.approx([0.64, 0.48, 0.32, 0.16])
    assert Bench(steps=10, lr=0.8).lr_at(10) == 0.8
