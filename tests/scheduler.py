"""Which worker of pytest-xdist runs which test, and when: `make test` runs `pytest -n 4`.

The tests of one file run on one worker, so that a fixture of a module is made once. Files that take long
come first, so that no worker is left with a long one at the end. The tests of `ALONE` measure links and
shares of the processor: they run on one worker, one after the other, when all others are done.
"""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

ALONE = tuple(
    f"tests/emulated/test_{name}.py"
    for name in ("engine_in_lab", "lab", "lab_adaptation", "lab_faults", "lab_variation", "probe_in_lab")
)
LONG_FIRST = (
    "tests/conformance/test_launchers.py",
    *(
        f"tests/{folder}/"
        for folder in ("docs", "examples", "emulated", "multiprocess", "parity", "conformance", "unit")
    ),
)
_ALONE_SCOPE = "alone"


class FilesThenAlone(LoadFileScheduling):
    """Files by folder, in the order of LONG_FIRST; then the tests of ALONE."""

    def _split_scope(self, nodeid: str) -> str:
        return _ALONE_SCOPE if nodeid.startswith(ALONE) else str(super()._split_scope(nodeid))

    def _assign_work_unit(self, node: Any) -> None:
        """Assign the next unit of the sorted queue."""
        for scope in sorted(self.workqueue, key=_rank):
            self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)

    def _reschedule(self, node: Any) -> None:
        """Called when a worker has finished a test: has it enough to do?"""
        if list(self.workqueue) == [_ALONE_SCOPE]:
            busy = [one for one in self.nodes if self._pending_of(self.assigned_work[one]) > 0]
            if any(not one.shutting_down for one in self.nodes if one is not node):
                node.shutdown()  # it still does what it has; another worker will do the rest
                return
            if any(one is not node for one in busy):
                return
        super()._reschedule(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """The last worker waits for all others: ask for it whenever one of them is done."""
        super().mark_test_complete(node, item_index, duration)
        if list(self.workqueue) == [_ALONE_SCOPE]:
            for one in self.nodes:
                if not one.shutting_down:
                    self._reschedule(one)


def _rank(scope: str) -> tuple[int, str]:
    folders = [folder for folder in LONG_FIRST if scope.startswith(folder)]
    if scope == _ALONE_SCOPE:
        return (len(LONG_FIRST) + 1, scope)
    return (LONG_FIRST.index(folders[0]) if folders else len(LONG_FIRST), scope)
