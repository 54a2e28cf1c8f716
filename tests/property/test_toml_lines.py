"""The line of every key of a TOML text, against texts whose lines are known by how they were made."""

from __future__ import annotations

import tomllib

import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.toml_lines import line_of, lines_of

_keys = st.text("abc-_1", min_size=1, max_size=4) | st.text('a."# =[]', min_size=1, max_size=4).filter(
    lambda text: '"' not in text
)
_scalars = (
    st.integers(-5, 5)
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('ab"\\#=[]{}\n', max_size=6)
    | st.datetimes()
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=12,
)


def _paths(value, path=()):
    """Every key and element below a value."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


@given(st.dictionaries(_keys, _values, max_size=4), st.booleans())
def test_every_key_and_element_of_any_text_is_found(values, multiline):
    text = tomli_w.dumps(values, multiline_strings=multiline)
    assert tomllib.loads(text) or not values
    found = lines_of(text)
    assert set(_paths(tomllib.loads(text))) <= set(found)
    lines = text.split("\n")
    for path, number in found.items():
        assert 1 <= number <= len(lines)
        if isinstance(path[-1], str):
            assert path[-1] in lines[number - 1]


def test_lines_are_those_that_a_person_counts():
    text = "\n".join(
        [
            "# a plan",
            "batch = 8",
            "",
            "workers = [",
            "  { rank = 0,",
            '    node = "a#b" }, # one',
            "  { rank = 1 },",
            "]",
            "[x.y]",
            'z = """',
            "",
            '"""',
            "w = 1",
            "[[t]]",
            "a = 1",
            "[[t]]",
            "a = 2",
        ]
    )
    found = lines_of(text)
    assert found["batch",] == 2
    assert found["workers", 0, "rank"] == 5
    assert found["workers", 0, "node"] == 6
    assert found["workers", 1] == found["workers", 1, "rank"] == 7
    assert found["x", "y", "w"] == 13
    assert found["t", 1, "a"] == 17
    assert line_of(found, ("workers", 1, "weight")) == 7
    assert line_of(found, ("nothing",)) == 1
