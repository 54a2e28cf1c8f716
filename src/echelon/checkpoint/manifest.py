"""`state.json` of a checkpoint: its step, its parts with their checksums, and all that is not a tensor.

The file is `{"checksum":"<16 hex digits>"` followed by the rest. The checksum is the xxh3-64 of exactly
that rest, so that the file is verified before any of it is used.

    format 1   one part, and a tree of the whole state
    format 2   a part of each worker; trees of what the workers have in common, of what the leader adds, and
               of what each worker has of its own; figures, such as the loss, by which the best is found
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from echelon.checkpoint.part import PartFacts
from echelon.checkpoint.state_tree import Node

FORMAT = 2
FIRST_FORMAT = 1
STATE_FILE = "state.json"
_HEAD = b'{"checksum":"'
_DIGITS = 16
_TREE = b',"tree":'
_END = b"}\n"


class Damaged(Exception):
    """The reason why a checkpoint cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All of a checkpoint but its tensors. `tree` is that of format 1, the other trees are of format 2."""

    step: int
    parts: Sequence[PartFacts]
    common: Node = None
    lead: Node = None
    workers: Sequence[Node] = ()
    tree: Node = None
    figures: Mapping[str, float] = field(default_factory=dict)
    format: int = FORMAT

    def encode(self) -> bytes:
        """The file's bytes."""
        facts = {
            "format": self.format,
            "step": self.step,
            "figures": dict(self.figures),
            "parts": [[part.file, part.size_bytes, part.xxh3] for part in self.parts],
        }
        tree = {"common": self.common, "lead": self.lead, "workers": list(self.workers)}
        rest = b'",' + json.dumps(facts)[1:-1].encode() + _TREE
        rest += json.dumps(tree, allow_nan=False, separators=(",", ":")).encode("ascii") + _END
        return _HEAD + xxhash.xxh3_64_hexdigest(rest).encode() + rest

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """The manifest in a file's bytes; raises Damaged with the reason."""
        facts, tree = _checked(data)
        if facts["format"] == FIRST_FORMAT:
            part = PartFacts(
                file="tensors.safetensors", size_bytes=facts["tensors_bytes"], xxh3=facts["tensors_xxh3"]
            )
            return cls(step=facts["step"], parts=[part], tree=json.loads(tree), format=FIRST_FORMAT)
        if facts["format"] != FORMAT:
            reads = f"{FIRST_FORMAT} and {FORMAT}"
            raise Damaged(f"it has format {facts['format']}; this version of Echelon reads formats {reads}")
        trees: dict[str, Any] = json.loads(tree)
        return cls(
            step=facts["step"],
            figures=facts["figures"],
            parts=[PartFacts(file=file, size_bytes=size, xxh3=xxh3) for file, size, xxh3 in facts["parts"]],
            **trees,
        )


def figures_in(data: bytes) -> dict[str, float]:
    """The figures of a checkpoint, without its trees; none if the file is damaged."""
    try:
        facts, _ = _checked(data)
    except (Damaged, ValueError, KeyError):
        return {}
    return dict(facts.get("figures", {}))


def _checked(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The facts, and the tree's JSON."""
    head, rest = data[: len(_HEAD) + _DIGITS], data[len(_HEAD) + _DIGITS :]
    if head != _HEAD + xxhash.xxh3_64_hexdigest(rest).encode():
        raise Damaged(f"{STATE_FILE} is truncated or damaged: its checksum differs")
    written, _, tree = data.partition(_TREE)
    facts: dict[str, Any] = json.loads(written + b"}")
    return facts, tree.removesuffix(_END)
