"""Why one worker keeps the others waiting, and what helps against it.

Shares help only against a worker that is slow in every round. The others need other remedies:

    starved       its thread was ready to run, and had no core: that explains most of its lateness
    late result   it got the results of the rounds before later than the others, and then was as fast
    now and then  it is late in a minority of its rounds
    steady        it is late in most rounds, by about the same time; the part of its steps that takes longer
                  than the others' says where: data, compute, the optimizer, the script's own code. If its
                  thread did not even want a core, it slept or waited for something outside the run

Everything comes from the summary. The advice on shares follows the measured cost of a step (step_cost.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Literal, TypeAlias

from echelon.config.units import show_seconds
from echelon.observe.step_cost import StepCost, balanced_shares
from echelon.observe.summary import Summary
from echelon.observe.worker_figures import WorkerSummary

Kind: TypeAlias = Literal["starved", "late result", "now and then", "steady"]
StepPart: TypeAlias = Literal["data", "compute", "apply", "other"]

_NEGLIGIBLE = 0.05  # of the run: below this, waiting for late workers is not worth a remedy
_EXPLAINS = 0.5  # of a worker's lateness: from here on something is the reason for it
_STARVED = 0.1  # of a worker's time: less of it without a core is not a reason
_NOT_LATE_RESULT = 0.25  # of a worker's lateness: so much, at least, must have another reason
_MOSTLY = 0.5  # of a worker's rounds: late in fewer, it is late now and then
_WORTHWHILE = 0.1  # of the slowest worker's compute time: other shares must save at least this
_MENTIONED = 0.1  # of a worker's compute time: a fixed cost or injected delay below this is not mentioned
_MOST_LISTED = 8  # workers, for their shares to be listed


def worker_name(worker: WorkerSummary) -> str:
    """A worker's name in sentences: 'rank 3 (node-d)'."""
    return f"rank {worker.rank} ({worker.node})" if worker.node else f"rank {worker.rank}"


def rank_name(rank: int, summary: Summary) -> str:
    """The same for a rank, which may be unknown."""
    known = {worker.rank: worker for worker in summary.workers}
    return worker_name(known[rank]) if rank in known else f"rank {rank}"


def percent(part: float, whole: float) -> str:
    """A share as text; with a digit more if it is below one percent."""
    share = 100 * part / whole if whole > 0 else 0.0
    return f"{share:.1f} %" if 0 < share < 1 else f"{share:.0f} %"


def fitting_shares(summary: Summary) -> dict[int, float]:
    """The shares of the same batch at which all workers take equally long; empty if costs are unknown."""
    return balanced_shares(summary.costs, sum(cost.share for cost in summary.costs))


def is_negligible(seconds: float, summary: Summary) -> bool:
    """Whether so much waiting for late workers is not worth a remedy."""
    return seconds < _NEGLIGIBLE * summary.seconds


def without_standstills_s(worker: WorkerSummary, summary: Summary) -> float:
    """How long a worker kept the others waiting, single standstills aside."""
    return max(0.0, worker.held_up_s - sum(s.seconds for s in summary.standstills if s.rank == worker.rank))


def kind_of(worker: WorkerSummary, summary: Summary) -> Kind:
    """How a worker that keeps the others waiting is late."""
    late_s = without_standstills_s(worker, summary)
    # A late result is not explained by what the worker did in its own time.
    own_s = max(_NOT_LATE_RESULT * late_s, late_s - worker.late_result_s)
    if starved_share(worker) >= _STARVED and _more_starved_s(worker, summary) >= _EXPLAINS * own_s:
        return "starved"
    if worker.late_result_s >= _EXPLAINS * late_s > 0:
        return "late result"
    return "now and then" if worker.steady < _MOSTLY else "steady"


def starved_share(worker: WorkerSummary) -> float:
    """The share of its time, waiting for others aside, in which a worker had no core; 0 if unknown."""
    return min(1.0, worker.starved_s / worker.own_s) if worker.starved_s and worker.own_s > 0 else 0.0


def _more_starved_s(worker: WorkerSummary, summary: Summary) -> float:
    """How much longer than the others it had no core."""
    others = [w.starved_s for w in summary.workers if w.rank != worker.rank and w.starved_s is not None]
    return (worker.starved_s or 0.0) - (median(others) if others else 0.0)


