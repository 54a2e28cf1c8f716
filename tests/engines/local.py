"""Workers on this machine: nothing else is needed."""

from __future__ import annotations

from engines import Engine


class LocalEngine(Engine):
    """No agent, no engine."""

    name = "local"

    @classmethod
    def missing(cls) -> str:
        return ""
