"""What is the difference between two steps made of, in plain words? Pure."""

from __future__ import annotations

from echelon.bench.step import COMMUNICATION, COMPUTING, UPDATE, WAITING, StepComparison

_SAME = 0.03  # within this part of a step, two measurements are called the same

ABOUT = {
    COMPUTING: "forward and backward, until the worker's last gradient",
    WAITING: "from then until the slowest worker has its last gradient",
    COMMUNICATION: "what backward did not hide: from then until backward() returns",
    UPDATE: "the optimizer's step",
}


def verdict(found: StepComparison) -> str:
    """One sentence: who is faster, and by how much."""
    ratio = found.ratio()
    if abs(ratio - 1) <= _SAME:
        return f"{found.name}: a step takes as long with Echelon as with DDP ({ratio:.2f} of its time)."
    word = "shorter" if ratio < 1 else "longer"
    return f"{found.name}: a step is {word} with Echelon: {ratio:.2f} of DDP's time."


def difference(found: StepComparison) -> list[str]:
    """Where the time goes that one side takes more than the other, the largest part first."""
    ours, theirs = found.sides["echelon"], found.sides["ddp"]
    gaps = {name: ours.parts[name] - theirs.parts[name] for name in ours.parts}
    least_s = _SAME / 3 * theirs.step_s
    lines = [
        f"{name}: {_ms(abs(gap))} {'less' if gap < 0 else 'more'} with Echelon ({ABOUT[name]})"
        if name in ABOUT
        else f"{name}: {_ms(abs(gap))} {'less' if gap < 0 else 'more'} with Echelon"
        for name, gap in sorted(gaps.items(), key=lambda pair: -abs(pair[1]))
        if abs(gap) >= least_s
    ]
    alone = found.sides.get("alone")
    if alone is not None:
        lines += [_over_computing(side, found) for side in ("ddp", "echelon")]
    return lines


def _over_computing(side: str, found: StepComparison) -> str:
    """What a side takes longer than the same step without communication."""
    name = {"ddp": "DDP", "echelon": "Echelon"}[side]
    alone, one = found.sides["alone"], found.sides[side]
    extra_s = one.step_s - alone.step_s
    hooks_s = one.parts[COMPUTING] - alone.parts[COMPUTING]
    if extra_s <= 0:
        return f"{name} takes {_ms(-extra_s)} less than the same step without any communication"
    told = (
        f"{name} takes {_ms(extra_s)} more than the same step without communication: "
        f"{_ms(one.parts[WAITING])} of waiting for others, "
        f"{_ms(one.parts[COMMUNICATION])} of communication "
    )
    if hooks_s >= 0:
        return told + f"and {_ms(hooks_s)} of computing (hooks, copies, cores shared with communication)"
    return told + f"less {_ms(-hooks_s)} of computing"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
