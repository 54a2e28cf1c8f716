"""What a run's figures mean: who kept the others waiting, what to do about it, and what limits a step.

If workers do not step together, nobody keeps all others waiting. Then the verdict tells what the sync
policy did: how many updates from how many gradients, what was dropped, how old gradients were, who was left
out.

Everything comes from the summary. The advice on shares follows the measured cost of a step (step_cost.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.overlap import Communication
from echelon.observe.step_cost import StepCost, balanced_shares
from echelon.observe.summary import Summary, WorkerSummary
from echelon.observe.sync import SyncFigures, WorkerSync

_NEGLIGIBLE = 0.05  # of the run: below this, waiting for late workers is not worth a remedy
_STANDS_OUT = 0.5  # of the spread: above this, one worker is the reason; of two, one always has half
_STANDS_OUT_OF_TWO = 0.75
_FEW_ROUNDS = 20
_WORTHWHILE = 0.1  # of the slowest worker's compute time: other shares must save at least this
_MENTIONED = 0.1  # of a worker's compute time: a fixed cost or injected delay below this is not mentioned
_MOST_LISTED = 8  # workers, for their shares to be listed
_BELOW_LIMIT = 0.95  # of the limit: below this, the limit cannot be right
_LEFT_OUT = 0.1  # of the updates: a worker that misses fewer is not mentioned
_UNEQUAL = 0.1  # of the updates, between workers: from here on one of them stands out
_SLOWER = 1.5  # times as long as the others: from here on that is the reason


def worker_name(worker: WorkerSummary) -> str:
    """A worker's name in sentences: 'rank 3 (node-d)'."""
    return f"rank {worker.rank} ({worker.node})" if worker.node else f"rank {worker.rank}"


def fitting_shares(summary: Summary) -> dict[int, float]:
    """The shares of the same batch at which all workers take equally long; empty if costs are unknown."""
    return balanced_shares(summary.costs, sum(cost.share for cost in summary.costs))


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
    few = f" These were only {summary.rounds} rounds." if summary.rounds < _FEW_ROUNDS else ""
    return _finding(summary) + few + _clock_note(summary)


def _rank_name(rank: int, summary: Summary) -> str:
    known = {worker.rank: worker for worker in summary.workers}
    return worker_name(known[rank]) if rank in known else f"rank {rank}"


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
    return " ".join(sentences)


def _updates(sync: SyncFigures, summary: Summary) -> str:
    made = _counted(sync.updates, "update")
    usual, times = max(sync.parts.items(), key=lambda item: item[1])
    if times >= 0.95 * sync.updates:
        # With groups, only the first rank of each pushes.
        grouped = len(sync.workers) < len(summary.workers)
        whole = len(sync.workers) if grouped else summary.world_size
        source = "one gradient" if usual == 1 else f"{usual} of {whole} gradients"
        return f"{made}, each from {source}"
    first = next(stretch.parts for stretch in sync.course if stretch.updates)
    most = max(stretch.parts for stretch in sync.course)
    mean = sync.applied / sync.updates
    grew = f" ({first:.1f} at first, up to {most:.1f} later)" if most > 1.2 * first else ""
    return f"{made}, each from {mean:.1f} gradients on average{grew}"


def _drops(sync: SyncFigures, summary: Summary) -> str:
    most = max(sync.workers, key=lambda worker: worker.dropped)
    share = _percent(sync.dropped, sync.pushed)
    whose = f"{most.dropped:,} of them from {_rank_name(most.rank, summary)}"
    if most.dropped < 1.5 * sync.dropped / max(1, len(sync.workers)):
        whose = "about as many from each worker"
    return f"It dropped {_counted(sync.dropped, 'gradient')} ({share}), {whose}."


