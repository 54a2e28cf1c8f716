"""A run by a plan's file: is the file right for this place, and what does it decide?

Precedence: default < settings file < plan < command line. The command line may choose another codec,
collective, sync policy and so on; who takes part, and with which share, only the file says, so options for
that are refused by name.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from echelon.cluster.delay import DELAYS
from echelon.cluster.lab.spec import LabSpec
from echelon.codec.codec import CODECS
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.config.choices import CHOICES, flag
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.config.toml_text import read_toml
from echelon.errors import ConfigError
from echelon.plan.check_file import PlanSurroundings, contradictions, listed
from echelon.plan.plan import Plan, WorkerPlan
from echelon.plan.plan_file import parse_plan
from echelon.start.hosts import Host, read_hosts
from echelon.sync.policy import POLICIES
from echelon.train.checks import needs_parameter_servers

S = TypeVar("S", bound=RunSettings)
HERE = "worker-"
"""A plan for several workers of one machine names them worker-0, worker-1, ..."""

NO_PLAN = "none"
"""`--plan none`: a run makes no plan by itself."""

_MOST_HERE = 256
_ONLY_THE_FILE = ("workers", "shares", "speed", "delay", "delayed", "groups", "servers", "colocate_servers")


def read_plan_file(file: str) -> str:
    """The text of a plan's file."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(
            f"cannot read the plan: {reason}", where=file, fix="make one with echelon plan -o plan.toml"
        ) from None


def checked_plan(file: str, around: PlanSurroundings) -> Plan:
    """The plan of a file; one ConfigError lists everything that contradicts itself or the place."""
    text = read_plan_file(file)
    found = contradictions(text, around)
    if found:
        raise listed(found, file)
    try:
        return parse_plan(text)
    except ConfigError as error:  # a value out of its range
        raise ConfigError(f"the plan is wrong: {error.message}", where=file, fix=error.fix) from None


def in_order_of_plan(resolved: Resolved[S]) -> Resolved[S]:
    """The settings with the hosts that the plan uses, in its order: rank 0's machine comes first."""
    settings = resolved.settings
    if not settings.plan or not settings.hosts:
        return resolved
    hosts = {host.name: host.slots for host in read_hosts(settings.hosts)}
    around = replace(strategies(), place="--hosts", nodes={name: float(n) for name, n in hosts.items()})
    plan = checked_plan(settings.plan, around)
    used = Counter(worker.node for worker in plan.workers)
    for node in plan.servers:
        used.setdefault(node, 0)
    text = ",".join(_host_text(Host(name, max(1, slots))) for name, slots in used.items())
    return Resolved(replace(settings, hosts=text), resolved.origins)


def strategies() -> PlanSurroundings:
    """Checks of the names of strategies, for any place."""
    return PlanSurroundings(
        strategies={
            "collective": COLLECTIVES.build,
            "codec": CODECS.build,
            "sync": POLICIES.build,
            "delay": DELAYS.build,
        },
        with_servers=lambda text: needs_parameter_servers(POLICIES.build(text).resolved()),
    )


def surroundings(spec: LabSpec | None, machines: Sequence[str]) -> PlanSurroundings:
    """What a run knows about its place: a lab, other machines, or this one."""
    if spec is not None:
        place, nodes = f"lab {spec.name}", {node.name: float("inf") for node in spec.nodes}
    elif machines:
        place, nodes = "--hosts", {name: float(count) for name, count in Counter(machines).items()}
    else:
        place = "this machine (give --lab or --hosts)"
        host = socket.gethostname()
        nodes = {host: float("inf")}
        for at in range(_MOST_HERE):
            nodes |= {f"{HERE}{at}": 1.0, f"{host}-{at}": 1.0}  # a probe names workers by host and number
    return replace(strategies(), place=place, nodes=nodes)


def by_plan(
    resolved: Resolved[S],
    spec: LabSpec | None,
    machines: Sequence[str],
    *,
    threads_on: Mapping[str, int],
    cores: int,
) -> tuple[Resolved[S], Plan]:
    """The plan of the settings' file, and settings that agree with it.

    `machines` are the other machines of all places for workers, if any; `threads_on` is how many threads a
    worker there gets if neither the file nor the command line says it, `cores` what this machine has.
    """
    settings = resolved.settings
    file = settings.plan or ""
    plan = checked_plan(file, surroundings(spec, machines))
    values = read_toml(read_plan_file(file))
    _refuse(resolved, plan, file)
    each = 1 if spec is not None else max(1, cores // len(plan.workers))
    default = {worker.rank: threads_on.get(worker.node, each) for worker in plan.workers}
    plan = replace(
        plan,
        workers=_workers(plan, values, settings, default, local=spec is None and not machines),
        reasons={**plan.reasons, "plan": f"as {file} says"},
        **_choices(resolved, plan, values),
    )
    settings = replace(
        settings,
        workers=len(plan.workers),
        shares="auto" if plan.adapt_shares else ",".join(f"{weight:g}" for weight in plan.weights),
        groups=";".join(",".join(map(str, group)) for group in plan.groups) or None,
        servers=len(plan.servers),
        **plan.chosen(),
    )
    settings, plan = _batch(settings, plan, chosen=resolved.origins.get("batch") == "command line")
    return Resolved(settings, resolved.origins), plan


def _refuse(resolved: Resolved[S], plan: Plan, file: str) -> None:
    """Refuse options that contradict what only the file may say."""
    same = {"workers": len(plan.workers), "servers": len(plan.servers)}
    for name in _ONLY_THE_FILE:
        asked = getattr(resolved.settings, name)
        if resolved.origins.get(name) == "command line" and asked != same.get(name):
            raise ConfigError(
                f"{flag(name)} {asked} is not what the plan {file} says"
                if name in same
                else f"{flag(name)} is for runs without a plan: {file} says who does how much",
                where=flag(name),
                fix=f"leave it out, or change {file}",
            )


def _workers(
    plan: Plan,
    values: Mapping[str, Any],
    settings: RunSettings,
    default: Mapping[int, int],
    *,
    local: bool,
) -> tuple[WorkerPlan, ...]:
    """The workers with their threads; on this machine, with its name."""
    said = {
        worker.get("rank", at): worker["threads"]
        for at, worker in enumerate(values["workers"])
        if "threads" in worker
    }
    host = socket.gethostname()
    return tuple(
        replace(
            worker,
            threads=settings.threads or said.get(worker.rank, default[worker.rank]),
            node=host if local else worker.node,
        )
        for worker in plan.workers
    )


def _choices(resolved: Resolved[S], plan: Plan, values: Mapping[str, Any]) -> dict[str, Any]:
    """The command line's choices, else the file's, else those of the settings."""
    return {
        name: getattr(plan, name)
        if name in values and resolved.origins.get(name) != "command line"
        else getattr(resolved.settings, name)
        for name in CHOICES
    }


def _batch(settings: S, plan: Plan, *, chosen: bool) -> tuple[S, Plan]:
    """The batch of the plan, unless the command line has another: then shares keep their proportions."""
    if plan.batch is None or not isinstance(settings, TrainSettings):
        return settings, plan
    if not chosen:
        return replace(settings, batch=plan.batch), plan
    if settings.batch == plan.batch:
        return settings, plan
    return settings, replace(plan, batch=None, predicted=None, predicted_step_s=None)


def _host_text(host: Host) -> str:
    return f"[{host.name}]:{host.slots}" if ":" in host.name else f"{host.name}:{host.slots}"
