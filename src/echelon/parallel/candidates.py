"""Which layouts does `auto` consider for so many workers? Pure.

Every dimension that spreads a model, alone and with data parallelism or shards over the rest. Pipelines
have stages on neighbours or between sites, and micro-batches enough that stages wait for a small part of a
step. Of each, other schedules come right after 1F1B.
"""

from __future__ import annotations

_MICRO_A_STAGE = 4
_USUAL = "schedule=1f1b"
_OTHERS = ("schedule=filled", "schedule=1f1b, ahead=1", "schedule=interleaved, chunks=2")


def candidate_layouts(workers: int, *, predicted: bool = True) -> list[str]:
    """The layouts, the simplest first; those that have to be tried, not `predicted`, are fewer."""
    if workers < 2:
        return ["data"]
    others = _OTHERS if predicted else ()
    found = ["data", _pipeline(workers), *(_pipeline(workers, one) for one in others)]
    found += ["sharded(level=1)", "sharded(level=3)"]
    halves = [stages for stages in range(2, workers) if workers % stages == 0]
    if halves:
        stages = min(halves, key=lambda one: abs(one * one - workers))
        usual, *rest = (_pipeline(stages, one) for one in (_USUAL, *others))
        found += [f"{usual} * data", f"data * {usual}"]
        found += [text for one in rest for text in (f"{one} * data", f"data * {one}")]
        shards = ("sharded(level=1)", "sharded(level=3)") if predicted else ()
        found += [f"{usual} * {one}" for one in shards]
    return found


def _pipeline(stages: int, schedule: str = _USUAL) -> str:
    kind, *options = schedule.split(", ")
    told = ", ".join([f"stages={stages}", kind, f"micro={_MICRO_A_STAGE * stages}", *options])
    return f"pipeline({told})"
