"""In a sentence or two: who kept the others waiting and what to do about it, and what limits a step.

Where workers do not step together nobody keeps all others waiting; then it is what the sync policy made of
their steps: how many updates of how many gradients, what was dropped, how old gradients were, who was left
out.

Worded from the summary alone. The advice on shares follows the measured speeds: samples per second
of getting data and computing, without the waiting that makes all workers look alike.
"""

from __future__ import annotations

from statistics import median

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.overlap import Communication
from echelon.observe.summary import Summary, WorkerSummary
from echelon.observe.sync import SyncFigures, WorkerSync

_NEGLIGIBLE = 0.05  # of the run: below this, waiting for late workers is not worth a remedy
_STANDS_OUT = 0.5  # of the spread: above this, one worker is the reason; of two, one always has half
_STANDS_OUT_OF_TWO = 0.75
_FEW_ROUNDS = 20
_MISFIT = 0.9  # of the present share: above this, another share would not change much
_BELOW_LIMIT = 0.95  # of the limit: below this, the limit cannot be right
_LEFT_OUT = 0.1  # of the updates: from here on it is worth a word that a worker had no part in them
_UNEQUAL = 0.1  # of the updates, between workers: from here on one of them stands out
_SLOWER = 1.5  # times as long as the others: from here on that is why
_CLEAR_MISFIT = 0.8  # of the present share: below this, shares are the first thing to change


def worker_name(worker: WorkerSummary) -> str:
    """How a worker is called in sentences: 'rank 3 (node-d)'."""
    return f"rank {worker.rank} ({worker.node})" if worker.node else f"rank {worker.rank}"


def fitting_shares(summary: Summary) -> dict[int, float]:
    """The same global batch, divided by measured speed; empty if a worker's speed is unknown."""
    speeds = {}
    for worker in summary.workers:
        busy_s = worker.data_s + worker.compute_s
        if busy_s <= 0 or worker.samples == 0:
            return {}
        speeds[worker.rank] = worker.samples / busy_s
    batch = sum(worker.mean_share for worker in summary.workers)
    return {rank: batch * speed / sum(speeds.values()) for rank, speed in speeds.items()}


def verdict(summary: Summary) -> str:
    """Who kept the others waiting, in plain English."""
    if summary.steps == 0:
        return "No step was recorded."
    if summary.world_size < 2:
        return "One worker alone: nobody had to wait."
    if summary.agreement is not None:
        agreed = summary.agreement
        return _served(agreed, summary) if agreed.served else _by_themselves(agreed, summary)
    if summary.rounds == 0:
        return "No step was reported by all workers, so their arrivals cannot be compared."
    few = f" These were only {summary.rounds} rounds." if summary.rounds < _FEW_ROUNDS else ""
    return _finding(summary) + few + _clock_note(summary)


def _rank_name(rank: int, summary: Summary) -> str:
    known = {worker.rank: worker for worker in summary.workers}
    return worker_name(known[rank]) if rank in known else f"rank {rank}"


def _served(agreed: SyncFigures, summary: Summary) -> str:
    if not agreed.updates:
        return f"{agreed.policy}: {_counted(agreed.pushed, 'push')} arrived, and no update was made."
    said = [_updates(agreed, summary)]
    if agreed.dropped:
        said.append(_drops(agreed, summary))
    if agreed.age_most:
        old = f"{agreed.age_mean:.1f}" if agreed.age_mean >= 0.1 else f"{agreed.age_mean:.2f}"
        said.append(f"gradients were {old} versions old on average, {agreed.age_most:,} at most")
    said.append(_held(agreed, summary))
    return f"{agreed.policy}: {'; '.join(said)}.{_left_out(agreed, summary)}"


