"""What the checks of `--verify` found, in one line for the end of a run and for its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from echelon.observe.events import CorruptionFound, Verified

_MOST_KEPT = 100


class VerifySummary(msgspec.Struct, frozen=True, kw_only=True):
    """How often each check compared, how many findings led to which action, and the first ones in words."""

    compared: Mapping[str, int] = {}
    actions: Mapping[str, int] = {}
    findings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """One line: what was found, or that nothing was."""
        made = ", ".join(f"{name} {count:,} times" for name, count in self.compared.items())
        ran = f"checks compared: {made}" if made else "checks ran"
        if not self.findings:
            return f"{ran}; they found nothing"
        counted = ", ".join(f"{count:,} {action}" for action, count in self.actions.items())
        number = sum(self.actions.values())
        what = "1 problem" if number == 1 else f"{number:,} problems"
        return f"{ran}; they found {what} ({counted}), first: {self.findings[0]}"


class VerifyTally:
    """Takes events one by one."""

    def __init__(self) -> None:
        self._compared: Mapping[str, int] = {}
        self._ran = False
        self._actions: Counter[str] = Counter()
        self._findings: list[str] = []

    def add(self, event: CorruptionFound | Verified) -> None:
        """Take one event into account."""
        self._ran = True
        if isinstance(event, Verified):
            self._compared = event.compared
            return
        self._actions[event.action] += 1
        if len(self._findings) < _MOST_KEPT:
            self._findings.append(event.text)

    def summary(self) -> VerifySummary | None:
        """None if there were no checks."""
        if not self._ran:
            return None
        return VerifySummary(
            compared=self._compared, actions=dict(self._actions), findings=tuple(self._findings)
        )


def verify_line(found: VerifySummary | None) -> str:
    """The line for the closing text; empty without checks."""
    return f"verify: {found.text}" if found is not None else ""
