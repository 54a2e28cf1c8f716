"""The section on the stages of a pipeline: who has which layers, who waits for whom, and memory."""

from __future__ import annotations

from collections.abc import Sequence

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.page.markup import about, safe, section, table
from echelon.observe.stages import StageFigures, stages_verdict


def stages_section(stages: Sequence[StageFigures]) -> str:
    """A row for each stage; empty without a pipeline."""
    if not stages:
        return ""
    head = ["rank", "replica", "stage", "layers", "a micro-batch", "predicted", "waits", "for"]
    rows = [
        [
            f"{one.rank}",
            f"{one.replica}",
            f"{one.stage}",
            f"{one.layers}: {one.first} … {one.last}",
            show_seconds(one.micro_s),
            show_seconds(one.predicted_s) if one.predicted_s else "–",
            f"{100 * one.bubble:.0f} %",
            _awaited(one),
            show_bytes(one.memory_bytes),
            show_bytes(one.predicted_bytes) if one.predicted_bytes else "–",
        ]
        for one in stages
    ]
    remark = (
        "A micro-batch: the mean time of its passes, beside that of the layers as they were measured, one "
        "by one. Waits: the share of a batch's time in which a stage waits for another. Memory: the most "
        "that the process had above that without the model; predicted are parameters, gradients, states "
        "and activations."
    )
    said = stages_verdict(stages)
    verdict = f'<p class="verdict">{safe(said)}</p>' if said else ""
    return section(
        "Stages", verdict + table([*head, "memory", "predicted"], rows, words={3, 7}) + about(remark)
    )


def _awaited(one: StageFigures) -> str:
    parts = sorted(one.waits_s.items(), key=lambda item: -item[1])
    total_s = one.wait_s or 1.0
    return ", ".join(f"rank {rank} {100 * wait_s / total_s:.0f} %" for rank, wait_s in parts) or "–"
