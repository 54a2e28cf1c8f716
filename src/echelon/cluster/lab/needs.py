"""What a lab needs and this machine lacks, for errors and for `echelon doctor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from echelon.cluster.lab.commands import run, tool
from echelon.cluster.lab.cpu import find_controller
from echelon.errors import LabError

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "bridge": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
}
_NET_ADMIN, _SYS_ADMIN = 12, 21  # capability numbers


def missing() -> list[str]:
    """The missing requirements, such as 'root' or 'the command tc (package iproute2)'."""
    if not sys.platform.startswith("linux"):
        return ["Linux"]
    lacking = [] if os.geteuid() == 0 else ["root"]
    if os.geteuid() == 0 and not _may(_NET_ADMIN, _SYS_ADMIN):
        lacking.append("the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN (this is a restricted container)")
    lacking += [f"the command {name} (package {of})" for name, of in _TOOLS.items() if tool(name) is None]
    if not Path("/proc/self/ns/net").exists():
        lacking.append("a kernel with network namespaces")
    controller = find_controller()
    if controller is None:
        lacking.append("a kernel with CPU quotas (the cpu control group, mounted)")
    elif os.geteuid() == 0 and not os.access(controller.root, os.W_OK):
        lacking.append(f"write access to {controller.root}")
    if not lacking and not _kernel_has("tbf", "rate 1gbit burst 128kb limit 1mb"):
        lacking.append("a kernel with traffic shaping (sch_tbf)")
    return lacking


def check(lab: str) -> None:
    """Raise LabError if a requirement is missing."""
    lacking = missing()
    if lacking:
        raise LabError(
            f"the lab needs {', '.join(lacking)}",
            where=f"lab {lab}",
            fix="run as root, or use --speed and --delay, which need no root"
            if lacking == ["root"]
            else "install or allow these, or use --speed and --delay, which need no lab",
        )


def has_netem() -> bool:
    """Whether the kernel can delay packets; tried in a temporary namespace."""
    return _kernel_has("netem", "delay 1ms")


def _kernel_has(qdisc: str, options: str) -> bool:
    tc = tool("tc")
    if tc is None:
        return False
    words = ["unshare", "--net", tc, *f"qdisc add dev lo root {qdisc} {options}".split()]
    try:
        run(words, doing=f"try {qdisc}")
    except LabError:
        return False
    return True


def _may(*capabilities: int) -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            held = int(line.split()[1], 16)
            return all(held >> number & 1 for number in capabilities)
    return False
