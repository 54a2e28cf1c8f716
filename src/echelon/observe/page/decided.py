"""The section on a run's own decisions: what each was expected to bring, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.config.units import show_seconds
from echelon.observe.decisions import SETTLING_STEPS, Decision, decisions_verdict, show_error
from echelon.observe.page.markup import about, safe, section, table


def decided(decisions: Sequence[Decision]) -> str:
    """A row for each decision; empty if there were none."""
    if not decisions:
        return ""
    rows = [
        [
            f"{decision.step:,}",
            decision.what,
            _shown(decision.before_s),
            _shown(decision.expected_step_s),
            _shown(decision.measured_s),
            show_error(decision),
            decision.reason,
        ]
        for decision in decisions
    ]
    head = ["step", "decision", "before", "expected", "measured", "error", "reason"]
    remark = (
        f"Times are of a step. Before, measured: the median of rank 0's steps, from {SETTLING_STEPS} steps "
        "after a decision up to the next. Where another decision follows sooner, the next row has the "
        "outcome of both."
    )
    said = f'<p class="verdict">{safe(decisions_verdict(decisions))}</p>'
    return section("Decisions", said + table(head, rows, words={1}, wide=6) + about(remark))


def _shown(seconds: float | None) -> str:
    return show_seconds(seconds) if seconds is not None else "–"
