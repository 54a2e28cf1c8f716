"""The first code of a check in a worker: install the probe, then run the script as `echelon run` would.

python -m echelon.start.worker -m echelon.check.worker FOLDER
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from types import TracebackType

from echelon.check import draws
from echelon.check.notes import read_request
from echelon.check.probe import Probe
from echelon.start import worker as launched


def main() -> None:
    """Run the request of the folder that the command line names."""
    folder = Path(sys.argv[1])
    request = read_request(folder)
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if workers == 1:  # alone, as without a launcher: scripts ask for these to know whether they are
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
    with Probe(folder, request, rank=rank, workers=workers):
        try:
            launched.run_program(request.program)
        except Exception as error:  # noqa: BLE001 - whatever the script raises is its own
            # As the interpreter would, without the frames of the check.
            sys.excepthook(type(error), error, of_script(error.__traceback__))
            sys.exit(1)


def of_script(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that is the script's: without the check before it and below it."""
    before = {__file__, launched.__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in before:
        trace = trace.tb_next
    frame = trace
    while frame is not None and frame.tb_next is not None:
        if frame.tb_next.tb_frame.f_code.co_filename == draws.__file__:
            frame.tb_next = None
        frame = frame.tb_next
    return trace


if __name__ == "__main__":
    main()
