"""What did an earlier run of the same script on the same machines leave? Its job, in the cache.

The key holds the script's text, its arguments, and what `echelon train` trains: if one of them changes, it
is another job. A run of a module has none, because its text is not known without importing it. Nothing here
ends a run: what cannot be read or written is as if it were not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from echelon.cluster import probe_cache
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import EchelonError
from echelon.observe.run_folder import RunFolder
from echelon.plan.cluster_file import ClusterFile, read_cluster, write_cluster
from echelon.plan.plan import Plan
from echelon.simulate.recorded_cluster import recorded_run

_TRAINED = ("model", "data", "batch", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptJob:
    """What is trained: the part of a cache's key that does not depend on machines."""

    text: str

    def key(self, plan: Plan) -> str:
        """With the machines, in any order, and the threads of their workers."""
        where = ", ".join(sorted(f"{worker.node} {worker.threads}" for worker in plan.workers))
        return f"job of {self.text}; on {where}"


def script_job(settings: RunSettings, argv: Sequence[str]) -> ScriptJob | None:
    """What these arguments train; None if that cannot be told."""
    if isinstance(settings, TrainSettings):
        return ScriptJob(text=", ".join(f"{name} {getattr(settings, name)}" for name in _TRAINED))
    if not argv or argv[0].startswith("-"):
        return None
    try:
        script = Path(argv[0]).read_bytes()
    except OSError:
        return None
    return ScriptJob(text=f"script {xxhash.xxh64_hexdigest(script)} {list(argv[1:])}")


def keep_job(job: ScriptJob, plan: Plan, folder: RunFolder) -> None:
    """Keep what a completed run shows of its job, if every worker took part in every step."""
    if len(plan.workers) < 2 or plan.sync != "full" or plan.codec != "none" or plan.servers:
        return
    if any(worker.speed != 1 or worker.delay for worker in plan.workers):
        return  # emulated
    if probe_cache.cached(job.key(plan), within_s=probe_cache.LINKS_AGE_S) is not None:
        return  # as good as new; a long record takes a while to read
    try:
        found = recorded_run(folder)
    except (EchelonError, ArithmeticError, LookupError, ValueError):  # too short, or damaged
        return
    probe_cache.keep(job.key(plan), write_cluster(found.topology, found.job))


def known_job(job: ScriptJob, plan: Plan) -> tuple[ClusterFile | None, str]:
    """What an earlier run left, and a sentence if that cannot be used."""
    entry = probe_cache.cached(job.key(plan), within_s=probe_cache.COMPUTE_AGE_S)
    if entry is None:
        return None, ""
    try:
        found = read_cluster(entry.text, "cache")
    except EchelonError as error:
        probe_cache.forget(job.key(plan))
        return None, f"what an earlier run left in the cache cannot be read: {error.message}"
    return (found, "") if found.job is not None else (None, "")
