"""What does a run's `cluster.toml` add to its record? The links that were measured, and the model's layers.

The leader writes that file after the first steps (`train/profiling.py`). What a lab's file told about links
stays, because it is exact; otherwise the measured sites and links are used. Layers replace the record's
buckets, if they are the same gradients. Speeds and costs are those of all recorded steps.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.errors import ConfigError
from echelon.observe.follow import read_run
from echelon.observe.run_folder import RunFolder
from echelon.plan.cluster_file import ClusterFile, read_cluster
from echelon.plan.plan import Plan
from echelon.plan.topology import Topology
from echelon.simulate.recorded_job import RecordedJob, recorded_job

_SAME = 0.1  # sizes of gradients that differ by less than this part are the same


def recorded_run(folder: RunFolder) -> RecordedJob:
    """What a run's folder shows: its events, its plan, and its `cluster.toml` if there is one."""
    plan = Plan.read(folder.plan)
    found = recorded_job(read_run(folder), plan, name=folder.name)
    if not folder.cluster.is_file():
        return found
    try:
        cluster = read_cluster(folder.cluster.read_text(encoding="utf-8"), str(folder.cluster))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        note = f"the run's cluster.toml cannot be read, and is not used: {error}".splitlines()[0]
        return replace(found, notes=(*found.notes, note))
    told = any(worker.link for worker in plan.workers) or bool(plan.uplinks)
    return with_cluster(found, cluster, links_told=told)


def with_cluster(found: RecordedJob, cluster: ClusterFile, *, links_told: bool) -> RecordedJob:
    """The record with what was measured in the first steps."""
    topology = found.topology
    names = [node.name for node in topology.nodes]
    if not links_told and sorted(names) == sorted(node.name for node in cluster.topology.nodes):
        nodes = tuple(
            replace(cluster.topology.node(name), speed=topology.node(name).speed) for name in names
        )
        known = "what the workers measured, in the run's cluster.toml"
        topology = Topology(nodes=nodes, uplinks=cluster.topology.uplinks, known=known)
    job, profiled = found.job, cluster.job
    if profiled is not None and _same(profiled.gradient_bytes, job.gradient_bytes):
        job = replace(
            job,
            layers=profiled.layers,
            exchanges=profiled.exchanges,
            base_bytes=profiled.base_bytes,
            sample_bytes=profiled.sample_bytes,
        )
    return replace(found, topology=topology, job=job)


def _same(one_bytes: float, other_bytes: float) -> bool:
    return abs(one_bytes - other_bytes) <= _SAME * max(one_bytes, other_bytes)
