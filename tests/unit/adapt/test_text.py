"""Positions of nodes, encodings and line ends."""

from __future__ import annotations

import ast
import codecs

import pytest

from echelon.adapt.text import ScriptText
from echelon.errors import ConfigError


def _name(text: ScriptText, name: str) -> ast.Name:
    return next(node for node in ast.walk(text.tree) if isinstance(node, ast.Name) and node.id == name)


def test_columns_are_counted_in_characters_although_the_tree_counts_bytes():
    text = ScriptText("größe = 'ünïcödé'; other = größe\n")
    assert [text.of(node) for node in ast.walk(text.tree) if isinstance(node, ast.Name)] == [
        "größe",
        "other",
        "größe",
    ]


def test_a_form_feed_or_another_separator_inside_a_line_does_not_end_it():
    text = ScriptText("a = 1\n\x0c\nb = 'x\u2028y'\nc = a\n")
    assert text.of(text.tree.body[-1]) == "c = a"
    assert len(text.lines) == 4


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_are_recognised(end):
    text = ScriptText(f"a = 1{end}b = a{end}")
    assert text.newline == end
    assert text.of(text.tree.body[1]) == "b = a"


def test_bytes_of_a_script_survive_decoding_and_encoding():
    for data in (
        b"a = 1\n",
        codecs.BOM_UTF8 + "ä = 1\r\n".encode(),
        "# coding: latin-1\nname = 'Müller'\n".encode("latin-1"),
    ):
        text = ScriptText.decode(data, where="x.py")
        assert text.encode(text.text) == data


@pytest.mark.parametrize("data", [b"name = '\xff'\n", b"# coding: no-such-encoding\n"])
def test_an_encoding_that_does_not_fit_is_an_error_that_names_the_file(data):
    with pytest.raises(ConfigError, match="not text in UTF-8") as caught:
        ScriptText.decode(data, where="x.py")
    assert caught.value.where == "x.py"


def test_one_level_of_indentation_is_that_of_the_script():
    assert ScriptText("if a:\n\tb = 1\n").indent == "\t"
    assert ScriptText("class A:\n  def f(self):\n    pass\n").indent == "  "
    assert ScriptText("if a: b = 1\n").indent == "    "


def test_a_statement_is_alone_if_only_a_comment_shares_its_lines():
    text = ScriptText("a = 1  # why\nb = 2; c = 3\nif a: d = 4\ne = (\n  5)\n")
    first, second, third, condition, last = text.tree.body
    assert text.alone(first)
    assert text.alone(last)
    assert not text.alone(second)
    assert not text.alone(third)
    assert not text.alone(condition.body[0])


def test_positions_are_not_trusted_where_the_tree_has_them_wrong():
    text = ScriptText("size = f'{ä}é {rank}'\nother = rank\n")
    names = [node for node in ast.walk(text.tree) if isinstance(node, ast.Name) and node.id == "rank"]
    for node in names:
        assert text.trusted(node) == (text.of(node) == "rank")
    assert text.trusted(_name(text, "other"))


def test_lines_with_nothing_but_a_comment():
    text = ScriptText('a = """\n# not one\n"""  # nor this\n  # one\nb = 1\n')
    assert text.comments == {4}
