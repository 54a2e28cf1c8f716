"""Train PyTorch models on the machines you have: unequal, joined by unequal links, not always there.

    import echelon

    session = echelon.join()
    model, optimizer, loader = session.prepare(model, optimizer, loader)

Run the script alone, with `echelon run --workers 4 train.py`, or with any launcher that sets RANK and
WORLD_SIZE. The names below are all that is public.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from echelon.errors import (
    CheckpointError,
    ConfigError,
    Corrupt,
    DataError,
    EchelonError,
    GradientError,
    JoinTimeout,
    LabError,
    LaunchError,
    ModelError,
    PeerLost,
    RoundTimeout,
    StaleView,
    UnknownName,
    WorkerError,
)

if TYPE_CHECKING:
    from echelon.train.join import join
    from echelon.train.session import Session

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Corrupt",
    "DataError",
    "EchelonError",
    "GradientError",
    "JoinTimeout",
    "LabError",
    "LaunchError",
    "ModelError",
    "PeerLost",
    "RoundTimeout",
    "Session",
    "StaleView",
    "UnknownName",
    "WorkerError",
    "join",
]

# These need torch, which takes seconds to import: `echelon --help` must not wait for it.
_LAZY = {"join": "echelon.train.join", "Session": "echelon.train.session"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")
