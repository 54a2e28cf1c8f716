"""A real sshd on this machine, which answers under two names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sshd
from engines import MARK, Engine

SOURCE = Path(__file__).parents[2] / "src"


class SshEngine(Engine):
    """The hosts a and b."""

    name = "ssh"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = sshd.SshServer(folder, SOURCE, {MARK: str(folder)})

    @classmethod
    def missing(cls) -> str:
        return sshd.MISSING

    @property
    def on(self) -> str:
        return self.server.launcher

    def settings(self, workers: int) -> dict[str, Any]:
        first = workers - workers // 2
        return {"on": self.on, "hosts": f"a:{first},b:{workers // 2}" if workers > 1 else "a:1"}

    def close(self) -> None:
        self.server.close()
