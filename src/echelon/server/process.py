"""What a server's process does: it meets the workers, serves until they have left, and ends.

    python -m echelon.start.worker -m echelon.server.process

is what `echelon run --servers N` starts. Under another launcher `join` calls `serve` in the processes that
are to be servers. At the rendezvous the leader says what the server does: sum gradients for the collectives
(sync full), or be a parameter server.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous, meet
from echelon.comm.open import open_server
from echelon.comm.wire.loop import Loop
from echelon.comm.wire.mailbox import Mailbox
from echelon.comm.wire.summing import SERVERS_DO, SUM
from echelon.comm.wire.summing import serve as sum_for_all
from echelon.config.choices import Choices
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.server.protocol import Bye, ToServer
from echelon.server.server import ParameterServer


def main() -> None:
    """Serve the run that ECHELON_RUN names."""
    serve_run(Place.from_environment(os.environ), RunFolder(Path(os.environ["ECHELON_RUN"])))


def serve_run(place: Place, folder: RunFolder) -> ParameterServer | None:
    """Serve at `place` until all workers have left; returns the parameter server, if it was one."""
    plan = Plan.read(folder.plan)
    rendezvous = meet(
        place,
        node=plan.servers[place.rank - place.world_size],
        host=socket.gethostname(),
        pid=os.getpid(),
        timeout_s=plan.join_timeout_s,
    )
    return serve(rendezvous, place, plan, lambda: Recorder(folder.events_of(place.rank)))


def serve(
    rendezvous: Rendezvous, place: Place, choices: Choices, record: Callable[[], Recorder]
) -> ParameterServer | None:
    """Serve the workers of a rendezvous until they have left. `record` opens the recorder."""
    deadline_s = choices.round_timeout_s
    loop = open_server(
        rendezvous,
        place,
        deadline_s=deadline_s,
        timeout_s=choices.join_timeout_s,
        integrity=choices.integrity,
    )
    cause = ""
    try:
        with record() as recorder:
            if rendezvous.lookup(SERVERS_DO) != SUM:
                return _serve_parameters(loop, place, recorder)
            sum_for_all(
                loop,
                rank=place.rank,
                workers=place.world_size,
                servers=place.servers,
                deadline_s=deadline_s,
            )
            return None
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise
    finally:
        loop.close(cause)


def _serve_parameters(loop: Loop, place: Place, recorder: Recorder) -> ParameterServer:
    """Be a parameter server."""
    workers, everybody = range(place.world_size), range(place.process_count)
    server = ParameterServer(
        rank=place.rank, servers=everybody[place.world_size :], workers=workers, recorder=recorder
    )
    others = set(everybody) - {place.rank}
    server.run(Mailbox(loop, others, ToServer, place=server.place, farewell=Bye))
    return server


if __name__ == "__main__":
    main()
