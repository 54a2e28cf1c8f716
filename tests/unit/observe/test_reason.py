"""A worker that is late is told apart: slow, jittery, still once, without a core, or woken late."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from echelon.observe.events import LAUNCHER, AnyEvent, RunStarted, StepEnded, WorkerJoined
from echelon.observe.reason import kind_of, shares_may_help, slower_part
from echelon.observe.summary import Summary, summarise
from echelon.observe.verdict import verdict

ROUNDS = 100


@dataclass(frozen=True, kw_only=True)
class Own:
    """What one worker does in a step, in seconds; of it `starved_s` without a core and `idle_s` asleep."""

    data_s: float = 0.001
    compute_s: float = 0.02
    apply_s: float = 0.001
    other_s: float = 0.001
    starved_s: float = 0.0
    idle_s: float = 0.0
    woken_s: float = 0.0  # how much later than the others it got the last result

    @property
    def arrives_s(self) -> float:
        return self.data_s + self.compute_s


Worker = Callable[[int], Own]


def usual(step: int) -> Own:
    return Own(compute_s=0.02 + 0.0005 * (step % 4))


def invent(
    *workers: Worker, rounds: int = ROUNDS, share: int = 16, measured: bool = True
) -> list[AnyEvent]:
    """The events of a run in which all workers meet in every step."""
    count = len(workers)
    events: list[AnyEvent] = [RunStarted(t=0.0, rank=LAUNCHER, run="r", command=[], world_size=count)]
    events += [
        WorkerJoined(t=0.0, rank=rank, node="", host="h", pid=1, threads=1, device="cpu")
        for rank in range(count)
    ]
    result = 1.0
    rests = [0.0] * count
    for step in range(rounds):
        does = [worker(step) for worker in workers]
        starts = [result + own.woken_s + rest for own, rest in zip(does, rests, strict=True)]
        arrivals = [start + own.arrives_s for start, own in zip(starts, does, strict=True)]
        over = max(arrivals) + 0.002
        after = [workers[rank](step + 1).woken_s for rank in range(count)]
        for rank, own in enumerate(does):
            own_s = own.data_s + own.compute_s + own.apply_s + own.other_s
            events.append(
                StepEnded(
                    t=over + after[rank] + own.apply_s + own.other_s,
                    rank=rank,
                    step=step,
                    epoch=0,
                    start=starts[rank],
                    data_s=own.data_s,
                    compute_s=own.compute_s,
                    arrival=arrivals[rank],
                    wait_s=over + after[rank] - arrivals[rank],
                    apply_s=own.apply_s,
                    share=share,
                    batch=share * count,
                    sent_bytes=1000,
                    cpu_s=own_s - own.starved_s - own.idle_s if measured else None,
                    starved_s=own.starved_s if measured else None,
                )
            )
            rests[rank] = own.apply_s + own.other_s
        result = over
    return events


def run_with(late: Worker, workers: int = 3, **more: int) -> Summary:
    """A run in which the last of several workers is late."""
    return summarise(invent(*[usual] * (workers - 1), late, **more))


def kind(summary: Summary) -> str:
    return kind_of(summary.workers[-1], summary)


def steadily(**parts: float) -> Worker:
    return lambda step: Own(**parts)


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_worker_that_computes_slowly_in_every_round_gets_a_smaller_share(workers):
    summary = run_with(steadily(compute_s=0.06), workers)
    assert kind(summary) == "steady"
    text = verdict(summary)
    assert text.startswith(f"Rank {workers - 1} arrived last in 100 % of rounds and cost the others ")
    assert "; give it a smaller share: --shares " in text


def test_a_worker_that_is_late_now_and_then_is_not_told_to_take_less():
    draw = random.Random(1)
    summary = run_with(lambda step: Own(compute_s=0.02 + 0.3 * (draw.random() < 0.1)))
    assert kind(summary) == "now and then"
    text = verdict(summary)
    assert text.startswith("Rank 2 was much too late now and then, in about ")
    assert "shares do not help against that" in text
    assert "--shares" not in text


@pytest.mark.parametrize(
    ("standstills", "said"),
    [
        (
            {40: 4.1},
            "Rank 2 stood still once, for 4.1 s in step 40; without that the workers arrived close",
        ),
        ({7: 3.0, 90: 2.0}, "Rank 2 stood still twice, for 3.0 s in step 7 and 2.0 s in step 90; without"),
    ],
)
def test_one_standstill_gives_no_advice_on_shares(standstills, said):
    summary = run_with(lambda step: Own(compute_s=usual(step).compute_s + standstills.get(step, 0.0)))
    text = verdict(summary)
    assert text.startswith(said)
    assert "share" not in text
    assert text.endswith(" of the run.")


def test_standstills_of_two_workers_are_told_of_both():
    def stands_still_at(number: int) -> Worker:
        return lambda step: Own(compute_s=usual(step).compute_s + 3.0 * (step == number))

    text = verdict(summarise(invent(usual, stands_still_at(30), stands_still_at(60))))
    assert text.startswith(
        "Rank 1 stood still once, for 3.0 s in step 30, and rank 2 stood still once, for"
    )


def test_a_slow_worker_is_named_first_and_a_standstill_after_it():
    def standstills(step: int) -> Own:
        return Own(compute_s=usual(step).compute_s + 5.0 * (step == 50))

    text = verdict(summarise(invent(standstills, usual, steadily(compute_s=0.08))))
    assert text.startswith("Rank 2 arrived last in 99 % of rounds and cost the others ")
    assert "give it a smaller share" in text
    assert text.endswith(" Rank 0 stood still once, for 5.0 s in step 50.")


def test_a_worker_without_a_core_is_told_to_get_one():
    summary = run_with(steadily(compute_s=0.1, starved_s=0.08))
    assert kind(summary) == "starved"
    text = verdict(summary)
    assert text.startswith("Rank 2 had no core for 78 % of its time and cost the others ")
    assert "end other programs on its node" in text
    assert "share" not in text


def test_a_late_worker_that_lacks_a_core_no_more_than_the_others_is_not_called_starved():
    def crowded(step: int) -> Own:
        return Own(compute_s=0.05, starved_s=0.03)

    summary = summarise(invent(crowded, crowded, steadily(compute_s=0.12, starved_s=0.03)))
    assert kind(summary) == "steady"
    assert "had no core" not in verdict(summary)


def test_that_all_workers_lack_cores_is_noted():
    def crowded(step: int) -> Own:
        return Own(compute_s=0.05, starved_s=0.03)

    text = verdict(summarise(invent(crowded, crowded, steadily(compute_s=0.1, starved_s=0.04))))
    assert " All workers lacked a core, for " in text
    assert text.endswith(" on average: other threads use the cores, or a quota limits them.")


def test_a_worker_that_is_starved_and_therefore_woken_late_too_is_called_starved():
    assert kind(run_with(steadily(woken_s=0.06, compute_s=0.06, starved_s=0.04))) == "starved"


@pytest.mark.parametrize("starved_s", [0.0, 0.003])
def test_a_worker_that_is_woken_late_is_told_so(starved_s):
    summary = run_with(steadily(woken_s=0.06, starved_s=starved_s))
    assert kind(summary) == "late result"
    text = verdict(summary)
    assert text.startswith("Rank 2 arrived last in ")
    assert "it got the results of the rounds before later than the others" in text
    assert "share" not in text


@pytest.mark.parametrize(
    ("part", "does", "said"),
    [
        ("data", {"data_s": 0.08}, "waiting for data: look at its data loader."),
        ("apply", {"apply_s": 0.08}, "in its optimizer: look at what runs there."),
        ("other", {"other_s": 0.08}, "in the script's own code between the steps' parts."),
        ("compute", {"compute_s": 0.1, "idle_s": 0.08}, "it did not want a core: look for a sleep"),
        ("compute", {"compute_s": 0.1}, "give it a smaller share"),
    ],
)
def test_advice_fits_the_part_of_the_step_that_takes_longer(part, does, said):
    summary = run_with(steadily(**does))
    assert slower_part(summary.workers[-1], summary) == part
    assert said in verdict(summary)
    assert shares_may_help(summary) is ("share" in said)


def test_where_cores_are_not_measured_nothing_is_said_about_them():
    summary = run_with(steadily(compute_s=0.1, starved_s=0.08), measured=False)
    assert (summary.workers[2].starved_s, summary.workers[2].cpu_s, summary.workers[2].idle_s) == (
        None,
    ) * 3
    assert kind(summary) == "steady"
    assert "core" not in verdict(summary)


def test_on_another_device_the_thread_that_waits_for_it_is_not_called_idle():
    events: Sequence[AnyEvent] = invent(usual, usual, steadily(compute_s=0.1, idle_s=0.08))
    joined = WorkerJoined(t=0.0, rank=2, node="", host="h", pid=1, threads=1, device="cuda:0")
    summary = summarise([*events[:3], joined, *events[4:]])
    assert summary.workers[2].idle_s is None
    assert "did not want a core" not in verdict(summary)


@pytest.mark.parametrize("seed", range(3))
def test_random_delays_of_all_workers_are_nobodys_fault(seed):
    draws = [random.Random(10 * seed + rank) for rank in range(4)]
    workers = [lambda step, draw=draw: Own(compute_s=0.02 + 0.03 * draw.random()) for draw in draws]
    text = verdict(summarise(invent(*workers)))
    assert "no single worker is the reason" in text
