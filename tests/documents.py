"""Reads the Markdown documents: their code blocks, links, headings, and the commands with their output.

A block that begins with ```console holds commands after `$ ` and, below each, the output it prints:

    ...                   alone or inside a line: any text
    20261115-201252       a time in a run's name: any
    2.9 s, 3,504 samples/s, 77 %, 1.2 times     numbers that depend on timing: any number
    --shares 33,45 (now 32,32)                  recommended shares: any
    98.1 % after "accuracy", and all other numbers      exactly this

In a table of workers the columns that measure time are any text. A Python or TOML block with a title,
```python title="train.py", is a file that the commands of its document use.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<info>[^`\n]*)\n(?P<text>.*?)^ *(?P=fence)[ \t]*$", re.M | re.S
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_COMMAND = re.compile(r"^(?:\$ )?((?:echelon|python|torchrun|make|pip|source) .*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_ANY = "\0"


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of code: its language, its title if it has one, and the line it begins at."""

    language: str
    title: str
    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, and the output that the document shows for it."""

    text: str
    expected: str
    line: int


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order."""
    text = document.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        info = match["info"].strip()
        title = _TITLE.search(info)
        language = info.partition(" ")[0]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(language, title.group(1) if title else "", match["text"], line))
    return found


def prose(document: Path) -> str:
    """The document without its fenced blocks."""
    return _FENCE.sub("", document.read_text(encoding="utf-8"))


def links(document: Path) -> Iterator[str]:
    """The targets of its links that lead to files or headings of this repository."""
    for target in _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(document))):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(document: Path) -> set[str]:
    """What links to its headings are called."""
    found: dict[str, int] = {}
    names = set()
    for title in re.findall(r"^#+ (.+)$", prose(document), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


def commands(document: Path) -> list[tuple[int, list[str]]]:
    """Each command in a block of commands, as words, with its line."""
    found = []
    for block in blocks(document):
        if block.language in ("", "console", "sh"):
            for offset, line in enumerate(_joined(block.text)):
                match = _COMMAND.match(line.strip())
                if match is not None and "..." not in match.group(1).split(" ")[:2]:
                    words = shlex.split(match.group(1), comments=True)
                    found.append((block.line + offset, words))
    return found


def console(document: Path) -> Iterator[Block | Command]:
    """The files and the commands of a document, in the order in which a reader meets them."""
    for block in blocks(document):
        if block.title:
            yield block
        elif block.language == "console":
            parts = re.split(r"^\$ ", "\n".join(_joined(block.text)), flags=re.M)
            for part in parts[1:]:
                text, _, expected = part.partition("\n")
                yield Command(text, expected, block.line)


def fits(expected: str, printed: str) -> bool:
    """Whether a command printed what its document shows."""
    pattern = re.sub(r"(?:\\ |\\\n)+", " ", re.escape(_masked(expected)))
    # Between two lines `...` may also stand for nothing.
    pattern = pattern.replace(f" {re.escape(_ANY)} ", "(?: .*?)? ").replace(re.escape(_ANY), ".*?")
    return re.fullmatch(rf" ?{pattern} ?", _masked(printed), re.S) is not None


def _masked(text: str) -> str:
    """One line, in which all that may differ from run to run is a placeholder."""
    # Other processors round differently, and a codec that leaves much out amplifies that.
    text = re.sub(r"(?m)^(\S+ +[\d.]+x .*?) \d\.\d{4}(?: +[-+][\d.]+ %)? *$", r"\1 ...", text)
    text = re.sub(r"(?<=above none's: ).*? It sends .*? fewer bytes.*? none's\.", "...", text)
    text = re.sub(r"\s+", " ", _without_times(text).replace("...", _ANY))
    text = re.sub(r"\d{8}-\d{6}", _ANY, text)
    text = re.sub(r"(?<=[Rr]ank \d )\([^)]*\)", _ANY, text)
    text = re.sub(
        r"(?<!accuracy )(?<![\d.,])\d[\d,.]* (?=(?:s|ms|µs|samples/s|%|times)(?!\w))", f"{_ANY} ", text
    )
    text = re.sub(rf"{_ANY} (?:s|ms|µs)(?!\w)", f"{_ANY} s", text)
    # On a busy machine no single worker may be the reason; the one that is named first is late most often.
    text = re.sub(
        r"Waiting for late workers cost .{1,40}? of the run, but no single worker is the reason. "
        r"Most often late: rank (\d) .*?(?= A step took| record:)",
        rf"Rank \1 {_ANY} arrived last in {_ANY} % of rounds and cost the others {_ANY} s, "
        rf"{_ANY} % of the run; ",
        text,
    )
    # The advice behind "of the run" depends on what else the machine does.
    return re.sub(r"(?<=of the run); .*?(?= A step took| record:)", f"; {_ANY}", text)


def _without_times(text: str) -> str:
    """Tables of workers without the cells that depend on timing."""
    lines = []
    widths: list[tuple[int, int]] = []
    for line in text.split("\n"):
        if re.match(r"\s+rank\s+node\s", line):
            ends = [(match.group(), match.end()) for match in re.finditer(r"\S+(?: \S+)*", line)]
            starts = [0, *(end for _, end in ends)]
            widths = [
                (start, end)
                for (name, end), start in zip(ends, starts, strict=False)
                if name not in ("rank", "share", "sent")
            ]
        elif line.strip() in ("", "..."):
            widths = []
        elif widths and "─" not in line:
            for start, end in widths:
                if line[start:end].strip():
                    line = line[:start] + " " + _ANY.ljust(end - start - 1) + line[end:]
        lines.append(line.rstrip() if "─" not in line else "")
    return "\n".join(lines)


def _joined(text: str) -> list[str]:
    """Lines, with those that end in a backslash joined to the next."""
    return re.sub(r"\s*\\\n\s*", " ", text).split("\n")
