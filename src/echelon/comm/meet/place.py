"""This worker's rank, the world size and the leader's address, from the variables that launchers set.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are needed; LOCAL_RANK selects a device. With none of them
set, the process is alone. With only some of them set, joining is an error: guessing would hang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import ConfigError

SERVERS_VARIABLE = "ECHELON_SERVERS"
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

    @property
    def process_count(self) -> int:
        """Number of workers and servers."""
        return self.world_size + self.servers

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> Place:
        """The place that the launcher's variables describe."""
        present = [name for name in _NEEDED if env.get(name)]
        alone = (env.get("RANK") or "0") == "0" and (env.get("WORLD_SIZE") or "1") == "1"
        if alone and set(present) <= {"RANK", "WORLD_SIZE"}:
            return cls()
        missing = [name for name in _NEEDED if name not in present]
        if missing:
            raise ConfigError(
                f"{_listed(present)} set but {_listed(missing)} not",
                where="environment",
                fix="start the script with a launcher (echelon run, torchrun), or unset them all",
            )
        place = cls(
            rank=_number(env, "RANK"),
            world_size=_number(env, "WORLD_SIZE"),
            local_rank=_number(env, "LOCAL_RANK") if env.get("LOCAL_RANK") else 0,
            address=env["MASTER_ADDR"],
            port=_number(env, "MASTER_PORT"),
            servers=_number(env, SERVERS_VARIABLE) if env.get(SERVERS_VARIABLE) else 0,
            hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=env.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
        if not 0 <= place.rank < place.process_count:
            raise ConfigError(
                f"RANK is {place.rank} in a world of {place.world_size}",
                where="environment",
                fix=f"ranks go from 0 to {max(0, place.world_size - 1)}",
            )
        return place


def _listed(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {env[name]!r}, which is not a number", where="environment", fix="set it to a number"
        ) from None
