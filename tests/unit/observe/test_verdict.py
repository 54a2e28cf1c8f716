from __future__ import annotations

import msgspec
import pytest

from echelon.observe.events import StepEnded
from echelon.observe.summary import summarise
from echelon.observe.verdict import fitting_shares, verdict


def test_a_straggler_is_named_with_its_cost_and_a_better_share(imagined):
    text = verdict(summarise(imagined()))
    assert text.startswith("Rank 3 (node-d) arrived last in ")
    assert "cost the others" in text
    assert "of the run; give it a smaller share: by measured speed about 7 of 64 samples, not 16." in text


def test_injected_delay_is_mentioned_as_such(imagined):
    events = [
        msgspec.structs.replace(e, delay_s=e.compute_s / 2)
        if isinstance(e, StepEnded) and e.rank == 3
        else e
        for e in imagined()
    ]
    assert "were injected delay)" in verdict(summarise(events))


def test_several_slow_workers_are_named_and_shares_by_speed_recommended(imagined, a_plan):
    text = verdict(summarise(imagined(a_plan(speeds=(1600.0, 400.0, 400.0, 400.0)))))
    assert "no single worker is the reason" in text
    assert "rank 0" not in text
    assert text.endswith("Shares by measured speed would even much of this out.")


def test_delays_that_come_and_go_are_not_blamed_on_shares(imagined, a_plan):
    text = verdict(summarise(imagined(a_plan(speeds=(800.0,) * 4))))
    assert "no single worker is the reason" in text
    assert text.endswith("so the delays come and go.")


def test_workers_that_arrive_together_are_told_so(imagined):
    events = []
    for event in imagined():
        if isinstance(event, StepEnded):
            event = msgspec.structs.replace(
                event, arrival=event.arrival + event.wait_s - 0.004, wait_s=0.004
            )
        events.append(event)
    assert verdict(summarise(events)).startswith("The workers arrived close together")


def test_a_worker_late_for_want_of_data_is_sent_to_its_loader(imagined, a_plan):
    events = []
    for event in imagined(a_plan(speeds=(1600.0, 1600.0, 1600.0, 400.0))):
        if isinstance(event, StepEnded) and event.rank == 3:
            event = msgspec.structs.replace(event, data_s=event.compute_s, compute_s=event.data_s, share=1)
        events.append(event)
    assert "waiting for data: look at its loader" in verdict(summarise(events))


@pytest.mark.parametrize(
    ("share", "advice"), [(16, "in the script's own code"), (160, "look for other load on its node")]
)
def test_a_worker_late_although_its_share_fits_is_not_told_to_take_less(imagined, a_plan, share, advice):
    events = []
    for event in imagined(a_plan(speeds=(800.0,) * 3 + (770.0,), shares=(share,) * 4)):
        if isinstance(event, StepEnded):
            late_s = 0.1 if event.rank == 3 else 0.0
            event = msgspec.structs.replace(
                event,
                arrival=event.arrival + late_s,
                wait_s=event.wait_s + 0.1 - late_s,
                t=event.t + 0.1,
            )
        events.append(event)
    text = verdict(summarise(events))
    assert text.startswith("Rank 3 (node-d)")
    assert advice in text


def test_a_late_worker_whose_share_is_one_sample_is_not_told_to_take_less(imagined, a_plan):
    text = verdict(summarise(imagined(a_plan(shares=(1, 1, 1, 1), speeds=(90.0, 90.0, 90.0, 10.0)))))
    assert text.startswith("Rank 3")
    assert "smaller share" not in text


def test_disagreeing_clocks_are_admitted(imagined, a_plan):
    text = verdict(summarise(imagined(a_plan(skew_s=(0.0, 5.0, -3.0, 1.0)))))
    assert text.startswith("Rank 3")
    assert "clocks disagree" in text


@pytest.mark.parametrize(
    ("situation", "said"),
    [
        ({"speeds": (800.0,), "shares": (32,), "nodes": ("laptop",)}, "One worker alone"),
        ({"epochs": 0}, "No step was recorded"),
        ({"gaps": tuple(range(120))}, "No step was reported by all workers"),
    ],
)
def test_a_run_that_shows_nothing_gets_a_plain_sentence(imagined, a_plan, situation, said):
    assert verdict(summarise(imagined(a_plan(**situation)))).startswith(said)


def test_fitting_shares_keep_the_batch_and_follow_speed(imagined):
    fitting = fitting_shares(summarise(imagined()))
    assert sum(fitting.values()) == pytest.approx(64)
    assert fitting[0] > 1.7 * fitting[1]
    assert fitting[1] > 1.7 * fitting[3]