def _updates(agreed: SyncFigures, summary: Summary) -> str:
    made = _counted(agreed.updates, "update")
    usual, times = max(agreed.parts.items(), key=lambda item: item[1])
    if times >= 0.95 * agreed.updates:
        # Where groups agree, only the first rank of each has a part.
        grouped = len(agreed.workers) < len(summary.workers)
        whole = len(agreed.workers) if grouped else summary.world_size
        each = "one gradient each" if usual == 1 else f"{usual} of {whole} gradients"
        return f"{made} of {each}"
    first = next(stretch.parts for stretch in agreed.course if stretch.updates)
    most = max(stretch.parts for stretch in agreed.course)
    mean = agreed.applied / agreed.updates
    grew = f", {first:.1f} at first and up to {most:.1f} later" if most > 1.2 * first else ""
    return f"{made} of {mean:.1f} gradients on average{grew}"


def _drops(agreed: SyncFigures, summary: Summary) -> str:
    most = max(agreed.workers, key=lambda worker: worker.dropped)
    share = _percent(agreed.dropped, agreed.pushed)
    whose = f", {most.dropped:,} of them {_rank_name(most.rank, summary)}'s"
    if most.dropped < 1.5 * agreed.dropped / max(1, len(agreed.workers)):
        whose = ", of all workers alike"
    return f"{_counted(agreed.dropped, 'gradient')} dropped ({share}{whose})"


def _held(agreed: SyncFigures, summary: Summary) -> str:
    known = {worker.rank for worker in agreed.workers}
    in_steps_s = sum(worker.step_s for worker in summary.workers if worker.rank in known)
    if agreed.held_s < 0.01 * in_steps_s:
        return "nobody was made to wait"
    held = f"workers were held for {_percent(agreed.held_s, in_steps_s)} of their time"
    slowest = max(summary.workers, key=lambda worker: _times_as_long(worker.rank, summary))
    times = _times_as_long(slowest.rank, summary)
    part = next((worker for worker in agreed.workers if worker.rank == slowest.rank), None)
    if times < _SLOWER or part is None or part.took_part < 1 - _LEFT_OUT:
        return held
    return f"{held}, for {worker_name(slowest)} computes {times:.1f} times longer than the others"


def _left_out(agreed: SyncFigures, summary: Summary) -> str:
    """Who had no part in updates because it was on its own, or too late."""
    out = [worker for worker in agreed.workers if worker.alone or worker.dropped]
    if not out:
        return ""
    shares = [worker.took_part for worker in agreed.workers]
    least = min(out, key=lambda worker: worker.took_part)
    if least.took_part > 1 - _LEFT_OUT:
        return ""
    if max(shares) - min(shares) < _UNEQUAL:
        return f" Each worker took part in {_percent(median(shares), 1.0)} of updates."
    missed = _percent(1 - least.took_part, 1.0)
    name = _capital(_rank_name(least.rank, summary))
    return f" {name} was left out of {missed} of updates{_why(least, summary)}."


def _why(least: WorkerSync, summary: Summary) -> str:
    times = _times_as_long(least.rank, summary)
    return f", because it computes {times:.1f} times longer than the others" if times >= _SLOWER else ""


def _times_as_long(rank: int, summary: Summary) -> float:
    """How many times as long as the others at the median a worker computes for a step; 0: not known."""
    each_s = {w.rank: w.compute_s / w.steps for w in summary.workers if w.steps}
    others_s = [each_s[other] for other in each_s if other != rank]
    usual_s = median(others_s) if others_s else 0.0
    return each_s.get(rank, 0.0) / usual_s if usual_s > 0 else 0.0


def _by_themselves(agreed: SyncFigures, summary: Summary) -> str:
    """Without a server: how often something was exchanged, and what the waiting for it came to."""
    exchanges = sum(worker.exchanges for worker in agreed.workers)
    if not exchanges:
        return f"{agreed.policy}: workers sent each other nothing during their steps; {_range(summary)}."
    of = f"{_percent(exchanges, summary.all_steps)} of their steps"
    waited_s, in_steps_s = (
        sum(values) for values in zip(*((w.wait_s, w.step_s) for w in summary.workers), strict=True)
    )
    took = _percent(waited_s, in_steps_s)
    said = (
        f"{agreed.policy}: workers exchanged weights after {of}, and that took {took} of their time, "
        "waiting for each other included."
    )
    slowest = max(summary.workers, key=lambda worker: _times_as_long(worker.rank, summary))
    times = _times_as_long(slowest.rank, summary)
    if times >= _SLOWER:
        said += f" {_capital(worker_name(slowest))} computes {times:.1f} times longer than the others."
    return said


