"""Checks the ranges of option values; the registry checks their types."""

from __future__ import annotations

from echelon.errors import ConfigError


def check_range(where: str, option: str, value: float, *, least: float, most: float | None = None) -> None:
    """Raise ConfigError unless `least <= value <= most`; `where` names the strategy."""
    if value >= least and (most is None or value <= most):
        return
    limits = f"of at least {least}" if most is None else f"between {least} and {most}"
    raise ConfigError(f"{option} cannot be {value}", where=where, fix=f"give a value {limits}")


def check_seed(where: str, seed: int) -> None:
    """Raise ConfigError unless numpy's legacy generator accepts the seed."""
    check_range(where, "seed", seed, least=0, most=2**32 - 1)
