"""Whatever bytes come, a parser reads them or raises an error of Echelon's; `make fuzz` looks longer."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.parsers import parsers

PARSERS = parsers()
some = settings(
    max_examples=60,
    derandomize=True,  # `make fuzz` is for what is new
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@st.composite
def changed(draw: st.DrawFn, seed: bytes) -> bytes:
    """A valid message with a few changes: bytes set, removed, repeated or added; or a deep nest."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        stop = draw(st.integers(at, min(len(data), at + 8)))
        kind = draw(st.sampled_from(["set", "cut", "repeat", "add", "extreme"]))
        if kind == "set":
            data[at:stop] = draw(st.binary(min_size=stop - at, max_size=stop - at))
        elif kind == "cut":
            del data[at:stop]
        elif kind == "repeat":
            data[at:at] = data[at:stop] * draw(st.integers(1, 20))
        elif kind == "add":
            data[at:at] = draw(st.binary(max_size=12))
        else:
            data[at : at + 8] = draw(
                st.sampled_from([b"\xff" * 8, bytes(8), b"\xff" * 7 + b"\x7f", b"\x80" * 8])
            )
    return bytes(data)


@pytest.mark.parametrize("name", PARSERS)
def test_valid_bytes_are_read(name):
    for seed in PARSERS[name].seeds:
        PARSERS[name].feed(seed)


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.data())
@some
def test_any_bytes_are_read_or_refused(name, data):
    parser = PARSERS[name]
    seed = data.draw(st.sampled_from(parser.seeds))
    parser.feed(data.draw(st.one_of(changed(seed), st.binary(max_size=200))))


@pytest.mark.parametrize("name", PARSERS)
def test_deep_nests_are_read_or_refused(name):
    for nest in (b"[", b"{", b'{"a":', b"\x91", b"\x81\xa1a", b"a = [["):
        PARSERS[name].feed(nest * 3000)
        PARSERS[name].feed(PARSERS[name].seeds[0] + nest * 3000)
