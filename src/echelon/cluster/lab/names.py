"""The names of everything that a lab creates: a common prefix and the lab's short id.

    /run/netns/echl-1a2b3c4d.switch     the namespace of the bridges
    /run/netns/echl-1a2b3c4d-NODE       the namespace of a node
    .../echl-1a2b3c4d/node-NODE         the CPU group of a node
    /run/echelon-lab/echl-1a2b3c4d.*    the lab's state files

Everything with a lab's stem belongs to that lab; nothing else on the machine is ever touched.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

PREFIX = "echl"
NAMESPACES = Path("/run/netns")
STATES = Path("/run/echelon-lab")
INTERFACE = "eth0"


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one lab."""

    id: str
    prefix: str = PREFIX

    @property
    def stem(self) -> str:
        """The common beginning of all names."""
        return f"{self.prefix}-{self.id}"

    @property
    def switch(self) -> str:
        """The namespace of the bridges; the dot separates it from any node's."""
        return f"{self.stem}.switch"

    def namespace(self, node: str) -> str:
        """A node's namespace."""
        return f"{self.stem}-{node}"

    @property
    def state(self) -> Path:
        """The state file."""
        return STATES / f"{self.stem}.json"

    @property
    def hosts(self) -> Path:
        """The hosts file with the nodes' names."""
        return STATES / f"{self.stem}.hosts"

    def namespaces(self) -> list[str]:
        """The existing namespaces of this lab."""
        return [name for name in _entries(NAMESPACES) if stem_id(name, self.prefix) == self.id]

    def address(self, index: int) -> str:
        """A node's address; the second byte differs between labs, only to make them easy to tell apart."""
        return f"10.{int(self.id[:2], 16)}.{(index + 1) // 256}.{(index + 1) % 256}"


def short_id(run_id: str) -> str:
    """Eight characters that identify a run."""
    return hashlib.blake2s(run_id.encode(), digest_size=4).hexdigest()


def stem_id(name: str, prefix: str = PREFIX) -> str | None:
    """The id of the lab that a name belongs to; None if it belongs to no lab."""
    match = re.match(rf"{re.escape(prefix)}-([0-9a-f]{{8}})(?![^.-])", name)
    return match.group(1) if match else None


def hardware_address(index: int) -> str:
    """A node's Ethernet address, locally administered."""
    return f"02:ec:00:00:{index // 256:02x}:{index % 256:02x}"


def _entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
