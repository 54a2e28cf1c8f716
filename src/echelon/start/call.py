"""What a worker runs if it was given a function, and not a script: call it, and write down what it returns.

    python -m echelon.start.worker -m echelon.start.call

The run's folder has the pickled call. It comes from the user's own program, like a script does. What the
function returns or raises is pickled into `results/`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from echelon.errors import LaunchError
from echelon.observe.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What came of the call on one worker."""

    value: Any = None
    error: BaseException | None = None


def packed(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call as bytes. Raises LaunchError if it cannot be pickled."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        call = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:
        raise LaunchError(
            f"the call of {name} cannot be pickled: {error}",
            where="launch",
            fix="make what cannot be pickled (open files, locks, connections) inside of the function",
        ) from error
    # Modules beside the user's program are found there by the same path.
    return pickle.dumps((list(sys.path), call))


def main() -> None:
    """Carry out the call of this worker's run."""
    folder = RunFolder(Path(os.environ["ECHELON_RUN"]))
    rank = int(os.environ["RANK"])
    path, call = pickle.loads(folder.call.read_bytes())
    sys.path += [entry for entry in path if entry not in sys.path]
    try:
        function, args, kwargs = pickle.loads(call)
    except Exception as error:
        raise LaunchError(
            f"the call cannot be unpickled: {type(error).__name__}: {error}",
            where=f"rank {rank}",
            fix="install the module on this machine too, or send the Python files along with copy=True",
        ) from error
    try:
        value = function(*args, **kwargs)
    except Exception as error:
        _keep(folder, rank, Returned(error=error))
        raise
    if not _keep(folder, rank, Returned(value=value)):
        raise LaunchError(
            f"what the function returned cannot be pickled: {type(value).__name__}",
            where=f"rank {rank}",
            fix="return plain values or tensors",
        )


def _keep(folder: RunFolder, rank: int, returned: Returned) -> bool:
    try:
        data = cloudpickle.dumps(returned)
    except Exception:  # noqa: BLE001 - an object's own code runs here
        return False
    path = folder.result_of(rank)
    path.with_suffix(".tmp").write_bytes(data)
    path.with_suffix(".tmp").rename(path)
    return True


if __name__ == "__main__":
    # Under its own name: the launcher has to know the class of what is pickled.
    from echelon.start.call import main as carry_out

    carry_out()