def shares_may_help(summary: Summary) -> bool:
    """Whether nobody costs the others much, or one does because it computes slowly in every round."""
    worst = max(summary.workers, key=lambda worker: without_standstills_s(worker, summary))
    if is_negligible(without_standstills_s(worst, summary), summary):
        return True
    computes = slower_part(worst, summary) == "compute" and _idle(worst, summary) is None
    return kind_of(worst, summary) == "steady" and computes


def advice(worst: WorkerSummary, summary: Summary) -> str:
    """What helps against a worker that keeps the others waiting."""
    match kind_of(worst, summary):
        case "starved":
            return (
                "end other programs on its node, raise its CPU quota, or start fewer workers or threads "
                "there."
            )
        case "late result":
            return (
                "it got the results of the rounds before later than the others: it is woken late, or its "
                "link is slower. Keep a core free on its node, and look at its link."
            )
        case "now and then":
            return (
                "shares do not help against that: look for other load on its node, or use a policy that "
                "does not wait for it, such as backup or flexible."
            )
        case "steady":
            return _against_slowness(worst, summary)


def _against_slowness(worst: WorkerSummary, summary: Summary) -> str:
    match slower_part(worst, summary):
        case "data":
            return f"it spent {show_seconds(worst.data_s)} waiting for data: look at its data loader."
        case "other":
            return (
                f"it spent {show_seconds(worst.other_s)} in the script's own code between the steps' parts."
            )
        case "apply":
            return f"it spent {show_seconds(worst.apply_s)} in its optimizer: look at what runs there."
        case "compute" if (idle_s := _idle(worst, summary)) is not None:
            return (
                f"for {show_seconds(idle_s)} it did not want a core: look for a sleep, a lock, or reading "
                "and writing in its script."
            )
    cost = _cost_of(worst, summary)
    if summary.shares_adapt and (cost is None or cost.share > 1):
        return (
            "shares follow measured speeds already: look for other load on its node, and whether its speed "
            "varies from step to step."
        )
    better = better_shares(worst, summary)
    if better and cost is not None and round(fitting_shares(summary)[cost.rank]) < round(cost.share):
        return f"give it a smaller share: {better}"
    if cost is not None and cost.share <= 1:
        return "it has one sample per step already: use a larger batch, or leave it out."
    return "other shares would not help: look for other load on its node."


def slower_part(worker: WorkerSummary, summary: Summary) -> StepPart:
    """The part of its steps that takes most time beyond the others'."""
    parts: dict[StepPart, Callable[[WorkerSummary], float]] = {
        "compute": lambda w: w.compute_s,
        "data": lambda w: w.data_s,
        "apply": lambda w: w.apply_s,
        "other": lambda w: w.other_s,
    }
    return max(parts, key=lambda part: _beyond_others_s(parts[part], worker, summary))


def _beyond_others_s(
    seconds: Callable[[WorkerSummary], float], worker: WorkerSummary, summary: Summary
) -> float:
    """How much longer than the median of the others a worker took in a step, on average."""
    others = [seconds(w) / w.steps for w in summary.workers if w.rank != worker.rank and w.steps]
    return seconds(worker) / max(1, worker.steps) - (median(others) if others else 0.0)


def _idle(worker: WorkerSummary, summary: Summary) -> float | None:
    """How long it did not want a core, if that is why it computes longer than the others; else None."""
    if worker.idle_s is None:
        return None
    more_s = _beyond_others_s(lambda w: w.compute_s, worker, summary)
    more_idle_s = _beyond_others_s(lambda w: w.idle_s or 0.0, worker, summary)
    return worker.idle_s if more_idle_s >= _EXPLAINS * more_s > 0 else None


def better_shares(worst: WorkerSummary, summary: Summary) -> str:
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
        f"{show_seconds(then_s)} a step ({percent(now_s - then_s, now_s)} less)."
        f"{_why_late(worst, fitting, summary)}"
    )


def _why_late(worst: WorkerSummary, fitting: Mapping[int, int], summary: Summary) -> str:
    """What makes workers late besides their speed."""
    text = ""
    slowest = max(summary.costs, key=lambda cost: cost.fixed_s)
    matters = slowest.fixed_known and slowest.fixed_s > _MENTIONED * slowest.usual_s
    if matters and fitting[slowest.rank] < round(slowest.share):
        text += (
            f" {show_seconds(slowest.fixed_s)} of a step on {rank_name(slowest.rank, summary)} are a "
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
