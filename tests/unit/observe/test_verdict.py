from __future__ import annotations

import msgspec
import pytest

from echelon.observe.events import StepEnded
from echelon.observe.reason import fitting_shares
from echelon.observe.summary import summarise
from echelon.observe.verdict import verdict


def test_a_straggler_is_named_with_its_cost_and_a_better_share(imagined):
    text = verdict(summarise(imagined()))
    assert text.startswith("Rank 3 (node-d) arrived last in ")
    assert "cost the others" in text
    assert "of the run; give it a smaller share: --shares 28,14,15,7 (now 16,16,16,16) would cut " in text
    assert text.endswith(" a step (53 % less).")


def test_injected_delay_is_mentioned(imagined):
    events = [
        msgspec.structs.replace(e, delay_s=e.compute_s / 2)
        if isinstance(e, StepEnded) and e.rank == 3
        else e
        for e in imagined()
    ]
    delay = " of rank 3 (node-d)'s compute time was artificial delay (--speed or --delay)."
    assert delay in verdict(summarise(events))


def test_several_slow_workers_are_named_and_other_shares_recommended(imagined, a_plan):
    text = verdict(summarise(imagined(a_plan(speeds=(1600.0, 400.0, 400.0, 400.0)))))
    assert "no single worker is the reason" in text
    assert "rank 0" not in text
    assert "Other shares would help: --shares 3" in text


def test_delays_that_come_and_go_are_not_blamed_on_shares(imagined, a_plan):
    text = verdict(summarise(imagined(a_plan(speeds=(800.0,) * 4))))
    assert "no single worker is the reason" in text
    assert text.endswith("so the delays come and go.")


def test_workers_that_arrive_together_are_reported_as_such(imagined):
    events = []
    for event in imagined():
        if isinstance(event, StepEnded):
            event = msgspec.structs.replace(
                event, arrival=event.arrival + event.wait_s - 0.004, wait_s=0.004
            )
        events.append(event)
    assert verdict(summarise(events)).startswith("The workers arrived close together")


def test_a_worker_that_waits_for_data_is_told_to_check_its_loader(imagined, a_plan):
    events = []
    for event in imagined(a_plan(speeds=(1600.0, 1600.0, 1600.0, 400.0))):
        if isinstance(event, StepEnded) and event.rank == 3:
            event = msgspec.structs.replace(event, data_s=event.compute_s, compute_s=event.data_s, share=1)
        events.append(event)
    assert "waiting for data: look at its data loader" in verdict(summarise(events))


@pytest.mark.parametrize("share", [16, 160])
def test_a_late_worker_whose_share_fits_is_not_told_to_take_less(imagined, a_plan, share):
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
    assert "in the script's own code" in text


def test_a_late_worker_whose_share_is_one_sample_is_not_told_to_take_less(imagined, a_plan):
    text = verdict(summarise(imagined(a_plan(shares=(1, 1, 1, 1), speeds=(90.0, 90.0, 90.0, 10.0)))))
    assert text.startswith("Rank 3")
    assert "smaller share" not in text


def test_disagreeing_clocks_are_mentioned(imagined, a_plan):
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
def test_a_run_without_rounds_gets_a_plain_sentence(imagined, a_plan, situation, said):
    assert verdict(summarise(imagined(a_plan(**situation)))).startswith(said)


def _with_fixed_cost(events, fixed_s, speeds, usual, short):
    """Steps that cost `fixed_s` plus 1 ms per sample, divided by speed; every tenth has shares `short`."""
    changed = []
    for event in events:
        if isinstance(event, StepEnded):
            shares = short if event.step % 10 == 9 else usual
            cost_s = [(fixed_s + 0.001 * s) / v for s, v in zip(shares, speeds, strict=True)]
            event = msgspec.structs.replace(
                event,
                data_s=0.0,
                compute_s=cost_s[event.rank],
                share=shares[event.rank],
                arrival=event.start + cost_s[event.rank],
                wait_s=max(cost_s) - cost_s[event.rank] + 0.001,
            )
        changed.append(event)
    return changed


def test_with_shares_by_speed_a_fixed_cost_is_named_as_the_reason(imagined):
    events = _with_fixed_cost(imagined(), 0.006, (1.0, 0.5, 0.5, 0.25), (28, 14, 14, 7), (12, 6, 6, 3))
    text = verdict(summarise(events))
    assert text.startswith("Rank 3 (node-d) arrived last in 100 % of rounds")
    assert "--shares 33,13,13,4 (now 28,14,14,7)" in text
    assert "from 52.0 ms to about 40.0 ms a step (23 % less)." in text
    assert "24.0 ms of a step on rank 3 (node-d) are a fixed cost" in text


def test_shares_that_would_gain_little_are_not_recommended(imagined):
    events = _with_fixed_cost(imagined(), 0.006, (1.0, 0.5, 0.5, 0.25), (32, 13, 13, 4), (14, 6, 6, 2))
    assert "--shares" not in verdict(summarise(events))


def test_fitting_shares_keep_the_batch_and_follow_speed(imagined):
    fitting = fitting_shares(summarise(imagined()))
    assert sum(fitting.values()) == pytest.approx(64)
    assert fitting[0] > 1.7 * fitting[1]
    assert fitting[1] > 1.7 * fitting[3]


def test_a_fixed_cost_is_not_named_if_the_slowest_worker_should_take_more(imagined):
    events = _with_fixed_cost(imagined(), 0.006, (1.0, 0.5, 0.5, 0.25), (48, 6, 6, 3), (20, 3, 3, 1))
    text = verdict(summarise(events))
    assert text.startswith("Rank 0 (node-a) arrived last")
    assert "--shares 33,13,13,4 (now 48,6,6,3)" in text
    assert "fixed cost" not in text
