"""This worker's rank, the world size and the leader's address, from the variables that launchers set.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are needed; LOCAL_RANK selects a device. Where RANK and
WORLD_SIZE are not set, the variables of MPI and Slurm are read (foreign.py). With none of them set, the
process is alone, also if there is an address. Otherwise, with only some of them set, joining is an error:
guessing would hang.

`echelon run` starts servers besides the workers, and WORLD_SIZE counts the workers. Any other launcher
starts processes of one kind, and WORLD_SIZE counts them all: if there are to be servers, they are the last
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from echelon.comm.meet import foreign
from echelon.errors import ConfigError

RUN_VARIABLE = "ECHELON_RUN"
SERVERS_VARIABLE = "ECHELON_SERVERS"
LISTEN_VARIABLE = "ECHELON_LISTEN"
PORT_VARIABLE = "ECHELON_PORT"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One worker's rank, and where the workers meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    servers: int = 0
    """Server processes besides the workers; their ranks follow those of the workers."""
    hosted: bool = False
    """The launcher runs the store itself (torchrun does)."""
    attempt: str = "0"
    """Distinguishes restarts of one job, so that none reads keys that another left behind."""
    launched: bool = False
    """`echelon run` has started this process."""
    further: tuple[str, ...] = ()
    """Further addresses of the leader's machine: workers elsewhere may know another one than `address`."""

    @property
    def process_count(self) -> int:
        """Number of workers and servers."""
        return self.world_size + self.servers

    @property
    def serves(self) -> bool:
        """Whether this process is a server."""
        return self.rank >= self.world_size

    @classmethod
    def from_environment(
        cls, env: Mapping[str, str], *, parent: int = 0, servers: int | None = None
    ) -> Place:
        """The place that the launcher's variables describe; `parent` is the parent's process id.

        `servers` is how many servers the script wants; None: as many as ECHELON_SERVERS says.
        """
        launched = bool(env.get(RUN_VARIABLE))
        if not env.get("RANK") and not env.get("WORLD_SIZE"):
            start = foreign.read(env, parent=parent)
            if start is not None and start.world_size > 1:
                env = _with_start(env, start)
        if not launched:
            foreign.refuse_pod(env)
        present = [name for name in _NEEDED if env.get(name)]
        alone = (env.get("RANK") or "0") == "0" and (env.get("WORLD_SIZE") or "1") == "1"
        if (alone and set(present) <= {"RANK", "WORLD_SIZE"}) or not {"RANK", "WORLD_SIZE"} & set(present):
            return cls(launched=launched)
        missing = [name for name in _NEEDED if name not in present]
        if missing:
            raise ConfigError(
                f"{_listed(present)} set but {_listed(missing)} not",
                where="environment",
                fix="start the script with a launcher (echelon run, torchrun), or unset them all",
            )
        given = foreign.number(env, SERVERS_VARIABLE, 0)
        place = cls(
            rank=foreign.number(env, "RANK"),
            world_size=foreign.number(env, "WORLD_SIZE"),
            local_rank=foreign.number(env, "LOCAL_RANK", 0),
            address=env["MASTER_ADDR"],
            port=foreign.number(
                env, PORT_VARIABLE if launched and env.get(PORT_VARIABLE) else "MASTER_PORT"
            ),
            servers=given if launched else 0,
            hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
            launched=launched,
            further=tuple(env.get(LISTEN_VARIABLE, "").split()),
        )
        if not 0 <= place.rank < place.process_count:
            raise ConfigError(
                f"RANK is {place.rank} in a world of {place.world_size}",
                where="environment",
                fix=f"ranks go from 0 to {max(0, place.world_size - 1)}",
            )
        return place._agreed(servers) if launched else place._divided(given if servers is None else servers)

    def _agreed(self, asked: int | None) -> Place:
        """Refuse a script that wants other servers than `echelon run` has started."""
        if asked is not None and asked != self.servers and self.process_count > 1:
            raise ConfigError(
                f"the script asks for {_servers(asked)}, but the run was started with "
                f"{_servers(self.servers)}",
                where="--servers",
                fix=f"start it with --servers {asked}, or leave servers out of join",
            )
        return self

    def _divided(self, servers: int) -> Place:
        """Make the last processes servers. One process that was started alone needs none."""
        if self.world_size == 1 or not servers:
            return self
        workers = self.world_size - servers
        if servers < 0 or workers < 2:
            raise ConfigError(
                f"{_servers(servers)} of {self.world_size} processes leave {max(0, workers)} as workers"
                if servers > 0
                else f"there cannot be {servers} servers",
                where="--servers",
                fix=f"start at least {max(servers, 1) + 2} processes: servers need two workers or more",
            )
        return replace(self, world_size=workers, servers=servers)


def _servers(count: int) -> str:
    return f"{count or 'no'} server{'' if count == 1 else 's'}"


def _listed(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _with_start(env: Mapping[str, str], start: foreign.ForeignStart) -> dict[str, str]:
    """The variables that the other launcher does not set; those that the user has set stay."""
    address = env.get("MASTER_ADDR") or start.address
    if not address:
        raise ConfigError(
            f"{start.by} started {start.world_size} processes on several machines, and does not say where "
            "they can meet",
            where="environment",
            fix="set MASTER_ADDR to an address of the first machine, and MASTER_PORT, on all of them "
            "(mpirun -x MASTER_ADDR -x MASTER_PORT), or start with echelon run",
        )
    return {
        **env,
        "RANK": str(start.rank),
        "WORLD_SIZE": str(start.world_size),
        "LOCAL_RANK": env.get("LOCAL_RANK") or str(start.local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": env.get("MASTER_PORT") or str(start.port),
    }
