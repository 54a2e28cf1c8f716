"""Tells torch.distributed about the backend.

torch loads the entry points of its group `torch.backends` when it is imported, and calls them; so the name
"echelon" works without any import. `autoload` is that entry point. At that time torch is not complete, and
most programs never use the backend: so it imports nothing but torch.distributed, and the process group's
class is imported when the first group is made.

torch is imported inside the functions: a program may import this file first, and torch, which that imports,
then looks for `autoload` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "echelon"


def register() -> None:
    """Register the backend; safe to call twice."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def autoload() -> None:
    """torch's entry point."""
    register()


def _create(made: Any, options: Any) -> dist.ProcessGroup:
    from echelon.backend.process_group import BackendProcessGroup

    return BackendProcessGroup(
        made.store,
        made.group_rank,
        made.group_size,
        made.timeout,
        group_id=str(made.group_id),
        global_ranks=tuple(made.global_ranks_in_group),
    )
