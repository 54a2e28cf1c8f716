"""Changes of nodes become one text, or are refused."""

from __future__ import annotations

import ast

import pytest

from echelon.adapt.changes import Changes, Cut, Enclose, Insert, Remove, Replace
from echelon.adapt.text import ScriptText


def _changed(source: str, *make) -> str:
    text = ScriptText(source)
    changes = Changes(text)
    for one in make:
        assert changes.add(one(text.tree))
    return changes.text()


def _call(tree: ast.Module) -> ast.Call:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.Call))


def test_a_replaced_expression_keeps_comments_quotes_and_spacing_around_it():
    source = "x = f( 'a',  y )   # why\n"
    new = _changed(source, lambda tree: [Replace(_call(tree).args[1], "z")])
    assert new == "x = f( 'a',  z )   # why\n"


def test_insertion_takes_the_indentation_and_the_line_end_of_its_neighbour():
    source = "if a:\r\n\tb = 1  # one\r\n\tc = 2\r\n"
    body = lambda tree: tree.body[0].body  # noqa: E731
    new = _changed(
        source,
        lambda tree: [Insert(body(tree)[0], "d = 3", "after")],
        lambda tree: [Insert(body(tree)[0], "e = 4", "before")],
    )
    assert new == "if a:\r\n\te = 4\r\n\tb = 1  # one\r\n\td = 3\r\n\tc = 2\r\n"


def test_insertion_before_a_statement_goes_above_its_comment():
    new = _changed("a = 1\n# about b\nb = 2\n", lambda tree: [Insert(tree.body[1], "c = 3", "before")])
    assert new == "a = 1\nc = 3\n# about b\nb = 2\n"


def test_what_looks_like_a_comment_at_the_end_of_a_text_is_none():
    source = 'a = """\n# text"""\nb = 2\n'
    assert _changed(source, lambda tree: [Insert(tree.body[1], "c = 3", "before")]) == (
        'a = """\n# text"""\nc = 3\nb = 2\n'
    )


def test_insertion_after_the_last_line_without_an_end():
    assert _changed("a = 1", lambda tree: [Insert(tree.body[0], "b = 2", "after")]) == "a = 1\nb = 2"


def test_inner_and_outer_insertion_at_one_place_keep_their_blocks():
    new = _changed(
        "if a:\n    b = 1\n",
        lambda tree: [Insert(tree.body[0], "outer = 1", "after")],
        lambda tree: [Insert(tree.body[0].body[0], "inner = 1", "after")],
    )
    assert new == "if a:\n    b = 1\n    inner = 1\nouter = 1\n"


def test_insertion_before_a_decorated_function_goes_above_the_decorator():
    new = _changed("@f\ndef g():\n    pass\n", lambda tree: [Insert(tree.body[0], "a = 1", "before")])
    assert new == "a = 1\n@f\ndef g():\n    pass\n"


def test_removed_statement_takes_its_lines_along():
    source = "a = 1\nf(\n    2,\n)  # why\nb = 3\n"
    assert _changed(source, lambda tree: [Remove(tree.body[1])]) == "a = 1\nb = 3\n"


def test_a_block_that_would_be_empty_gets_pass():
    source = "def f():\n    a()\n    b()\n"
    remove = [lambda tree, at=at: [Remove(tree.body[0].body[at])] for at in (0, 1)]
    assert _changed(source, *remove) == "def f():\n    pass\n"
    assert _changed(source, remove[0]) == "def f():\n    b()\n"


def test_an_if_that_would_be_empty_goes_too_unless_its_test_calls_something():
    source = "if x:\n    if y:\n        a()\nif z():\n    a()\n"
    new = _changed(
        source,
        lambda tree: [Remove(tree.body[0].body[0].body[0])],
        lambda tree: [Remove(tree.body[1].body[0])],
    )
    assert new == "if z():\n    pass\n"


def test_an_if_with_another_branch_stays():
    source = "if x:\n    a()\nelse:\n    b()\n"
    assert _changed(source, lambda tree: [Remove(tree.body[0].body[0])]) == (
        "if x:\n    pass\nelse:\n    b()\n"
    )


def test_enclosed_statement_is_indented_and_can_be_edited_inside():
    source = "with open(p) as f:\n    save(\n        x, f)\n"
    new = _changed(
        source,
        lambda tree: [Enclose(tree.body[0], "if leader:")],
        lambda tree: [Replace(tree.body[0].body[0].value.args[0], "y")],
    )
    assert new == "if leader:\n    with open(p) as f:\n        save(\n            y, f)\n"


def test_a_text_over_several_lines_is_not_indented():
    text = ScriptText('save("""a\nb""")\n')
    assert not Changes(text).add([Enclose(text.tree.body[0], "if leader:")])


@pytest.mark.parametrize(
    ("before", "name", "after"),
    [
        ("f(a, s=1)", "s", "f(a)"),
        ("f(s=1, t=2)", "s", "f(t=2)"),
        ("f(s=1)", "s", "f()"),
        ("f(\n    a,\n    s=1,\n    t=2,\n)", "s", "f(\n    a,\n    t=2,\n)"),
    ],
)
def test_an_argument_is_cut_with_its_comma(before, name, after):
    def cut(tree):
        call = _call(tree)
        return [Cut(call, next(one for one in call.keywords if one.arg == name))]

    assert _changed(before + "\n", cut) == after + "\n"


def test_an_argument_with_a_comment_beside_it_is_not_cut():
    text = ScriptText("f(a,  # first\n  s=1)\n")
    call = _call(text.tree)
    assert not Changes(text).add([Cut(call, call.keywords[0])])


def test_changes_of_the_same_characters_are_refused():
    text = ScriptText("a = f(g(x))\n")
    outer, inner = [node for node in ast.walk(text.tree) if isinstance(node, ast.Call)]
    changes = Changes(text)
    assert changes.add([Replace(outer, "h()")])
    assert not changes.add([Replace(inner, "x")])
    assert changes.text() == "a = h()\n"


def test_a_change_inside_a_removed_statement_goes_with_it():
    text = ScriptText("f(g(x))\ny = 1\n")
    call = text.tree.body[0].value
    for first, second in (
        ([Remove(text.tree.body[0])], [Replace(call.args[0], "x")]),
        ([Replace(call.args[0], "x")], [Remove(text.tree.body[0])]),
    ):
        changes = Changes(text)
        assert changes.add(first)
        assert changes.add(second)
        assert changes.text() == "y = 1\n"


@pytest.mark.parametrize("where", ["before", "after"])
def test_nothing_is_inserted_on_a_line_with_other_code(where):
    text = ScriptText("a = 1; b = 2\nif a: c = 3\n")
    for statement in (text.tree.body[0], text.tree.body[1], text.tree.body[2].body[0]):
        assert not Changes(text).add([Insert(statement, "d = 4", where)])
