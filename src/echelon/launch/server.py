"""A process that only sums for the workers: `echelon run --servers N` starts some.

    python -m echelon.launch.worker -m echelon.launch.server

It meets the workers, serves until the leader has left, and ends.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from echelon.comm.engine import Engine
from echelon.comm.place import Place
from echelon.comm.rendezvous import meet
from echelon.comm.serving import serve
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan


def main() -> None:
    """Serve the run that ECHELON_RUN names."""
    place = Place.from_environment(os.environ)
    plan = Plan.read(RunFolder(Path(os.environ["ECHELON_RUN"])).plan)
    meeting = meet(
        place,
        node=plan.servers[place.rank - place.world_size],
        host=socket.gethostname(),
        pid=os.getpid(),
        timeout_s=plan.join_timeout_s,
    )
    engine = Engine.connect(
        meeting,
        place,
        shared_memory=False,
        deadline_s=plan.round_timeout_s,
        timeout_s=plan.join_timeout_s,
    )
    try:
        serve(
            engine.loop,
            rank=place.rank,
            workers=place.world_size,
            servers=place.servers,
            deadline_s=plan.round_timeout_s,
        )
    finally:
        engine.loop.close()


if __name__ == "__main__":
    main()
