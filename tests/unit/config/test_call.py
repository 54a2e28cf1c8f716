"""The call syntax: parsing, printing and positions of syntax errors."""

from __future__ import annotations

import pytest

from echelon.config.call import Call, parse_call
from echelon.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("ring", Call("ring")),
        ("  ring ( ) ", Call("ring")),
        ("smooth-switch(step=300)", Call("smooth-switch", (), {"step": 300})),
        ("dgc(0.001)", Call("dgc", (0.001,))),
        ("f(1, -2, 3e2, 1_000)", Call("f", (1, -2, 300.0, 1000))),
        ("f(true, False, none)", Call("f", (True, False, None))),
        ("f(word, two-words, 5ms, a/b.txt)", Call("f", ("word", "two-words", "5ms", "a/b.txt"))),
        ('f("a, b", \'it is "so"\')', Call("f", ("a, b", 'it is "so"'))),
        (r'f("a\"b\\c")', Call("f", ('a"b\\c',))),
        ('f("true", "1", "")', Call("f", ("true", "1", ""))),
        ("f([1, [a, 2.5], []], x=[none])", Call("f", ([1, ["a", 2.5], []],), {"x": [None]})),
        ("f(warm-up=3)", Call("f", (), {"warm_up": 3})),
        ("h(inner=ring, outer=tree(2,b = x))", Call("h", (), {"inner": "ring", "outer": "tree(2, b=x)"})),
        ("h(inner=ring())", Call("h", (), {"inner": "ring"})),
        ("f(\n  1,\n  a = 2\n)", Call("f", (1,), {"a": 2})),
    ],
)
def test_call_syntax_is_parsed(text, call):
    assert parse_call(text) == call


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (Call("ring"), "ring"),
        (Call("f", (1, 2.0, True, None, "x")), "f(1, 2.0, true, none, x)"),
        (Call("f", ("a b", "none", "7", "", "a,b", 'q"q')), r'f("a b", "none", "7", "", "a,b", "q\"q")'),
        (Call("f", (), {"a": ["x", [1]], "b": "tree(2)"}), "f(a=[x, [1]], b=tree(2))"),
        (Call("f", ("tree( 2 )",)), 'f("tree( 2 )")'),
    ],
)
def test_call_prints_in_its_usual_form(call, text):
    assert str(call) == text
    assert parse_call(text) == call


@pytest.mark.parametrize(
    ("text", "expected", "place"),
    [
        ("", "a name, found the end", 1),
        ("(1)", "a name, found '('", 1),
        ("3d(1)", "a name, found '3'", 1),
        ("f(1", "',' or ')', found the end", 4),
        ("f(1,)", "a value, found ')'", 5),
        ("f(,)", "a value, found ','", 3),
        ("f(1 2)", "',' or ')', found '2'", 5),
        ("f(a=)", "a value, found ')'", 5),
        ("f(a=1, 2)", "'key=value' (positional values come first), found '2'", 8),
        ("f(1) g", "the end, found 'g'", 6),
        ('f("x)', 'a closing ", found the end', 6),
        ("f([1, 2)", "',' or ']', found ')'", 8),
        ("f(a=1, a=2)", "'a' only once", 8),
        ("f(a-b=1, a-b=2)", "'a-b' only once", 10),
        ("f(a_b=1, a-b=2)", "'a-b' only once", 10),
    ],
)
def test_syntax_error_points_at_the_wrong_character(text, expected, place):
    with pytest.raises(ConfigError) as caught:
        parse_call(text)
    assert f"expected {expected}" in caught.value.message
    assert caught.value.where == f"character {place}"
    assert caught.value.fix


@pytest.mark.parametrize("text", ["f(" + "[" * 5000, "f" + "(f" * 5000, "f(" * 40 + "1" + ")" * 40])
def test_excessive_nesting_is_an_error_and_not_a_crash(text):
    with pytest.raises(ConfigError, match="levels of nesting"):
        parse_call(text)


def test_moderately_deep_nesting_is_parsed():
    text = "a(x=b(c(1, d(e([f(2)])))))"
    assert str(parse_call(text)) == text
