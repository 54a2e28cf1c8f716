"""Parsing and printing calls are inverse, and any text is a call or a ConfigError."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from echelon.config.call import Call, parse_call
from echelon.errors import ConfigError

names = st.from_regex(r"[A-Za-z][A-Za-z0-9_-]{0,8}", fullmatch=True)
option_names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
awkward = st.text(st.sampled_from("ab1_-.,=()[]\"'\\ \n\te"), max_size=12)
call_like = st.builds("{}({}={})".format, names, option_names, names)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    awkward,
    call_like,
    st.sampled_from(["true", "None", "nan", "inf", "1e5", "0x10", "1_0", "f()", "[1]", "a=b", "-"]),
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
calls = st.builds(
    Call,
    names,
    st.lists(values, max_size=3).map(tuple),
    st.dictionaries(option_names, values, max_size=3),
)


def _with_types(value):
    """Distinguishes 1, 1.0 and True, which are equal in Python."""
    if isinstance(value, list | tuple):
        return [_with_types(item) for item in value]
    return type(value), value


def _contents(call):
    return call.name, _with_types(call.args), {k: _with_types(v) for k, v in call.options.items()}


@given(calls)
@settings(max_examples=300, deadline=None)
@example(Call("f", ("f()", "f(1 )", '"', "\\", "'")))
def test_printed_call_parses_to_the_same_call(call):
    assert _contents(parse_call(str(call))) == _contents(call)


@given(calls, calls)
@settings(max_examples=100, deadline=None)
def test_call_nested_as_an_option_stays_a_call(outer, inner):
    nested = Call(outer.name, outer.args, {**outer.options, "inner": str(inner)})
    text = parse_call(str(nested)).options["inner"]
    assert isinstance(text, str)
    assert _contents(parse_call(text)) == _contents(inner)


@given(st.text(max_size=30) | awkward | st.builds("f({})".format, awkward))
@settings(max_examples=500, deadline=None)
def test_any_text_parses_or_raises_a_config_error(text):
    try:
        call = parse_call(text)
    except ConfigError as error:
        assert error.where.startswith("character ")  # noqa: PT017 - both ways are right
        return
    assert _contents(parse_call(str(call))) == _contents(call) or "nan" in str(call)