def _held(sync: SyncFigures, summary: Summary) -> str:
    known = {worker.rank for worker in sync.workers}
    in_steps_s = sum(worker.step_s for worker in summary.workers if worker.rank in known)
    if sync.held_s < 0.01 * in_steps_s:
        return "The policy made no worker wait."
    held = f"The policy made workers wait for {_percent(sync.held_s, in_steps_s)} of their time"
    slowest = max(summary.workers, key=lambda worker: _times_as_long(worker.rank, summary))
    times = _times_as_long(slowest.rank, summary)
    part = next((worker for worker in sync.workers if worker.rank == slowest.rank), None)
    if times < _SLOWER or part is None or part.took_part < 1 - _LEFT_OUT:
        return f"{held}."
    return f"{held}, because {worker_name(slowest)} computes {times:.1f} times as long as the others."


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
        return f"Each worker took part in {_percent(median(shares), 1.0)} of the updates."
    missed = _percent(1 - least.took_part, 1.0)
    name = _capital(_rank_name(least.rank, summary))
    return f"{name} was left out of {missed} of the updates{_why(least, summary)}."


def _why(least: WorkerSync, summary: Summary) -> str:
    times = _times_as_long(least.rank, summary)
    return f", because it computes {times:.1f} times as long as the others" if times >= _SLOWER else ""


def _times_as_long(rank: int, summary: Summary) -> float:
    """A worker's compute time per step relative to the others' median; 0 if unknown."""
    each_s = {w.rank: w.compute_s / w.steps for w in summary.workers if w.steps}
    others_s = [each_s[other] for other in each_s if other != rank]
    usual_s = median(others_s) if others_s else 0.0
    return each_s.get(rank, 0.0) / usual_s if usual_s > 0 else 0.0


def _without_server(sync: SyncFigures, summary: Summary) -> str:
    """How often workers exchanged weights, and how long that took."""
    exchanges = sum(worker.exchanges for worker in sync.workers)
    if not exchanges:
        return f"{sync.policy}: workers sent each other nothing during their steps; {_range(summary)}."
    after = f"{_percent(exchanges, summary.all_steps)} of their steps"
    waited_s, in_steps_s = (
        sum(values) for values in zip(*((w.wait_s, w.step_s) for w in summary.workers), strict=True)
    )
    took = _percent(waited_s, in_steps_s)
    text = (
        f"{sync.policy}: workers exchanged weights after {after}. That took {took} of their time, "
        "waiting for each other included."
    )
    slowest = max(summary.workers, key=lambda worker: _times_as_long(worker.rank, summary))
    times = _times_as_long(slowest.rank, summary)
    if times >= _SLOWER:
        text += f" {_capital(worker_name(slowest))} computes {times:.1f} times as long as the others."
    return text


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
    if communication.distance is not None:
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
    name = _rank_name(worker.rank, summary)
    if communication.limited_by == "compute":
        return f"{show_seconds(worker.compute_s)} of computing on {name}"
    assert worker.peer is not None
    assert worker.bytes_per_s is not None
    assert worker.wire_limit_s is not None
    return (
        f"{show_seconds(worker.wire_limit_s)} for {show_bytes(worker.sent_bytes)} at "
        f"{show_bytes(worker.bytes_per_s)}/s on the link from {name} to {_rank_name(worker.peer, summary)}"
    )


def _finding(summary: Summary) -> str:
    cost = _of_run(summary.spread_s, summary)
    if summary.spread_s < _NEGLIGIBLE * summary.seconds:
        return f"The workers arrived close together: waiting for the last one cost {cost}."
    worst = max(summary.workers, key=lambda worker: worker.held_up_s)
    stands_out = _STANDS_OUT if summary.world_size > 2 else _STANDS_OUT_OF_TWO
    if worst.held_up_s < stands_out * summary.spread_s:
        most = sorted(summary.workers, key=lambda worker: -worker.held_up_s)[:3]
        names = "; ".join(
            f"{worker_name(w)}, last in {_percent(w.times_last, summary.rounds)} of rounds" for w in most
        )
        return (
            f"Waiting for late workers cost {cost}, but no single worker is the reason. "
            f"Most often late: {names}. {_shares_note(most[0], summary)}"
        )
    return (
        f"{_capital(worker_name(worst))} arrived last in {_percent(worst.times_last, summary.rounds)} "
        f"of rounds and cost the others {_of_run(worst.held_up_s, summary)}; {_advice(worst, summary)}"
    )


