"""`--local auto`: which way of using this machine trains most samples a second?

What `echelon train` trains is known before it starts: processes train it in turns, in every usual way and
then the best way with chunks, for at most five seconds. What a script trains is known only when it runs: it
is started with each way and ended after a few steps, five seconds of steps in all.

The way is kept in the cache for a week, for this machine, script and arguments. The first run with it
leaves its samples/s there: when a later run is clearly slower, the way is measured again at the next start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import msgspec

from echelon.cluster import probe_cache
from echelon.cluster.machine import processor_name, version_of
from echelon.config.choices import flag
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError, EchelonError
from echelon.observe.summary import Summary
from echelon.parallel.local_way import LocalWay, as_it_is, best_way, refined, usual_ways
from echelon.start.earlier_run import script_job
from echelon.start.few_steps import tried
from echelon.start.local_trial import LocalTrial, MeasuredWay, my_cores, take_turns
from echelon.start.run import Target
from echelon.train.local_messages import LocalJob

Say = Callable[[str], None]
LIMIT_S = 5.0
_TURNS, _TURN_S = 9, 0.1
_LONG_STEP_S = 0.1
_LONGEST_STEP_S = 1.0  # larger batches are measured with fewer samples, and what each sample adds
_SCRIPT_STEPS = 24
_SLOWER = 0.7  # of the samples/s that the first run with this way had
_MEASURED = ("workers", "threads", "parallel", "pin")
_ELSEWHERE = ("lab", "hosts", "plan", "speed", "shares", "servers", "min_workers", "delay")


class KeptWay(msgspec.Struct, frozen=True, kw_only=True):
    """What the cache has: the way, samples/s by way when it was chosen, and of the first run with it."""

    way: LocalWay
    rates: dict[str, float]
    run_rate: float = 0.0


@dataclass(slots=True, kw_only=True)
class LocalChoice:
    """Settings with the way that was chosen, and a sentence about it; both as they were without `auto`."""

    resolved: Resolved[RunSettings]
    notes: list[str] = field(default_factory=list)
    key: str = ""
    kept: KeptWay | None = None

    def seen(self, summary: Summary, say: Say) -> None:
        """Note how fast the run was; forget a way that has become clearly slower."""
        if self.kept is None or not self.key or not summary.samples_per_s:
            return
        if not self.kept.run_rate:
            kept = msgspec.structs.replace(self.kept, run_rate=summary.samples_per_s)
            probe_cache.keep(self.key, msgspec.json.encode(kept).decode())
        elif summary.samples_per_s < _SLOWER * self.kept.run_rate:
            probe_cache.forget(self.key)
            say(
                f"note: {summary.samples_per_s:.0f} samples/s, {self.kept.run_rate:.0f} before: "
                "--local auto measures again next time"
            )


def chosen_way(resolved: Resolved[RunSettings], target: Target, say: Say) -> LocalChoice:
    """The settings for the best way, from the cache or measured now; as they are without `--local auto`."""
    settings = resolved.settings
    if settings.local != "auto":
        return LocalChoice(resolved=resolved)
    _refuse(resolved)
    cores = my_cores()
    key = _key(settings, target, len(cores))
    kept = _from_cache(key)
    how = "from an earlier run"
    if kept is None:
        try:
            kept = _measured(resolved, target, cores, say)
        except EchelonError as error:
            plain = replace(settings, local="none")
            why = f"--local auto could not measure: {error.message}; torch's own threads are used"
            return LocalChoice(resolved=Resolved(plain, resolved.origins), notes=[why])
        how = "measured"
        if key:
            probe_cache.keep(key, msgspec.json.encode(kept).decode())
    way = kept.way
    chosen = replace(
        settings,
        local="none",
        workers=way.processes,
        threads=way.threads_a_process,
        parallel=way.layout,
        pin="cores" if way.pinned else "none",
    )
    return LocalChoice(
        resolved=Resolved(chosen, resolved.origins),
        notes=[_said(kept, len(cores), how)],
        key=key,
        kept=kept,
    )


def _refuse(resolved: Resolved[RunSettings]) -> None:
    for name in (*_MEASURED, *_ELSEWHERE, "on"):
        if resolved.origins.get(name, "default") != "default":
            why = "is what --local auto measures" if name in _MEASURED else "does not go with --local auto"
            raise ConfigError(
                f"{flag(name)} {why}: it chooses how one machine is used",
                where="--local",
                fix=f"leave out {flag(name)}, or --local auto",
            )


def _key(settings: RunSettings, target: Target, cores: int) -> str:
    """What the way depends on; empty if that is not known, and then nothing is kept."""
    job = script_job(settings, target.argv)
    if job is None:
        return ""
    machine = f"{processor_name()}, {cores} cores, torch {version_of('torch')}"
    return f"local way of {job.text}, {settings.sync}, {settings.codec}; on {machine}"


def _from_cache(key: str) -> KeptWay | None:
    entry = probe_cache.cached(key, within_s=probe_cache.COMPUTE_AGE_S) if key else None
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.text, type=KeptWay)
    except msgspec.MsgspecError:
        probe_cache.forget(key)
        return None


def _measured(resolved: Resolved[RunSettings], target: Target, cores: tuple[int, ...], say: Say) -> KeptWay:
    if isinstance(resolved.settings, TrainSettings):
        from echelon.train.local_job import job_of  # imports torch

        say(f"measuring for up to {LIMIT_S:.0f} s how to use {len(cores)} cores")
        rates = way_rates(job_of(resolved.settings), cores)
    else:
        say(f"starting {target.name} a few times for some steps, to find how to use {len(cores)} cores")
        rates = _script_rates(resolved, target, len(cores))
    return KeptWay(way=best_way(rates), rates={str(way): rate for way, rate in rates.items()})


def way_rates(job: LocalJob, cores: tuple[int, ...]) -> dict[LocalWay, float]:
    """Samples/s of the usual ways, and of the best one with chunks if time is left."""
    usual, *others = usual_ways(len(cores), job.batch)
    spare = 3 * max(way.processes for way in (usual, *others))
    count = sum(way.processes for way in (usual, *others)) + spare
    with LocalTrial(job, count, cores) as trial:
        opened = trial.open([usual])
        step_s, batch = _whole_step(trial, opened[0], job.batch)
        if step_s > _LONG_STEP_S:  # long operations are worth being divided, and few ways can be timed well
            others = [way for way in others if way.processes > 1 and way.replicas == 1]
        opened += trial.open(others)
        until = time.monotonic() + LIMIT_S
        _all_turns(trial, opened, batch, job.batch, until - LIMIT_S / 3)
        rates = _rates(opened, job.batch, batch)
        if not rates:
            raise ConfigError(opened[0].failed, where="--local auto", fix="train it without --local auto")
        best = next(one for one in opened if one.way == best_way(rates))
        for one in opened:
            if one is not best:
                trial.close(one)
        if time.monotonic() > until - LIMIT_S / 4:
            return rates
        cut = trial.open(refined(best.way, job.batch))
        _all_turns(trial, [best, *cut], batch, job.batch, until)
        return rates | _rates([best, *cut], job.batch, batch)


def _whole_step(trial: LocalTrial, usual: MeasuredWay, batch: int) -> tuple[float, int]:
    """About how long a step of the whole batch takes, and the batch to time: whole, if that is not long."""
    least = min(batch, 4 * usual.way.threads)
    trial.turn(usual, steps=1, batch=least, counts=False)
    step_s = trial.turn(usual, steps=1, batch=least, counts=False) * batch / least
    if step_s <= _LONGEST_STEP_S or batch <= 2 * least:
        return step_s, batch
    part = max(2 * least, int(batch * _LONGEST_STEP_S / step_s))
    return step_s, batch if part >= batch / 1.5 else part


def _all_turns(trial: LocalTrial, ways: list[MeasuredWay], batch: int, whole: int, until: float) -> None:
    """Turns with this batch and, if it is not the whole one, with half of it: what does a sample add?"""
    for size in [batch] if batch == whole else [batch, batch // 2]:
        take_turns(trial, ways, batch=size, turns=_TURNS, turn_s=_TURN_S, until=until)


def _rates(ways: list[MeasuredWay], batch: int, measured: int) -> dict[LocalWay, float]:
    return {one.way: one.rate(batch, measured=measured) for one in ways if not one.failed}


def _script_rates(resolved: Resolved[RunSettings], target: Target, cores: int) -> dict[LocalWay, float]:
    """Samples/s of a script, started with each way: first the usual ones, then chunks of the best."""
    rates: dict[LocalWay, float] = {}
    spent_s = 0.0
    batch = cores

    def take(way: LocalWay) -> None:
        nonlocal spent_s, batch
        if rates and spent_s > LIMIT_S:
            return
        try:
            step_s, samples = _few_steps(resolved, target, way)
        except EchelonError:
            if not rates:  # the script fails, or makes no steps: its run will say so
                raise
            return  # the script does not go with this way, such as chunks with batch normalisation
        spent_s += _SCRIPT_STEPS * step_s
        batch = samples
        rates[way] = samples / step_s

    for way in usual_ways(cores, 1 << 30):
        if way.processes <= batch or not rates:
            take(way)
    for way in refined(best_way(rates), batch):
        take(way)
    return rates


def _few_steps(resolved: Resolved[RunSettings], target: Target, way: LocalWay) -> tuple[float, int]:
    """The seconds of a step and its samples, from a run of the script that is ended soon."""
    settings = replace(
        resolved.settings,
        local="none",
        workers=way.processes,
        threads=way.threads_a_process,
        parallel=way.layout,
        pin="cores" if way.pinned else "none",
    )
    found = tried(settings, resolved.origins, target, _SCRIPT_STEPS)
    return found.step_s, found.samples


def _said(kept: KeptWay, cores: int, how: str) -> str:
    rate, usual = kept.rates[str(kept.way)], kept.rates.get(str(as_it_is(cores)))
    if kept.way == as_it_is(cores):
        others = [one for name, one in kept.rates.items() if name != str(kept.way)]
        beside = f", the next best way has {max(others):.0f}" if others else ""
        return f"--local auto: torch as it is, {kept.way}: {rate:.0f} samples/s{beside} ({how})"
    beside = f", torch as it is {usual:.0f}" if usual else ""
    return f"--local auto: {kept.way}: {rate:.0f} samples/s{beside} ({how})"
