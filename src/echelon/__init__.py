"""Train PyTorch models on the machines you have: unequal in speed, joined by unequal links.

    import echelon

    session = echelon.join()
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

Run the script alone, with `echelon run --workers 4 train.py`, or with any launcher that sets RANK and
WORLD_SIZE.

    join             become a worker of a run: help(echelon.join)
    launch           run a function on several workers, here or elsewhere: help(echelon.launch)
    Session          what `join` returns; the script trains, records and saves through it:
                     help(echelon.Session)

    register_optimizer  let parameter servers use an optimizer of your own: help(echelon.register_optimizer)
    loader_of        a Spark DataFrame, a Ray Dataset or another table as a loader: help(echelon.loader_of)

    EchelonError     base of all errors; each says what is wrong, where, and what fixes it
      ConfigError    a wrong name, value or combination; UnknownName names the nearest known one
      DataError      a data set is missing, damaged or too small
      ModelError     a model cannot be prepared, or models differ between workers
      CheckpointError, LaunchError, LabError, PlanError
                     a checkpoint, the start of workers, an emulated cluster, a job that fits no machine
      WorkerError    a failure of another worker: JoinTimeout, PeerLost, RoundTimeout, MismatchedCalls,
                     Corrupt, GradientError, StaleView, FunctionFailed; `ranks` says which
"""

from __future__ import annotations

import typing as _typing
from importlib import import_module as _import_module

from echelon.errors import CheckpointError as CheckpointError
from echelon.errors import ConfigError as ConfigError
from echelon.errors import Corrupt as Corrupt
from echelon.errors import DataError as DataError
from echelon.errors import EchelonError as EchelonError
from echelon.errors import FunctionFailed as FunctionFailed
from echelon.errors import GradientError as GradientError
from echelon.errors import JoinTimeout as JoinTimeout
from echelon.errors import LabError as LabError
from echelon.errors import LaunchError as LaunchError
from echelon.errors import MismatchedCalls as MismatchedCalls
from echelon.errors import ModelError as ModelError
from echelon.errors import PeerLost as PeerLost
from echelon.errors import PlanError as PlanError
from echelon.errors import RoundTimeout as RoundTimeout
from echelon.errors import StaleView as StaleView
from echelon.errors import UnknownName as UnknownName
from echelon.errors import WorkerError as WorkerError

if _typing.TYPE_CHECKING:
    from echelon.data.loader_of import loader_of as loader_of
    from echelon.server.optimizer_spec import register_optimizer as register_optimizer
    from echelon.start.function import launch as launch
    from echelon.train.join import join as join
    from echelon.train.session import Session as Session

__version__ = "0.1.0"

# What `help(echelon)` prints in full. `dir(echelon)` has the errors too, which all are public as well.
__all__ = ["Session", "join", "launch", "loader_of", "register_optimizer"]

# These need torch, which takes seconds to import: `echelon --help` must not wait for it.
_LAZY = {
    "join": "echelon.train.join",
    "launch": "echelon.start.function",
    "loader_of": "echelon.data.loader_of",
    "register_optimizer": "echelon.server.optimizer_spec",
    "Session": "echelon.train.session",
}


def __getattr__(name: str) -> _typing.Any:
    if name in _LAZY:
        return getattr(_import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")


def __dir__() -> list[str]:
    errors = [name for name, value in globals().items() if isinstance(value, type)]
    return sorted([*errors, *_LAZY])
