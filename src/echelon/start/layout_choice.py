"""`--parallel auto`: which layout has the shortest step for this job, on these workers?

The job itself is started a few times and ended after a few steps each. In the first start the workers rank
the layouts by measured layers and links (`train/layout_pick.py`); the three best, and data, are tried,
other hopeless ones not at all. If they cannot rank, every layout is tried. The one with the shortest step
is taken. A layout that the model, its memory or another option does not allow is left out. The choice is
kept in the cache for a day, for these workers, this script and these arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from echelon.cluster import probe_cache
from echelon.cluster.lab.spec import read_lab
from echelon.cluster.machine import processor_name, usable_cores, version_of
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings
from echelon.config.units import show_seconds
from echelon.errors import ConfigError, EchelonError
from echelon.observe.events import LayoutsPredicted
from echelon.parallel.candidates import candidate_layouts
from echelon.parallel.layout import AUTO
from echelon.start.earlier_run import script_job
from echelon.start.few_steps import TriedRun, tried
from echelon.start.hosts import read_hosts
from echelon.start.run import Target

Say = Callable[[str], None]
_STEPS = 30
_BEST = 3  # that are tried twice: other programs may have taken the cores the first time
_USUAL = "data"
_CLEARLY = 0.97  # of the step of a simpler layout


class KeptLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step by layout, in the order of trial."""

    steps_s: dict[str, float]

    @property
    def best(self) -> str:
        """The layout with the shortest step; a later one has to be clearly faster."""
        found = ""
        for text, step_s in self.steps_s.items():
            if not found or step_s < _CLEARLY * self.steps_s[found]:
                found = text
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """Settings with the layout that was chosen, and sentences about it."""

    resolved: Resolved[RunSettings]
    notes: list[str] = field(default_factory=list)


def chosen_layout(resolved: Resolved[RunSettings], target: Target, say: Say) -> LayoutChoice:
    """The settings with the best layout, from the cache or tried now; as they are without `auto`."""
    settings = resolved.settings
    if settings.parallel.strip() != AUTO:
        return LayoutChoice(resolved=resolved)
    if settings.plan:
        raise ConfigError(
            "a plan's file says how workers are used", where="--parallel", fix="leave out --plan"
        )
    workers = count_workers(settings)
    key = _key(settings, target)
    kept, how = _from_cache(key), "from an earlier run"
    left_out: dict[str, str] = {}
    if kept is None:
        kept, left_out = _tried(resolved, target, workers, say)
        how = "tried now"
        if key:
            probe_cache.keep(key, msgspec.json.encode(kept).decode())
    chosen = Resolved(replace(settings, parallel=kept.best), resolved.origins)
    notes = [f"{text} was left out: {why}" for text, why in left_out.items()]
    return LayoutChoice(resolved=chosen, notes=[_said(kept, how), *notes])


def count_workers(settings: RunSettings) -> int:
    """How many workers there will be."""
    count = settings.workers or len(settings.speeds)
    if not count and settings.hosts:
        count = sum(host.slots for host in read_hosts(settings.hosts))
    if not count and settings.lab:
        count = len(read_lab(settings.lab).nodes)
    if not count and settings.on != "local":
        raise ConfigError(
            "the number of workers is not known", where="--parallel", fix="say it with --workers"
        )
    return count or 1


def _key(settings: RunSettings, target: Target) -> str:
    job = script_job(settings, target.argv)
    if job is None:
        return ""
    lab = read_lab(settings.lab) if settings.lab else None
    where = f"{settings.workers} {settings.threads} {settings.hosts} {settings.on} {settings.speed} {lab}"
    machine = f"{processor_name()}, {usable_cores()} cores, torch {version_of('torch')}"
    return f"layout of {job.text}, {settings.sync}, {settings.codec}; on {where}; {machine}"


def _from_cache(key: str) -> KeptLayout | None:
    entry = probe_cache.cached(key, within_s=probe_cache.LINKS_AGE_S) if key else None
    if entry is None:
        return None
    try:
        found = msgspec.json.decode(entry.text, type=KeptLayout)
    except msgspec.MsgspecError:
        return None
    return found if found.steps_s else None


def _tried(
    resolved: Resolved[RunSettings], target: Target, workers: int, say: Say
) -> tuple[KeptLayout, dict[str, str]]:
    """Seconds of a step by layout, and why others were left out; an error if none works."""
    trials, layouts = _Trials(resolved, target, say), candidate_layouts(workers)
    first = trials.ranked()
    wanted = candidate_layouts(workers, predicted=False) if first is None else trials.worth(first)
    for text in wanted:
        trials.take(text, f"trying layout {wanted.index(text) + 1} of {len(wanted)}: {text}")
    steps_s = trials.steps_s
    again = sorted(steps_s, key=lambda text: steps_s[text])[:_BEST] if len(steps_s) > 1 else []
    for text in again:
        trials.take(text, f"trying the best again: {text}")
    if not steps_s:
        text, why = next(iter(trials.left_out.items()))
        raise ConfigError(
            f"no layout works; {text}: {why}",
            where="--parallel auto",
            fix="start more workers, or see with --parallel data what is wrong",
        )
    kept = {text: steps_s[text] for text in layouts if text in steps_s}
    return KeptLayout(steps_s=kept | steps_s), trials.left_out


class _Trials:
    """Starts of the job with one layout after another."""

    def __init__(self, resolved: Resolved[RunSettings], target: Target, say: Say) -> None:
        self._resolved = resolved
        self._target = target
        self._say = say
        self.steps_s: dict[str, float] = {}
        self.left_out: dict[str, str] = {}

    def ranked(self) -> LayoutsPredicted | None:
        """The workers' own ranking, by measured layers and links; None if they cannot make one."""
        self._say("measuring layers and links, to rank layouts")
        try:
            found = self._start(AUTO)
        except EchelonError:
            return None  # such as a script that prepares its loader by itself: every layout is tried
        if found.layouts is not None:
            self.steps_s[found.layouts.chosen] = found.step_s
        return found.layouts

    def worth(self, ranking: LayoutsPredicted) -> list[str]:
        """The layouts that are still to be tried: of the three best, those that are not hopeless; and data.

        It is what a run has otherwise, so that it is compared with a measurement, not with a prediction.
        """
        best = ranking.worth[:_BEST]
        if _USUAL in ranking.steps_s and _USUAL not in best:
            best.append(_USUAL)
        self.left_out |= ranking.left_out
        for text, step_s in ranking.steps_s.items():
            if text not in best:
                self.left_out[text] = f"{show_seconds(step_s)} a step were predicted"
        return [text for text in best if text not in self.steps_s]

    def take(self, text: str, words: str) -> None:
        """Try a layout; its shortest step counts."""
        self._say(words)
        try:
            step_s = self._start(text).step_s
        except EchelonError as error:
            if text not in self.steps_s:
                self.left_out[text] = error.message
            return
        self.steps_s[text] = min(step_s, self.steps_s.get(text, step_s))

    def _start(self, text: str) -> TriedRun:
        settings = replace(self._resolved.settings, parallel=text)
        return tried(settings, self._resolved.origins, self._target, _STEPS)


def _said(kept: KeptLayout, how: str) -> str:
    best = kept.best
    others = ", ".join(f"{text} {show_seconds(s)}" for text, s in kept.steps_s.items() if text != best)
    beside = f"; {others}" if others else ""
    return f"--parallel auto: {best}, {show_seconds(kept.steps_s[best])} a step{beside} ({how})"
