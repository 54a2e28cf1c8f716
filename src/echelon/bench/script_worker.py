"""One worker of `echelon bench step --script`: runs a script and notes when its optimizer steps.

    python -m echelon.start.worker -m echelon.bench.script_worker FOLDER

The script may use Echelon, DDP or anything else: hooks of torch tell how long backward passes take, and
when an optimizer steps. The notes are written when there are enough steps, or when the script ends; the
launcher then ends the run.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from echelon.bench.script_notes import ScriptNote, ScriptStep, read_script_request, write_script_note
from echelon.start.worker import run_program


class _Timekeeper:
    """Notes the phases of each step."""

    def __init__(self, folder: Path, rank: int, wanted: int) -> None:
        self._folder, self._rank, self._wanted = folder, rank, wanted
        self._steps: list[ScriptStep] = []
        self._written = False
        self._last = time.perf_counter()
        self._backward_s = 0.0
        self._update_begun = 0.0
        self._plain = torch.autograd.backward

    def install(self) -> None:
        """Watch all optimizers and backward passes of this process."""
        torch.autograd.backward = self._backward
        register_optimizer_step_pre_hook(self._stepping)
        register_optimizer_step_post_hook(self._stepped)

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        self._plain(*args, **kwargs)
        self._backward_s += time.perf_counter() - begun

    def _stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._update_begun = time.perf_counter()

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        now = time.perf_counter()
        self._steps.append(
            ScriptStep(
                step_s=now - self._last,
                backward_s=self._backward_s,
                update_s=now - self._update_begun,
            )
        )
        self._last, self._backward_s = now, 0.0
        if len(self._steps) >= self._wanted:
            self.write()

    def write(self) -> None:
        """Write the notes, once."""
        if not self._written:
            self._written = True
            write_script_note(self._folder, ScriptNote(rank=self._rank, steps=self._steps))


def main() -> None:
    """Run the script of the folder that the command line names."""
    folder = Path(sys.argv[1])
    request = read_script_request(folder)
    keeper = _Timekeeper(folder, int(os.environ["RANK"]), request.steps)
    keeper.install()
    if request.beside:  # an edited copy of a script finds the modules beside the original
        sys.path.insert(0, request.beside)
    try:
        run_program(request.program)
    finally:
        keeper.write()


if __name__ == "__main__":
    main()