def _shares_note(worst: WorkerSummary, summary: Summary) -> str:
    better = _better_shares(worst, summary)
    if better:
        return f"Other shares would help: {better}"
    return "Shares fit the workers' average speeds, so the delays come and go."


def _advice(worst: WorkerSummary, summary: Summary) -> str:
    better = _better_shares(worst, summary)
    cost = _cost_of(worst, summary)
    if better and cost is not None and round(fitting_shares(summary)[cost.rank]) < round(cost.share):
        return f"give it a smaller share: {better}"
    if worst.data_s > worst.compute_s:
        return f"it spent {show_seconds(worst.data_s)} waiting for data: look at its data loader."
    if worst.other_s > worst.compute_s:
        return f"it spent {show_seconds(worst.other_s)} in the script's own code between the steps' parts."
    if cost is not None and cost.share <= 1:
        return "it has one sample per step already: use a larger batch, or leave it out."
    return "its share fits its average speed, so look for other load on its node."


def _better_shares(worst: WorkerSummary, summary: Summary) -> str:
    """Shares that would shorten the slowest worker's compute time, with the gain; empty if not much."""
    cost = _cost_of(worst, summary)
    fitting = {rank: max(1, round(share)) for rank, share in fitting_shares(summary).items()}
    if cost is None:
        return ""
    now_s = max(each.usual_s for each in summary.costs)
    then_s = max(each.at(fitting[each.rank]) for each in summary.costs)
    if then_s > (1 - _WORTHWHILE) * now_s:
        return ""
    if len(fitting) <= _MOST_LISTED:
        now = ",".join(f"{each.share:.0f}" for each in summary.costs)
        shares = f"--shares {','.join(map(str, fitting.values()))} (now {now})"
    else:
        batch = sum(each.share for each in summary.costs)
        shares = f"about {fitting[cost.rank]} of {batch:.0f} samples instead of {cost.share:.0f}"
    return (
        f"{shares} would cut the slowest worker's compute time from {show_seconds(now_s)} to about "
        f"{show_seconds(then_s)} a step ({_percent(now_s - then_s, now_s)} less)."
        f"{_why_late(worst, fitting, summary)}"
    )


def _why_late(worst: WorkerSummary, fitting: Mapping[int, int], summary: Summary) -> str:
    """What makes workers late besides their speed."""
    text = ""
    slowest = max(summary.costs, key=lambda cost: cost.fixed_s)
    matters = slowest.fixed_known and slowest.fixed_s > _MENTIONED * slowest.usual_s
    if matters and fitting[slowest.rank] < round(slowest.share):
        text += (
            f" {show_seconds(slowest.fixed_s)} of a step on {_rank_name(slowest.rank, summary)} are a "
            "fixed cost that does not shrink with its share, so shares in proportion to speed leave "
            "it late."
        )
    if worst.delay_s > _MENTIONED * worst.compute_s:
        text += (
            f" {show_seconds(worst.delay_s)} of {worker_name(worst)}'s compute time was artificial delay "
            "(--speed or --delay)."
        )
    return text


def _cost_of(worker: WorkerSummary, summary: Summary) -> StepCost | None:
    return next((cost for cost in summary.costs if cost.rank == worker.rank), None)


def _clock_note(summary: Summary) -> str:
    if summary.judged_by == "arrival":
        return ""
    return " The workers' clocks disagree, so this is judged by how long each waited."


def _of_run(seconds: float, summary: Summary) -> str:
    return f"{show_seconds(seconds)}, {_percent(seconds, summary.seconds)} of the run"


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole > 0 else 0.0
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
