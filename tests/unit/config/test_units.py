"""Parsing and printing of quantities with units."""

from __future__ import annotations

import pytest

from echelon.config.units import duration_s, rate_bytes_per_s, show_bytes, show_seconds, size_bytes
from echelon.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1gbit", 125e6),
        ("100mbit", 12.5e6),
        ("100 Mbit", 12.5e6),
        ("8bit", 1),
        ("64kbit", 8e3),
        ("12.5MB/s", 12.5e6),
        ("1GiB/s", 2**30),
        (" .5gbit ", 62.5e6),
        ("1e3kbit", 125e3),
    ],
)
def test_a_rate_is_in_bytes_per_second(text, expected):
    assert rate_bytes_per_s(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5ms", 0.005),
        ("2s", 2),
        ("2", 2),
        ("1.5min", 90),
        ("1h", 3600),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        (3, 3),
    ],
)
def test_a_duration_is_in_seconds(text, expected):
    assert duration_s(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64MB", 64_000_000), ("1GiB", 2**30), ("10", 10), ("1.5kB", 1500), ("1.001kB", 1001), ("0b", 0)],
)
def test_a_size_is_in_whole_bytes(text, expected):
    size = size_bytes(text)
    assert (size, type(size)) == (expected, int)


@pytest.mark.parametrize("read", [rate_bytes_per_s, duration_s, size_bytes])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "-5ms",
        "-1gbit",
        "-1MB",
        "5 parsecs",
        "1,5s",
        "nan",
        "inf",
        "1e999",
        "1e999MB",
        "1e999gbit",
    ],
)
def test_invalid_quantity_is_refused_with_an_example(read, text):
    with pytest.raises(ConfigError) as caught:
        read(text, where="lab.toml, links")
    assert caught.value.message.startswith(f"{text!r} is not a ")
    assert "such as" in caught.value.fix
    assert caught.value.where == "lab.toml, links"


@pytest.mark.parametrize(
    ("read", "text"), [(rate_bytes_per_s, "5"), (rate_bytes_per_s, "5MB"), (size_bytes, "5s")]
)
def test_units_of_another_kind_are_refused(read, text):
    with pytest.raises(ConfigError):
        read(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (16_777_216, "16.8 MB"), (2e9, "2.0 GB")],
)
def test_bytes_are_shown_in_readable_units(count, text):
    assert show_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 µs"), (5e-6, "5 µs"), (0.0032, "3.2 ms"), (1.25, "1.2 s"), (65, "1 min 5 s")],
)
def test_durations_are_shown_in_readable_units(seconds, text):
    assert show_seconds(seconds) == text
