"""Ray starts the agents: on a cluster, in a program that already uses Ray, or on this machine.

Ray only finds places for workers and starts processes there. It reserves CPUs and GPUs for each worker, all
of them at once or none; gradients travel over Echelon's own connections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from echelon.cluster.machine import usable_cores
from echelon.errors import ConfigError, LaunchError
from echelon.start.agents.callback import Reception
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.agents.gather import gather, limit_cores
from echelon.start.engines.ray_job import RayJob
from echelon.start.engines.ray_session import RaySession, open_ray
from echelon.start.launcher import Launcher, Wanted

_WHERE = "--on ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray(Launcher):
    """Actors of Ray, on its cluster: the program's own, at an address, or one on this machine."""

    name: ClassVar[str] = "ray"
    address: str = ""  # host:port, auto or local; default: RAY_ADDRESS, a Ray that runs here, or a new one
    cpus: float = 1  # for each worker, which also uses so many threads
    gpus: int = 0  # for each worker
    runtime_env: str = ""  # Ray's environment of the workers: a file, or its text, in YAML or JSON

    def __post_init__(self) -> None:
        if self.cpus < 0 or self.gpus < 0 or not (self.cpus or self.gpus):
            raise ConfigError("a worker needs a CPU or a GPU", where=_WHERE, fix="ray(cpus=1)")

    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """One actor for each worker."""
        if wanted.hosts:
            raise ConfigError("Ray knows its machines itself", where="--hosts", fix="leave --hosts out")
        runtime_env = read_runtime_env(self.runtime_env)
        each = {"CPU": self.cpus, "GPU": float(self.gpus)}
        each = {name: amount for name, amount in each.items() if amount}
        least = max(usable_cores(), math.ceil(self.cpus * wanted.workers))
        session = open_ray(self.address, least)
        try:
            count = _count(session, wanted.workers, each)
            reception = Reception(wanted.timeout_s, wanted.env)
        except BaseException:
            session.close()
            raise
        try:
            invitations = [reception.invitation(order=at) for at in range(count)]
            job = RayJob(session, invitations, each, runtime_env)
        except BaseException as error:
            reception.close()
            session.close()
            if isinstance(error, Exception):
                raise LaunchError(f"Ray does not start actors: {error}", where=_WHERE) from error
            raise
        agents = gather(reception, job, count, engine="ray", timeout_s=wanted.timeout_s)
        if not session.is_own:
            limit_cores(agents, max(1, int(self.cpus)))
        return agents


def _count(session: RaySession, workers: int, each: Mapping[str, float]) -> int:
    """How many workers there will be; raises LaunchError if the cluster can never have room for them."""
    alive = [node for node in session.ray.nodes() if node["Alive"]]
    nodes = {node["NodeManagerHostname"]: node["Resources"] for node in alive}
    there = slots((node["Resources"] for node in alive), each)
    count = workers or there
    if count > there or not count:
        needs = " and ".join(f"{amount:g} {name}" for name, amount in each.items())
        have = "; ".join(
            f"{name} has " + " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in each)
            for name, resources in nodes.items()
        )
        raise LaunchError(
            f"{max(count, 1)} worker{'s' if count > 1 else ''} of {needs} each do not fit the Ray cluster, "
            f"which has room for {there} ({have})",
            where=_WHERE,
            fix="start fewer workers, reserve less for each, as in ray(cpus=0.5), or add nodes",
        )
    return count


def slots(nodes: Iterable[Mapping[str, float]], each: Mapping[str, float]) -> int:
    """How many workers nodes with these resources have room for, if nobody else uses them."""
    tolerance = 1e-6  # Ray counts in steps of 0.0001
    return sum(
        min(math.floor(resources.get(name, 0.0) / amount + tolerance) for name, amount in each.items())
        for resources in nodes
    )


def read_runtime_env(text: str) -> dict[str, Any] | None:
    """The runtime environment that a file or a text describes; None if there is none."""
    if not text:
        return None
    try:
        import yaml  # a dependency of Ray's

        path = Path(text).expanduser()
        read = yaml.safe_load(path.read_text() if "{" not in text and path.is_file() else text)
    except ImportError as error:
        raise LaunchError(
            f"YAML cannot be read: {error}", where=_WHERE, fix='pip install "echelon[ray]"'
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"runtime_env cannot be read: {error}", where=_WHERE) from error
    if not isinstance(read, dict):
        raise ConfigError(
            f"runtime_env {text!r} is neither a file nor a mapping",
            where=_WHERE,
            fix="""ray(runtime_env=env.yaml), or ray(runtime_env='{"pip": ["name"]}')""",
        )
    return read
