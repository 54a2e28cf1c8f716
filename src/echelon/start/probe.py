"""A whole probe: start a worker on every node, let them measure, say what was found.

It starts workers as a run does, so it works wherever a run does: here, in a lab, on other machines. A
machine that does not answer is left out and named, if others are left.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from echelon.cluster import probe_cache
from echelon.cluster.lab.spec import read_lab
from echelon.config.resolve import resolve
from echelon.config.schema import RunSettings
from echelon.config.units import show_seconds
from echelon.errors import EchelonError, FunctionFailed, LaunchError
from echelon.observe.run_folder import RunFolder
from echelon.plan.cluster_file import write_cluster
from echelon.plan.plan import Plan
from echelon.start.doctor import MachinesAsked, check_machines
from echelon.start.function import QuietWatcher, call_on_workers
from echelon.start.hosts import Host, read_hosts
from echelon.start.known_links import cluster_key, place_of
from echelon.start.probe_result import Probed, conclude
from echelon.train.probe_job import (
    COMPUTE_LIMIT_S,
    LINKS_LIMIT_S,
    PROGRESS,
    ModelAsked,
    NodeProbe,
    ProbeRequest,
    probe_worker,
)
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAsked:
    """Which machines, and which job.

    model   a model of the zoo for samples of `data`; empty: a fixed small step is timed
    fresh   measure what the cache has, too
    links_limit_s  when the last measurement of links begins
    """

    workers: int | None = None
    on: str = "local"
    hosts: str | None = None
    lab: str | None = None
    threads: int | None = None
    model: str = ""
    data: str = "digits"
    batch: int = 64
    optimizer: str = "sgd"
    fresh: bool = False
    timeout_s: float = 60.0
    links_limit_s: float = LINKS_LIMIT_S

    @property
    def bound_s(self) -> float:
        """About how long measuring takes at most, once workers are connected."""
        return self.links_limit_s + COMPUTE_LIMIT_S + 0.5


def probe(asked: ProbeAsked, say: Say) -> Probed:
    """Measure; `say` is told what is going on."""
    begun = time.monotonic()
    request = _request(asked)
    left_out: dict[str, str] = {}
    try:
        found = _carried_out(asked, request, say)
    except (LaunchError, FunctionFailed) as error:
        hosts = _answering(asked, error, left_out, say)
        found = _carried_out(replace(asked, hosts=_text(hosts)), request, say)
    probed = conclude(found, known=_known(asked), left_out=left_out)
    key = cluster_key(asked, [each.node for each in found])
    probe_cache.keep(key, write_cluster(probed.topology, probed.job))
    return replace(probed, total_s=time.monotonic() - begun)


def _request(asked: ProbeAsked) -> ProbeRequest:
    """What the workers are asked; the model and its data are checked before any of them starts."""
    model = None
    if asked.model:
        kind = MODELS.build(asked.model, where="--model")
        sample = DATASETS.build(asked.data, where="--data").load().spec
        with torch.device("meta"):  # a model that does not fit here may fit there
            kind.build(sample)
        model = ModelAsked(model=asked.model, sample=sample, batch=asked.batch, optimizer=asked.optimizer)
    limited = read_lab(asked.lab).nodes if asked.lab else ()
    quotas = {node.name: node.cpu for node in limited if node.cpu is not None}
    return ProbeRequest(
        model=model,
        quotas=quotas,
        links_key=place_of(asked),
        fresh=asked.fresh,
        links_limit_s=asked.links_limit_s,
    )


def _carried_out(asked: ProbeAsked, request: ProbeRequest, say: Say) -> list[NodeProbe]:
    """Run the workers. Their record is removed, unless one of them failed."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-probe-"))
    given = {
        "workers": asked.workers,
        "on": asked.on,
        "hosts": asked.hosts,
        "lab": asked.lab,
        "threads": asked.threads,
        "transport": "tcp",
        # Whatever the configuration says of training: a probe has nothing to do with it.
        "sync": "full",
        "codec": "none",
        "collective": "auto",
        "servers": 0,
        "replicas": 0,
        "shares": "equal",
        "runs": str(folder),
        "name": "probe",
        "join_timeout_s": asked.timeout_s,
        "round_timeout_s": asked.timeout_s,
    }
    resolved = resolve(RunSettings, {name: value for name, value in given.items() if value is not None})
    found = call_on_workers(probe_worker, (request,), {}, resolved, _ProbeWatcher(say))
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _answering(asked: ProbeAsked, error: EchelonError, left_out: dict[str, str], say: Say) -> list[Host]:
    """The machines that answer, with the others in `left_out`; raises the error if it is another one."""
    hosts = read_hosts(asked.hosts) if asked.hosts else []
    if len(hosts) < 2:
        raise error
    say(f"{error.message}; finding out which machines answer")
    on = "ssh" if asked.on == "local" else asked.on
    checked = check_machines(MachinesAsked(on=on, hosts=hosts, timeout_s=min(asked.timeout_s, 30.0)), say)
    for finding in checked.findings:
        if finding.level == "problem" and finding.topic not in checked.descriptions:
            left_out.setdefault(finding.topic, finding.text)
    there = [host for host in hosts if host.name in checked.descriptions]
    for host in hosts:
        if host not in there:
            left_out.setdefault(host.name, "it did not answer")
    if not there or not left_out:
        raise error
    return there


def _text(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _known(asked: ProbeAsked) -> str:
    where = f" in lab {Path(asked.lab).stem}" if asked.lab else ""
    return f"measured by echelon probe{where} on {time.strftime('%Y-%m-%d %H:%M')}"


class _ProbeWatcher(QuietWatcher):
    """Says what the leader says, and what a lab's notes are."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._rest = ""

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        count = len(plan.workers)
        self._say(f"starting {count} worker{'s' if count > 1 else ''}")
        for note in notes:
            self._say(f"note: {note}")

    def joined(self, seconds: float) -> None:
        self._say(f"all joined after {show_seconds(seconds)}")

    def output(self, data: bytes) -> None:
        """The leader's progress lines; what else it prints is not shown."""
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        for line in lines:
            if line.startswith(PROGRESS):
                self._say(line.removeprefix(PROGRESS))
