"""The closing table: the figures of a run that has ended, a row per worker, and what they mean."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.decisions import decisions_verdict
from echelon.observe.membership import members_line
from echelon.observe.stages import stages_verdict
from echelon.observe.summary import Summary
from echelon.observe.sync import SyncFigures
from echelon.observe.verdict import verdict, wire_verdict
from echelon.observe.verified import verify_line

_LEGEND = {  # of the closing table's columns
    "wait": "for other workers and for transfers",
    "last": "share of rounds in which the worker arrived last",
    "delayed": "how long the worker kept the others waiting",
    "dropped": "gradients that the server did not apply",
    "took part": "share of updates that contain a push of the worker",
    "age": "updates between reading weights and applying the gradient, on average",
    "held": "how long the policy made the worker wait",
}
_LAST_OF_SEVERAL = "share of rounds in which the worker kept the others waiting longest"


def closing_table(summary: Summary) -> RenderableType:
    """The figures of a run that has ended; fits 80 columns."""
    if not summary.steps:
        return Text(verdict(summary))
    table = Table(box=box.SIMPLE, show_footer=True, padding=(0, 0, 0, 1), footer_style="bold")
    columns = _columns(summary)
    for name, (total, *_) in columns.items():
        if name == "node":  # the only column that may fold in a narrow terminal
            table.add_column(name, total, overflow="fold")
        else:
            table.add_column(name, total, justify="right", no_wrap=True)
    for row in range(len(summary.workers)):
        table.add_row(*(Text(cells[row + 1]) for cells in columns.values()))
    lines = [f"{_made(summary)} in {show_seconds(summary.seconds)}, {rate(summary)}"]
    lines.append(", ".join(quality(summary)))
    lines += [verdict(summary), decisions_verdict(summary.decisions), wire_verdict(summary)]
    lines += [stages_verdict(summary.stages), members_line(summary.members), verify_line(summary.verified)]
    meanings = _meanings(summary)
    known = [f"{name}: {meaning}" for name, meaning in meanings.items() if name in columns]
    texts = [Text("; ".join(known), style="dim")] if summary.world_size > 1 else []
    return Group(table, *texts, *(Text(line) for line in lines if line))


def _meanings(summary: Summary) -> dict[str, str]:
    """What the columns mean; some cover only the rounds that are judged."""
    meanings = dict(_LEGEND)
    if summary.judged.meet_often:
        meanings["last"] = _LAST_OF_SEVERAL
    if summary.settled is not None:
        for name in ("last", "delayed"):
            meanings[name] += f", from step {summary.settled.step:,} on"
    return meanings


def rate(summary: Summary) -> str:
    """How fast it was; without a prepared loader samples are not counted."""
    if summary.samples or not summary.seconds:
        return f"{summary.samples_per_s:,.0f} samples/s"
    return f"{summary.all_steps / len(summary.workers) / summary.seconds:,.3g} steps/s"


def quality(summary: Summary) -> list[str]:
    """How good the model is, as far as it is known: loss, test loss, accuracy."""
    figures = []
    if summary.train_loss is not None:
        figures.append(f"loss {summary.train_loss:.4g}")
    if summary.test_loss is not None:
        figures.append(f"test loss {summary.test_loss:.4g}")
    if summary.accuracy is not None:
        figures.append(f"accuracy {100 * summary.accuracy:.1f} %")
    return figures


def _made(summary: Summary) -> str:
    if summary.sync is None:
        return f"{summary.steps:,} steps"
    updates = f" and {summary.sync.updates:,} updates" if summary.sync.served else ""
    return f"{summary.all_steps:,} steps of {len(summary.workers)} workers{updates}"


def _columns(summary: Summary) -> dict[str, list[str]]:
    """The closing table by column: the figure for all workers, then each worker's."""
    workers = summary.workers
    columns = {
        "rank": ["all", *(str(w.rank) for w in workers)],
        "node": ["", *(w.node for w in workers)],
    }
    if summary.sync is None and summary.samples:
        batch = sum(w.mean_share for w in workers)
        columns["share"] = [f"{batch:.0f}", *(f"{w.mean_share:.0f}" for w in workers)]
    else:
        columns["steps"] = [f"{summary.all_steps:,}", *(f"{w.steps:,}" for w in workers)]
    if summary.samples:
        speeds = [summary.samples_per_s, *(w.samples_per_s for w in workers)]
        columns["samples/s"] = [f"{speed:,.0f}" for speed in speeds]
    columns |= {
        "compute": ["", *(_seconds(w.compute_s, summary) for w in workers)],
        "wait": ["", *(_seconds(w.wait_s, summary) for w in workers)],
    }
    if not (summary.sync and summary.sync.served):  # with a server, other columns need the room
        sent_bytes = [sum(w.sent_bytes for w in workers), *(w.sent_bytes for w in workers)]
        columns["sent"] = [show_bytes(count) for count in sent_bytes]
    if summary.rounds > 0:
        judged = summary.judged
        columns |= {
            "last": ["", *(percent(w.times_last, w.rounds) for w in judged.workers)],
            "delayed": [
                _seconds(judged.spread_s, summary),
                *(_seconds(w.held_up_s, summary) for w in judged.workers),
            ],
        }
    if summary.sync is not None and summary.sync.served:
        columns |= _sync_columns(summary, summary.sync)
    return columns


def _sync_columns(summary: Summary, sync: SyncFigures) -> dict[str, list[str]]:
    """What happened to each worker's pushes; columns that would be all zeros are left out."""
    known = {worker.rank: worker for worker in sync.workers}
    own = [known.get(worker.rank) for worker in summary.workers]
    columns = {}
    if sync.dropped:
        columns["dropped"] = [f"{sync.dropped:,}", *(f"{w.dropped:,}" if w else "" for w in own)]
    if any(worker.alone for worker in sync.workers):
        columns["took part"] = ["", *(percent(w.took_part, 1.0) if w else "" for w in own)]
    if sync.age_most:
        columns["age"] = [f"{sync.age_mean:.1f}", *(f"{w.age_mean:.1f}" if w else "" for w in own)]
    return columns | {"held": ["", *(_seconds(w.held_s, summary) if w else "" for w in own)]}


def _seconds(seconds: float, summary: Summary) -> str:
    """Always in seconds, so that the figures of a column can be compared at a glance."""
    return f"{seconds:,.2f} s" if summary.seconds < 100 else f"{seconds:,.0f} s"


def percent(part: float, whole: float) -> str:
    """A share as text; empty if there is no whole."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""
