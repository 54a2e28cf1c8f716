"""Checks whether clusters can be emulated here. Training does not need it, so problems are only notes."""

from __future__ import annotations

from collections.abc import Iterator

from echelon.cluster.checkup.finding import Finding
from echelon.cluster.lab import needs


def emulation() -> Iterator[Finding]:
    """The requirements of `echelon lab`, and whether the kernel can delay packets."""
    lacking = needs.missing()
    if lacking:
        yield Finding(
            level="note",
            topic="lab",
            subject="emulation",
            text=f"clusters cannot be emulated, missing: {', '.join(lacking)}",
            fix="run the lab as root"
            if lacking == ["root"]
            else "install or allow these; all other commands work without them",
        )
        return
    text = "root, ip, tc, nsenter, namespaces, shaping and CPU quotas are available"
    yield Finding(level="ok", topic="lab", subject="emulation", text=text)
    if needs.has_netem():
        yield Finding(level="ok", topic="lab", subject="latency", text="the kernel has netem")
        return
    yield Finding(
        level="note",
        topic="lab",
        subject="latency",
        text="the kernel has no netem: link rates are emulated, latencies are not, jitter and loss roughly",
        fix="load the module sch_netem, if this kernel has it",
    )
