"""A barrier that says who did not come: the first member waits for a message from each, and answers.

The others wait for that answer. So only the first member knows who is missing, as torch documents it. The
errors begin as those of torch's own barrier do, because scripts and tests look for these words.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from echelon.backend.letters import MOST_TAG, Letters
from echelon.comm.group import Group
from echelon.errors import EchelonError

_COME, _GO = MOST_TAG, MOST_TAG - 1  # tags that scripts do not use


def barrier(letters: Letters, group: Group, timeout_s: float, *, all_ranks: bool) -> None:
    """Wait for all members. `all_ranks`: name all that are missing, not only the first one."""
    until = time.monotonic() + timeout_s
    if group.rank:
        _answered(letters, group, until)
        return
    if timeout_s <= 0.0:
        raise dist.DistBackendError("Rank 0 timed out in monitoredBarrier after 0 ms")
    missing = []
    for rank in range(1, group.size):
        try:
            letters.receive(torch.zeros(1), rank, _COME)[1].wait(max(0.0, until - time.monotonic()))
        except EchelonError as error:
            missing.append(rank)
            if not all_ranks:
                raise _missing(group, missing, timeout_s) from error
    if missing:
        raise _missing(group, missing, timeout_s)
    for rank in range(1, group.size):
        letters.send(torch.zeros(1), rank, _GO).wait(max(1.0, until - time.monotonic()))


def _answered(letters: Letters, group: Group, until: float) -> None:
    try:
        letters.send(torch.zeros(1), 0, _COME).wait(max(0.0, until - time.monotonic()))
        letters.receive(torch.zeros(1), 0, _GO)[1].wait(max(0.0, until - time.monotonic()))
    except EchelonError as error:
        raise dist.DistBackendError(
            f"Rank {group.rank} successfully reached monitoredBarrier, but received errors while waiting "
            "for send/recv from rank 0: its log names the rank at fault"
        ) from error


def _missing(group: Group, ranks: list[int], timeout_s: float) -> dist.DistBackendError:
    names = f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    nodes = ", ".join(group.names[rank] for rank in ranks)
    return dist.DistBackendError(
        f"{names} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms ({nodes})"
    )