def _range(summary: Summary) -> str:
    """Who took how many steps."""
    fewest = min(summary.workers, key=lambda worker: worker.steps)
    most = max(summary.workers, key=lambda worker: worker.steps)
    if fewest.steps == most.steps:
        return f"each took {_counted(most.steps, 'step')}"
    return (
        f"they took from {fewest.steps:,} ({worker_name(fewest)}) to {most.steps:,} ({worker_name(most)})"
    )


def _counted(count: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("sh") else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"


def wire_verdict(summary: Summary) -> str:
    """What a codec saved, how far steps are from their limit, who sets it, what was hidden: if known."""
    said = [summary.coding.sentence] if summary.coding is not None else []
    went = summary.communication
    if went is None:
        return " ".join(said)
    if went.distance is not None:
        said.append(f"A step took {went.distance:.2f} times its limit, set by {_limiter(went, summary)}.")
        if went.limited_by == "link" and went.distance < _BELOW_LIMIT:
            said.append("So the link carried more than was measured at the start.")
    if went.hidden is not None:
        said.append(f"{100 * went.hidden:.0f} % of communication was hidden behind computation.")
    return " ".join(said)


def _limiter(went: Communication, summary: Summary) -> str:
    blamed = next(worker for worker in went.workers if worker.rank == went.rank)
    name = _rank_name(blamed.rank, summary)
    if went.limited_by == "compute":
        return f"{name}, which computed for {show_seconds(blamed.compute_s)}"
    assert blamed.peer is not None
    assert blamed.bytes_per_s is not None
    assert blamed.wire_limit_s is not None
    return (
        f"the link from {name} to {_rank_name(blamed.peer, summary)}: {show_bytes(blamed.sent_bytes)} "
        f"at {show_bytes(blamed.bytes_per_s)}/s are {show_seconds(blamed.wire_limit_s)}"
    )


def _finding(summary: Summary) -> str:
    cost = _cost(summary.spread_s, summary)
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
            f"Most to blame: {names}.{_shares_note(summary)}"
        )
    return (
        f"{_capital(worker_name(worst))} arrived last in {_percent(worst.times_last, summary.rounds)} "
        f"of rounds and cost the others {_cost(worst.held_up_s, summary)}; {_advice(worst, summary)}."
    )


def _shares_note(summary: Summary) -> str:
    fitting = fitting_shares(summary)
    if any(fitting.get(w.rank, w.mean_share) < _CLEAR_MISFIT * w.mean_share for w in summary.workers):
        return " Shares by measured speed would even much of this out."
    return " Their shares fit their average speeds, so the delays come and go."


def _advice(worst: WorkerSummary, summary: Summary) -> str:
    fitting = fitting_shares(summary).get(worst.rank)
    if fitting is not None and fitting < _MISFIT * worst.mean_share:
        batch = round(sum(worker.mean_share for worker in summary.workers))
        less = max(1, round(fitting))
        if less < round(worst.mean_share):
            injected = ""
            if worst.delay_s > 0.1 * worst.compute_s:
                injected = f" ({show_seconds(worst.delay_s)} of its compute were injected delay)"
            return (
                f"give it a smaller share: by measured speed about {less} of {batch} samples, "
                f"not {round(worst.mean_share)}{injected}"
            )
    if worst.data_s > worst.compute_s:
        return f"it spent {show_seconds(worst.data_s)} waiting for data: look at its loader"
    if worst.other_s > worst.compute_s:
        return f"it spent {show_seconds(worst.other_s)} in the script's own code between the steps' parts"
    return "its share fits its average speed, so look for other load on its node"


def _clock_note(summary: Summary) -> str:
    if summary.judged_by == "arrival":
        return ""
    return " The workers' clocks disagree, so this is judged by how long each waited."


def _cost(seconds: float, summary: Summary) -> str:
    return f"{show_seconds(seconds)}, {_percent(seconds, summary.seconds)} of the run"


def _percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole > 0 else 0.0
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
