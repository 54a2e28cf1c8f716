"""The section on the plan: its picture, and how far its prediction is from what was measured."""

from __future__ import annotations

from echelon.config.units import show_seconds
from echelon.observe.page.history import RunHistory
from echelon.observe.page.markup import about, figure, safe, section, table
from echelon.observe.page.plan_picture import plan_picture
from echelon.observe.plan_view import PlanView, measured_step_s


def planned(view: PlanView, history: RunHistory) -> str:
    """Groups, shares and links; predicted against measured if the plan has a prediction."""
    remark = "Frames: workers that sum together. Blue bars: shares of a batch."
    if view.choices:
        remark += f" Chosen: {', '.join(view.choices)}."
    return section("The plan", _score(view, history) + about(remark) + figure(plan_picture(view)))


def _score(view: PlanView, history: RunHistory) -> str:
    """Predicted and measured, with the error; empty without a prediction."""
    if view.step_s is None:
        return ""
    measured_s = measured_step_s([point.begin_s for point in history.rounds]) if history.together else None
    rows = [
        ["time of a step", show_seconds(view.step_s), _shown(measured_s), _error(view.step_s, measured_s)]
    ]
    if view.samples_per_s is not None:
        batch = view.batch or view.samples_per_s * view.step_s
        rate = batch / measured_s if measured_s else None
        shown = f"{rate:,.0f}" if rate else "–"
        rows.append(["samples/s", f"{view.samples_per_s:,.0f}", shown, _error(view.samples_per_s, rate)])
    said = ""
    if measured_s is not None:
        said = (
            f"A step was to take {show_seconds(view.step_s)} and took {show_seconds(measured_s)}: "
            f"the prediction is {_error(view.step_s, measured_s)} off."
        )
    if view.bottleneck:
        said += f" By the prediction, {view.bottleneck} limits it."
    verdict = f'<p class="verdict">{safe(said.strip())}</p>' if said else ""
    note = about("Measured: the median, without the first fifth of the run.")
    return verdict + table(["", "predicted", "measured", "error"], rows, words={0}) + note


def _shown(seconds: float | None) -> str:
    return show_seconds(seconds) if seconds is not None else "–"


def _error(predicted: float, measured: float | None) -> str:
    return f"{100 * (predicted / measured - 1):+.0f} %" if measured else "–"
