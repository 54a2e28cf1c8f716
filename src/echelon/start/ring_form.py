"""What does `--sync flexible` mean where there is no server? Rounds of members that are not slow.

With a server, `flexible` leaves a slow worker out of rounds, and the worker goes on with its own weights.
Without one, the members of the ring are chosen in the same way: gradients are reduced as with `full`, and a
worker that its detector finds slow is left out between two steps (`--leave-out`), until it is well. So
every step is exact for its members, and every sample is in one step; what a worker computes while it is out
is dropped.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings
from echelon.errors import ConfigError
from echelon.membership.slow import NOBODY
from echelon.sync.policies.flexible import Flexible
from echelon.sync.policy import POLICIES


def in_ring_form(resolved: Resolved[RunSettings], workers: int) -> tuple[Resolved[RunSettings], list[str]]:
    """The settings that carry out `flexible` without a server, and a note; others stay as they are."""
    settings = resolved.settings
    here = settings.on == "local" and not settings.hosts
    if settings.servers or settings.plan or not here or workers < 2:
        return resolved, []
    policy = POLICIES.build(settings.sync, where="--sync")
    if not isinstance(policy, Flexible):
        return resolved, []
    if policy.transfer:
        raise ConfigError(
            "transfers of one worker can be judged only at a server",
            where=f"--sync {settings.sync}",
            fix="leave transfer out, or start a server with --servers 1",
        )
    if settings.leave_out != NOBODY and settings.leave_out != policy.detector:
        raise ConfigError(
            f"--leave-out {settings.leave_out} and --sync {settings.sync} both say who is slow",
            where="--leave-out",
            fix="give one of them; --sync full --leave-out DETECTOR does the same",
        )
    fewest = settings.min_workers if settings.min_workers is not None else (workers + 1) // 2
    made = replace(settings, sync="full", leave_out=policy.detector, min_workers=fewest)
    note = (
        f"sync {policy.name} without servers: a slow worker is left out between two steps, as with "
        f"--sync full --leave-out {policy.detector} --min-workers {fewest}"
    )
    return Resolved(made, resolved.origins), [note]
