"""The documents name what is there: commands parse, links lead somewhere, error texts and files exist."""

from __future__ import annotations

import ast
import re
import sys
import types
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import typer

from documents import DOCUMENTS, ROOT, anchors, blocks, commands, links, prose
from echelon.cli import app
from echelon.config.registry import Strategy

SOURCE = ROOT / "src" / "echelon"
_named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@_named
def test_every_command_of_a_document_parses(document):
    failures = []
    for line, words in commands(document):
        if words[0] == "echelon":
            try:
                _parse([word for word in words[1:] if word != "..."])
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, say which command it is
                failures.append(f"{document.name}:{line}: {' '.join(words)}: {error}")
        elif words[0] == "python" and words[1].startswith(("benchmarks/", "examples/", "docs/")):
            if not (ROOT / words[1]).is_file():
                failures.append(f"{document.name}:{line}: there is no {words[1]}")
        elif words[0] == "make":
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            targets = [word for word in words[1:] if "=" not in word]
            failures += [
                f"{document.name}:{line}: no target {target}"
                for target in targets
                if not re.search(rf"^{re.escape(target)}:", makefile, re.M)
            ]
    assert not failures, "\n".join(failures)


def _parse(words: list[str]) -> None:
    """Raises if the command line does not take these words; runs nothing."""
    command = typer.main.get_command(app)
    context = command.make_context("echelon", list(words))
    while isinstance(command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return
        name, command, left = command.resolve_command(context, rest)
        assert command is not None, f"no command {rest[0]}"
        context = command.make_context(name, left, parent=context)


@_named
def test_every_relative_link_leads_to_a_file_and_a_heading(document):
    dead = []
    for target in links(document):
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(target)
    assert not dead, f"{document.name}: {dead}"


def test_every_error_text_of_troubleshooting_is_one_that_the_source_can_say():
    unknown = [text for text in _error_texts() if not _can_be_said(text)]
    assert not unknown, "not in src/echelon:\n" + "\n".join(unknown)


def test_an_error_text_that_nobody_says_is_noticed():
    assert not _can_be_said("the moon is ... bytes too large")
    assert not _can_be_said("gradients of a worker are given to the server by rank and lost")


def _error_texts() -> list[str]:
    """The first column of each table with the header `text`."""
    found, inside = [], False
    for line in prose(ROOT / "docs" / "troubleshooting.md").split("\n"):
        if line.startswith("| text |"):
            inside = True
        elif not line.startswith("|"):
            inside = False
        elif inside and not line.startswith("|---"):
            found += re.findall(r"`([^`]+)`", line.replace("\\|", "¦").split("|")[1])
    assert len(found) > 100
    return [text for text in found if " " in text]


def _can_be_said(text: str) -> bool:
    """Whether the text can be put together from few pieces of texts of the source; `...` is any value."""
    text = re.sub(r"^[A-Z]\w+: ", "", text)
    breaks = words = 0
    for chunk in re.split(r"['\[]?\.\.\.['\]]?", text):
        tokens = _tokens(chunk)
        words += len(re.findall(r"\w+", chunk))
        while tokens:
            longest = next(
                (n for n in range(len(tokens), 0, -1) if f" {' '.join(tokens[:n])} " in _said()), 0
            )
            if longest == 0:
                return False
            tokens = tokens[longest:]
            breaks += len(tokens) > 0
    return breaks <= max(1, words // 3)


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


@cache
def _said() -> str:
    """All texts of the source but docstrings, as words; a bar is where a value is put in or a text ends."""
    found = []
    for file in SOURCE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) not in statements | inside:
                    found.append(re.sub(r"%\.?\d*[sdrfg]", "|", node.value))
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "|" for p in node.values))
    return " ".join(["", *_tokens(" | ".join(found)), ""])


def test_every_file_that_the_architecture_names_is_there():
    text = prose(ROOT / "docs" / "architecture.md")
    named = set(re.findall(r"`([\w/.-]+?(?:\.py|/))(?::[\w.]+)?`", text))
    absent = [path for path in named if not (SOURCE / path).exists() and not (ROOT / path).exists()]
    assert not absent, sorted(absent)


def test_every_function_that_the_architecture_names_is_in_its_file():
    text = prose(ROOT / "docs" / "architecture.md")
    absent = []
    for file, name in set(re.findall(r"`([\w/]+\.py):([\w.]+)`", text)):
        last = name.rpartition(".")[2]
        if not re.search(
            rf"^\s*(?:async )?(?:def|class) {last}\b", (SOURCE / file).read_text("utf-8"), re.M
        ):
            absent.append(f"{file}:{name}")
    assert not absent, sorted(absent)


def test_every_room_is_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [folder.name for folder in SOURCE.iterdir() if (folder / "__init__.py").is_file()]
    assert not [room for room in rooms if f"`{room}/`" not in text]


@pytest.mark.parametrize(
    "folder",
    sorted(file.parent for file in SOURCE.rglob("__init__.py") if file.parent != SOURCE),
    ids=lambda folder: str(folder.relative_to(SOURCE)),
)
def test_the_map_of_a_room_names_its_files_and_no_others(folder):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    named = set(re.findall(r"(?<![/\w.])(\w+\.py)\b", docstring))
    if not named and _holds_strategies(folder):
        assert re.search(r"\bone file\b", docstring, re.I), (
            f"{folder}: say what a file is, or name the files"
        )
        return
    assert named == {file.name for file in folder.glob("*.py")} - {"__init__.py"}
    folders = [file.parent.name for file in folder.glob("*/__init__.py")]
    assert not [name for name in folders if f"{name}/" not in docstring]


def _holds_strategies(folder: Path) -> bool:
    """Whether a registry finds the files of this folder."""
    package = ".".join(folder.relative_to(SOURCE.parent).parts)
    return any(
        re.search(rf'Registry\([^)]*"{re.escape(package)}"', file.read_text(encoding="utf-8"))
        for file in SOURCE.rglob("*.py")
    )


def _complete_examples():
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.language == "python" and block.text.startswith('"""') and "(frozen=True" in block.text:
                yield pytest.param(block.text, id=f"{document.name}:{block.line}")


@pytest.mark.parametrize("text", list(_complete_examples()))
def test_a_complete_strategy_in_a_document_implements_its_contract(text):
    module = types.ModuleType("example")
    sys.modules["example"] = module
    try:
        exec(compile(text, "example", "exec"), module.__dict__)
    finally:
        del sys.modules["example"]
    made = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and thing.__module__ == "example"
    ]
    strategies = [kind for kind in made if issubclass(kind, Strategy)]
    assert strategies
    assert not [kind.__abstractmethods__ for kind in strategies if kind.__abstractmethods__]


def test_no_class_name_is_defined_twice():
    places: dict[str, list[str]] = defaultdict(list)
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file.relative_to(SOURCE)))
    assert not {name: files for name, files in places.items() if len(files) > 1}
