"""Quantities with units: "100mbit", "5ms", "1.5GiB".

Rates are in bytes per second, durations in seconds, sizes in bytes. As in networking, "mbit" is a million
bits per second and "MB/s" a million bytes per second.
"""

from __future__ import annotations

import math
import re

from echelon.errors import ConfigError

_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Zµ/]*)\s*", re.IGNORECASE)

_BYTES = {
    "b": 1.0,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "kib": 2.0**10,
    "mib": 2.0**20,
    "gib": 2.0**30,
}
_RATES = {
    "bit": 1 / 8,
    "kbit": 1e3 / 8,
    "mbit": 1e6 / 8,
    "gbit": 1e9 / 8,
    **{f"{unit}/s": scale for unit, scale in _BYTES.items()},
}
_DURATIONS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def rate_bytes_per_s(text: str, *, where: str = "") -> float:
    """Bytes per second of '1gbit' or '120MB/s'."""
    return _read(text, _RATES, "a rate such as 100mbit or 12.5MB/s", where)


def duration_s(text: str | float, *, where: str = "") -> float:
    """Seconds of '5ms'; a plain number is seconds."""
    if not isinstance(text, str):
        return float(text)
    return _read(text, {**_DURATIONS, "": 1.0}, "a duration such as 5ms or 2s", where)


def size_bytes(text: str, *, where: str = "") -> int:
    """Bytes of '64MB'; a plain number is bytes."""
    return round(_read(text, {**_BYTES, "": 1.0}, "a size such as 64MB or 1GiB", where))


def _read(text: str, units: dict[str, float], wanted: str, where: str) -> float:
    match = _QUANTITY.fullmatch(text)
    scale = units.get(match.group(2).lower()) if match else None
    value = float(match.group(1)) * scale if match is not None and scale is not None else math.inf
    if math.isinf(value):
        raise ConfigError(f"{text!r} is not {wanted}", where=where, fix=f"write {wanted}")
    return value


def show_bytes(count: float) -> str:
    """A byte count as text: '16.8 MB'."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def show_memory(count: float) -> str:
    """A memory size as text, in the units in which memory is sold: '16.0 GiB'."""
    for unit, scale in (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """A duration as text: '3.2 ms', '1 min 5 s'."""
    if seconds >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} µs"
