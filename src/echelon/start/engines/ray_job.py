"""The agents of a run as actors of Ray: one in each bundle of a placement group.

An actor's only work is to run an agent as its child and to wait for it. Ray kills the actors when the
program that started them ends, when the placement group is removed, or when it loses a node; an agent dies
with its actor, and workers with their agent. No actor is started again: a worker's death ends the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from echelon.start.agents.callback import Invitation, host_and_tell
from echelon.start.engines.ray_session import RaySession, try_for_a_while

_MOST_TEXT = 2000
_DEVICES = "CUDA_VISIBLE_DEVICES"
_GET_S = 5.0


class AgentHost:
    """The actor: one for each worker."""

    def devices(self) -> tuple[str, str]:
        """The node, and the GPUs there that Ray has given to this actor."""
        import ray

        return ray.get_runtime_context().get_node_id(), os.environ.get(_DEVICES, "")

    def host(self, text: str) -> str:
        """Run the agent until it ends; returns what went wrong, if anything."""
        return host_and_tell(text)


class RayJob:
    """Actors that run agents, for as long as the run lasts."""

    def __init__(
        self,
        session: RaySession,
        invitations: Sequence[Invitation],
        each: Mapping[str, float],
        runtime_env: Mapping[str, Any] | None,
    ) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._session = session
        self._ray = session.ray
        self._invitations = list(invitations)
        self._each = dict(each)
        self._tasks: list[Any] = []  # what `host` will return, by slot; empty before it is called
        self._devices: list[Any] = []
        self._hosts: list[Any] = []
        self._ended: str | None = None
        self._group = placement_group([dict(each)] * len(invitations), strategy="PACK")
        try:
            kind = self._ray.remote(AgentHost)
            for at in range(len(invitations)):
                options = {
                    "num_cpus": each.get("CPU", 0),
                    "num_gpus": each.get("GPU", 0),
                    "max_restarts": 0,
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(
                        self._group, placement_group_bundle_index=at
                    ),
                }
                if runtime_env:
                    options["runtime_env"] = dict(runtime_env)
                self._hosts.append(kind.options(**options).remote())
            if each.get("GPU"):
                self._devices = [host.devices.remote() for host in self._hosts]
            else:
                self._invite(self._invitations)
        except BaseException:
            self.end()
            raise

    def waiting_for(self) -> str:
        """Free resources, or actors that are starting."""
        if self._is_placed():
            return "actors are starting"
        free, total = self._ray.available_resources(), self._ray.cluster_resources()
        count = len(self._invitations)
        return "; ".join(
            f"{count * need:g} {name}s are needed, {free.get(name, 0):g} of {total.get(name, 0):g} are free"
            for name, need in self._each.items()
        )

    def why_ended(self) -> str | None:
        """The first thing that went wrong with an actor, or that all have ended."""
        if self._ended is None:
            self._ended = self._looked()
        return self._ended

    def end(self) -> None:
        """End all actors, and give the resources back."""
        if self._ended is None:
            self._ended = "the run has ended"
        if self._ray.is_initialized():
            try_for_a_while(self._release)
        self._hosts = []
        self._session.close()

    def _release(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for host in self._hosts:
            with contextlib.suppress(Exception):
                self._ray.kill(host)
        remove_placement_group(self._group)

    def _invite(self, invitations: Sequence[Invitation]) -> None:
        self._tasks = [
            host.host.remote(invitation.encode())
            for host, invitation in zip(self._hosts, invitations, strict=True)
        ]

    def _looked(self) -> str | None:
        if not self._tasks:
            done, problem = self._results(self._devices)
            if problem or len(done) < len(self._devices):
                return problem
            self._invite(with_devices(self._invitations, [tuple(one) for one in done]))
        done, problem = self._results(self._tasks)
        told = problem or next((text for text in done if text), None)
        if told is None and len(done) == len(self._tasks):
            return "all its actors have ended"
        return told

    def _results(self, references: Sequence[Any]) -> tuple[list[Any], str | None]:
        """The values that are there, and the first error."""
        ready, _ = self._ray.wait(list(references), num_returns=len(references), timeout=0)
        values = []
        for reference in ready:
            try:
                values.append(self._ray.get(reference, timeout=_GET_S))
            except (self._ray.exceptions.RayError, OSError) as error:
                return values, reason_of(error)
        return values, None

    def _is_placed(self) -> bool:
        from ray.util.placement_group import placement_group_table

        return bool(placement_group_table(self._group).get("state") == "CREATED")


def with_devices(invitations: Sequence[Invitation], places: Sequence[tuple[str, str]]) -> list[Invitation]:
    """Each invitation with all GPUs that the run has on that node: a worker takes its own by LOCAL_RANK.

    `places` are the node and the GPUs of each slot.
    """
    on_node: dict[str, list[str]] = {}
    for node, devices in places:
        on_node.setdefault(node, []).extend(device for device in devices.split(",") if device)
    return [
        msgspec.structs.replace(
            invitation, env={**invitation.env, _DEVICES: ",".join(dict.fromkeys(on_node[node]))}
        )
        for invitation, (node, _) in zip(invitations, places, strict=True)
    ]


def reason_of(error: Exception) -> str:
    """What Ray's error says, on one line: the cause in an actor rather than Ray's own words about it."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return f"{type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MOST_TEXT]
