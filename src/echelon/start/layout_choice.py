"""`--parallel auto`: which layout has the shortest step for this job, on these workers?

The job itself is started with every layout and ended after a few steps; the three best once more. The one
with the shortest step is taken. A layout that the model, its memory or another option does not allow is
left out. The choice is kept in the cache for a day, for these workers, this script and these arguments.
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
from echelon.parallel.candidates import candidate_layouts
from echelon.start.earlier_run import script_job
from echelon.start.few_steps import tried
from echelon.start.hosts import read_hosts
from echelon.start.run import Target

Say = Callable[[str], None]
AUTO = "auto"
_STEPS = 30
_BEST = 3  # that are tried twice: other programs may have taken the cores the first time
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
    layouts = candidate_layouts(count_workers(settings))
    key = _key(settings, target)
    kept, how = _from_cache(key), "from an earlier run"
    left_out: dict[str, str] = {}
    if kept is None:
        kept, left_out = _tried(resolved, target, layouts, say)
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
    resolved: Resolved[RunSettings], target: Target, layouts: list[str], say: Say
) -> tuple[KeptLayout, dict[str, str]]:
    """Seconds of a step by layout, and why others were left out; an error if none works."""
    steps_s: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for number, text in enumerate(layouts, start=1):
        say(f"trying layout {number} of {len(layouts)}: {text}")
        try:
            settings = replace(resolved.settings, parallel=text)
            steps_s[text], _ = tried(settings, resolved.origins, target, _STEPS)
        except EchelonError as error:
            left_out[text] = error.message
    again = sorted(steps_s, key=lambda text: steps_s[text])[:_BEST] if len(steps_s) > 1 else []
    for text in again:
        say(f"trying the best again: {text}")
        settings = replace(resolved.settings, parallel=text)
        step_s, _ = tried(settings, resolved.origins, target, _STEPS)
        steps_s[text] = min(step_s, steps_s[text])
    if not steps_s:
        first, why = next(iter(left_out.items()))
        raise ConfigError(
            f"no layout works; {first}: {why}",
            where="--parallel auto",
            fix="start more workers, or see with --parallel data what is wrong",
        )
    return KeptLayout(steps_s=steps_s), left_out


def _said(kept: KeptLayout, how: str) -> str:
    best = kept.best
    others = ", ".join(f"{text} {show_seconds(s)}" for text, s in kept.steps_s.items() if text != best)
    beside = f"; {others}" if others else ""
    return f"--parallel auto: {best}, {show_seconds(kept.steps_s[best])} a step{beside} ({how})"
