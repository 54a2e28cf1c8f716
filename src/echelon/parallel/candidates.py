"""Which layouts does `auto` consider for so many workers? Pure.

Every dimension that spreads a model, alone and with data parallelism over the rest. Pipelines have stages
on neighbours or between sites, and micro-batches enough that stages wait for a small part of a step.
"""

from __future__ import annotations

_MICRO_A_STAGE = 4


def candidate_layouts(workers: int) -> list[str]:
    """The layouts to try, the simplest first."""
    if workers < 2:
        return ["data"]
    found = ["data", _pipeline(workers), "sharded(level=1)", "sharded(level=3)"]
    halves = [stages for stages in range(2, workers) if workers % stages == 0]
    if halves:
        stages = min(halves, key=lambda one: abs(one * one - workers))
        found += [f"{_pipeline(stages)} * data", f"data * {_pipeline(stages)}"]
    return found


def _pipeline(stages: int) -> str:
    return f"pipeline(stages={stages}, schedule=1f1b, micro={_MICRO_A_STAGE * stages})"
