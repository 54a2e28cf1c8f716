"""What a run's figures mean: who kept the others waiting, what to do about it, and what limits a step.

If workers do not step together, the verdict tells what the sync policy did: how many updates from how many
gradients, what was dropped, how old gradients were, who was left out; and for whom the others waited, where
the policy makes them wait.

Everything comes from the summary; no figure is computed here that a table computes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.decisions import shares_sentence
from echelon.observe.lateness import Standstill
from echelon.observe.overlap import Communication
from echelon.observe.reason import (
    advice,
    better_shares,
    is_negligible,
    kind_of,
    percent,
    rank_name,
    slower_part,
    starved_share,
    without_standstills_s,
    worker_name,
)
from echelon.observe.summary import Summary
from echelon.observe.sync import SyncFigures, WorkerSync
from echelon.observe.worker_figures import WorkerSummary

_STANDS_OUT = 0.5  # of the spread: above this, one worker is the reason; of two, one always has half
_STANDS_OUT_OF_TWO = 0.75
_FEW_ROUNDS = 20
_BELOW_LIMIT = 0.95  # of the limit: below this, the limit cannot be right
_LEFT_OUT = 0.1  # of the updates: a worker that misses fewer is not mentioned
_UNEQUAL = 0.1  # of the updates, between workers: from here on one of them stands out
_SLOWER = 1.5  # times as long as the others: from here on that is the reason
_HELD = 0.01  # of the workers' time: below this, nobody was held for long
_CROWDED = 0.3  # of the workers' time without a core: from here on there are too few


def verdict(summary: Summary) -> str:
    """Who kept the others waiting, in plain English."""
    if summary.steps == 0:
        return "No step was recorded."
    if summary.world_size < 2:
        return "One worker alone: nobody had to wait."
    if summary.sync is not None:
        sync = summary.sync
        return _served(sync, summary) if sync.served else _without_server(sync, summary)
    if summary.rounds == 0:
        return "No step was reported by all workers, so their arrivals cannot be compared."
    changed = shares_sentence(summary.decisions)
    if changed and summary.settled is None:
        return f"{changed} {_changed_late(summary)}"
    judged = summary.judged
    found = _finding(judged) + _few_note(judged) + _clock_note(judged)
    return f"{changed} Since then: {found}" if changed else found


def _changed_late(summary: Summary) -> str:
    """What can be said if shares changed so late that nothing can be judged since."""
    return (
        "Shares changed shortly before the end, so it is not judged who kept the others waiting since; "
        f"in the whole run, waiting for the last worker cost {_of_run(summary.spread_s, summary)}."
    )


def _few_note(summary: Summary) -> str:
    if summary.rounds >= _FEW_ROUNDS:
        return ""
    return (
        f" These were only {summary.rounds} rounds." if summary.rounds > 1 else " This was one round only."
    )


def _served(sync: SyncFigures, summary: Summary) -> str:
    if not sync.updates:
        return f"{sync.policy}: the server got {_counted(sync.pushed, 'push')} and made no update."
    sentences = [f"{sync.policy}: the server made {_updates(sync, summary)}."]
    if sync.dropped:
        sentences.append(_drops(sync, summary))
    if sync.age_most:
        mean = f"{sync.age_mean:.1f}" if sync.age_mean >= 0.1 else f"{sync.age_mean:.2f}"
        sentences.append(f"Gradients were {mean} updates old on average, {sync.age_most:,} at most.")
    sentences.append(_held(sync, summary))
    if left_out := _left_out(sync, summary):
        sentences.append(left_out)
    if summary.rounds and not is_negligible(summary.spread_s, summary):
        sentences.append(f"Inside groups: {_finding(summary)}{_few_note(summary)}")
    return " ".join(sentences)


def _updates(sync: SyncFigures, summary: Summary) -> str:
    made = _counted(sync.updates, "update")
    usual, times = max(sync.parts.items(), key=lambda item: item[1])
    whole = len(sync.workers) if _grouped(sync, summary) else summary.world_size
    source = "one gradient" if usual == 1 else f"{usual} of {whole} gradients"
    if times == sync.updates:
        return f"{made}, each from {source}"
    if times >= 0.95 * sync.updates:
        others = sorted(sync.parts.keys() - {usual})
        rest = f"{others[0]}" if len(others) == 1 else f"{others[0]} to {others[-1]}"
        return f"{made}, {times:,} of them from {source}, the others from {rest}"
    first = next(stretch.parts for stretch in sync.course if stretch.updates)
    most = max(stretch.parts for stretch in sync.course)
    mean_parts = sync.applied / sync.updates
    grew = f" ({first:.1f} at first, up to {most:.1f} later)" if most > 1.2 * first else ""
    return f"{made}, each from {mean_parts:.1f} gradients on average{grew}"


def _grouped(sync: SyncFigures, summary: Summary) -> bool:
    """Whether groups act as workers: then only the first rank of each pushes."""
    return len(sync.workers) < len(summary.workers)


def _drops(sync: SyncFigures, summary: Summary) -> str:
    most = max(sync.workers, key=lambda worker: worker.dropped)
    share = percent(sync.dropped, sync.pushed)
    whose = f"{most.dropped:,} of them from {rank_name(most.rank, summary)}"
    if most.dropped < 1.5 * sync.dropped / max(1, len(sync.workers)):
        whose = "about as many from each worker"
    return f"It dropped {_counted(sync.dropped, 'gradient')} ({share}), {whose}."


def _held(sync: SyncFigures, summary: Summary) -> str:
    known = {worker.rank for worker in sync.workers}
    in_steps_s = sum(worker.step_s for worker in summary.workers if worker.rank in known)
    if sync.held_s < _HELD * in_steps_s:
        return "The policy made workers wait for less than 1 % of their time."
    held = f"The policy made workers wait for {percent(sync.held_s, in_steps_s)} of their time"
    return f"{held}{_waited_for(sync, summary)}."


def _waited_for(sync: SyncFigures, summary: Summary) -> str:
    """The worker that the others waited for most, if one stands out."""
    worst = max(sync.workers, key=lambda worker: worker.held_up_s)
    stands_out = _STANDS_OUT if len(sync.workers) != 2 else _STANDS_OUT_OF_TWO
    if worst.held_up_s < stands_out * sum(worker.held_up_s for worker in sync.workers):
        return ""
    name = rank_name(worst.rank, summary)
    if _grouped(sync, summary):
        return f", mostly for the group of {name}"
    slower = _slower(worst.rank, summary)
    return f", because {name} {slower}" if slower else f", mostly for {name}"


def _slower(rank: int, summary: Summary) -> str:
    """How much longer a worker's steps take than the others', if much; else empty."""
    worker = next((worker for worker in summary.workers if worker.rank == rank), None)
    if worker is None:
        return ""
    times = _times_as_long(rank, summary)
    if times >= _SLOWER and slower_part(worker, summary) == "compute":
        return f"computes {times:.1f} times as long as the others"
    times = _times_as_long(rank, summary, whole=True)
    return f"takes {times:.1f} times as long for a step, waiting aside" if times >= _SLOWER else ""


def _left_out(sync: SyncFigures, summary: Summary) -> str:
    """Who had no part in updates because it went on alone or pushed too late."""
    out = [worker for worker in sync.workers if worker.alone or worker.dropped]
    if not out:
        return ""
    shares = [worker.took_part for worker in sync.workers]
    least = min(out, key=lambda worker: worker.took_part)
    if least.took_part > 1 - _LEFT_OUT:
        return ""
    if max(shares) - min(shares) < _UNEQUAL:
        return f"Each worker took part in {percent(median(shares), 1.0)} of the updates."
    missed = percent(1 - least.took_part, 1.0)
    name = _capital(rank_name(least.rank, summary))
    return f"{name} was left out of {missed} of the updates{_why(least, summary)}."


def _why(least: WorkerSync, summary: Summary) -> str:
    slower = _slower(least.rank, summary)
    return f", because it {slower}" if slower else ""


def _times_as_long(rank: int, summary: Summary, *, whole: bool = False) -> float:
    """A worker's compute time per step relative to the others' median; 0 if unknown.

    With `whole`, the same for all of its step but waiting for other workers.
    """
    each_s = {w.rank: (w.own_s if whole else w.compute_s) / w.steps for w in summary.workers if w.steps}
    others_s = [each_s[other] for other in each_s if other != rank]
    usual_s = median(others_s) if others_s else 0.0
    return each_s.get(rank, 0.0) / usual_s if usual_s > 0 else 0.0


def _without_server(sync: SyncFigures, summary: Summary) -> str:
    """How often workers exchanged weights, how long that took, and for whom the others waited."""
    exchanges = sum(worker.exchanges for worker in sync.workers)
    if not exchanges:
        return f"{sync.policy}: workers sent each other nothing during their steps; {_range(summary)}."
    after = f"{percent(exchanges, summary.all_steps)} of their steps"
    waited_s, in_steps_s = (
        sum(values) for values in zip(*((w.wait_s, w.step_s) for w in summary.workers), strict=True)
    )
    took = percent(waited_s, in_steps_s)
    # Inside groups, gradients may be reduced.
    what = "gradients or weights" if sync.family == "levels" else "weights"
    text = (
        f"{sync.policy}: workers exchanged {what} after {after}. That took {took} of their time, "
        "waiting for each other included."
    )
    if summary.rounds:
        return f"{text} {_finding(summary)}{_few_note(summary)}{_clock_note(summary)}"
    slowest = max(summary.workers, key=lambda worker: _times_as_long(worker.rank, summary))
    slower = _slower(slowest.rank, summary)
    return f"{text} {_capital(worker_name(slowest))} {slower}." if slower else text


def _range(summary: Summary) -> str:
    """Who took how many steps."""
    fewest = min(summary.workers, key=lambda worker: worker.steps)
    most = max(summary.workers, key=lambda worker: worker.steps)
    if fewest.steps == most.steps:
        return f"each took {_counted(most.steps, 'step')}"
    return (
        f"they took from {fewest.steps:,} ({worker_name(fewest)}) to {most.steps:,} ({worker_name(most)}) "
        "steps"
    )


def _counted(count: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("sh") else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"


def wire_verdict(summary: Summary) -> str:
    """What a codec saved, what limits a step, and how much communication was hidden; empty if unknown."""
    sentences = [summary.coding.sentence] if summary.coding is not None else []
    communication = summary.communication
    if communication is None:
        return " ".join(sentences)
    if communication.distance is not None and summary.samples:  # else only part of the computing is known
        limit = _limit(communication, summary)
        sentences.append(f"A step took {communication.distance:.2f} times its lower limit: {limit}.")
        if communication.limited_by == "link" and communication.distance < _BELOW_LIMIT:
            sentences.append("So the link was faster than measured at the start.")
    if communication.hidden is not None:
        hidden = f"{100 * communication.hidden:.0f} %"
        sentences.append(f"{hidden} of communication was hidden behind computation.")
    return " ".join(sentences)


def _limit(communication: Communication, summary: Summary) -> str:
    worker = next(worker for worker in communication.workers if worker.rank == communication.rank)
    name = rank_name(worker.rank, summary)
    if communication.limited_by == "compute":
        return f"{show_seconds(worker.compute_s)} of computing on {name}"
    assert worker.peer is not None
    assert worker.bytes_per_s is not None
    assert worker.wire_limit_s is not None
    return (
        f"{show_seconds(worker.wire_limit_s)} for {show_bytes(worker.sent_bytes)} at "
        f"{show_bytes(worker.bytes_per_s)}/s on the link from {name} to {rank_name(worker.peer, summary)}"
    )


def _finding(summary: Summary) -> str:
    """Who kept the others waiting; single standstills aside, which are told apart."""
    standstills = _told_standstills(summary)
    rest_s = summary.spread_s - sum(standstill.seconds for standstill in standstills)
    if is_negligible(rest_s, summary):
        cost = _of_run(rest_s, summary)
        if not standstills:
            return f"The workers arrived close together: waiting for the last one cost {cost}."
        return (
            f"{_capital(_stood_still(standstills, summary))}; without that the workers arrived close "
            f"together: waiting for the last one cost {cost}."
        )
    found = f"{_late_worker(rest_s, summary)}{_crowd_note(summary)}"
    return f"{found} {_capital(_stood_still(standstills, summary))}." if standstills else found


def _told_standstills(summary: Summary) -> tuple[Standstill, ...]:
    """The standstills, if they cost enough to be told."""
    seconds = sum(standstill.seconds for standstill in summary.standstills)
    return () if is_negligible(seconds, summary) else summary.standstills


def _stood_still(standstills: Sequence[Standstill], summary: Summary) -> str:
    """Who stood still, how often, when and for how long."""
    of_rank: dict[int, list[Standstill]] = {}
    for standstill in sorted(standstills, key=lambda standstill: standstill.step):
        of_rank.setdefault(standstill.rank, []).append(standstill)
    told = []
    for rank, own in of_rank.items():
        times = " and ".join(
            f"{show_seconds(standstill.seconds)} in step {standstill.step:,}" for standstill in own
        )
        often = {1: "once", 2: "twice"}.get(len(own), f"{len(own)} times")
        told.append(f"{rank_name(rank, summary)} stood still {often}, for {times}")
    return ", and ".join(told)


def _late_worker(rest_s: float, summary: Summary) -> str:
    """The worker that costs the others time, what helps; or that it is not one alone."""
    worst = max(summary.workers, key=lambda worker: without_standstills_s(worker, summary))
    stands_out = _STANDS_OUT if summary.met != 2 else _STANDS_OUT_OF_TWO
    if without_standstills_s(worst, summary) < stands_out * rest_s:
        most = sorted(summary.workers, key=lambda worker: -worker.held_up_s)[:3]
        names = "; ".join(
            f"{worker_name(w)}, last in {percent(w.times_last, w.rounds)} of rounds" for w in most
        )
        return (
            f"Waiting for late workers cost {_of_run(summary.spread_s, summary)}, but no single worker is "
            f"the reason. Most often late: {names}. {_shares_note(most[0], summary)}"
        )
    cost = f"cost the others {_of_run(worst.held_up_s, summary)}"
    return (
        f"{_capital(worker_name(worst))} {_how_late(worst, summary)} and {cost}; {advice(worst, summary)}"
    )


def _how_late(worst: WorkerSummary, summary: Summary) -> str:
    match kind_of(worst, summary):
        case "starved":
            return f"had no core for {percent(starved_share(worst), 1.0)} of its time"
        case "now and then":
            return f"was much too late now and then, in about {percent(worst.steady, 1.0)} of rounds,"
        case _ if summary.meet_often:
            return f"kept the others waiting longest in {percent(worst.times_last, worst.rounds)} of rounds"
        case _:
            return f"arrived last in {percent(worst.times_last, worst.rounds)} of rounds"


def _crowd_note(summary: Summary) -> str:
    """That all workers lack cores, if they do."""
    shares = [starved_share(worker) for worker in summary.workers]
    if min(shares) < _CROWDED / 2 or mean(shares) < _CROWDED:
        return ""
    return (
        f" All workers lacked a core, for {percent(mean(shares), 1.0)} of their time on average: other "
        "threads use the cores, or a quota limits them."
    )


def _shares_note(worst: WorkerSummary, summary: Summary) -> str:
    if summary.shares_adapt:
        return "Shares follow the workers' measured speeds already."
    better = better_shares(worst, summary)
    if better:
        return f"Other shares would help: {better}"
    return "Shares fit the workers' average speeds, so the delays come and go."


def _clock_note(summary: Summary) -> str:
    if summary.judged_by == "arrival":
        return ""
    if summary.sync is not None:
        return " This is judged by how long each waited, since the machines' clocks may differ."
    return " The workers' clocks disagree, so this is judged by how long each waited."


def _of_run(seconds: float, summary: Summary) -> str:
    whole = "the run" if summary.settled is None else "that time"
    return f"{show_seconds(seconds)}, {percent(seconds, summary.seconds)} of {whole}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
