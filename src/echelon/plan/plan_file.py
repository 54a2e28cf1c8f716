"""A plan's file as a person reads and edits it: one line for each worker, and comments.

`plan_text` writes it, `parse_plan` reads it; `check_file.py` says what is wrong with an edited one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import tomli_w

from echelon.config.toml_text import read_toml
from echelon.config.units import show_seconds
from echelon.plan.plan import Plan, WorkerPlan

_HEAD = """\
# A plan: `echelon run --plan FILE SCRIPT` or `echelon train --plan FILE` follows it.
# It may be edited: a run checks it first, and names each contradiction with its line.
"""
_CHOICES = ("transport", "collective", "codec", "sync", "verify", "overlap", "factors", "replicas")


def parse_plan(text: str) -> Plan:
    """The plan of a text that was checked; what it does not say is as by default."""
    values = read_toml(text)
    workers = [{"rank": rank, **worker} for rank, worker in enumerate(values["workers"])]
    workers.sort(key=lambda worker: int(worker["rank"]))
    return msgspec.convert({"run": "", **values, "workers": workers}, Plan)


def plan_text(plan: Plan) -> str:
    """The plan as TOML."""
    lines = [_HEAD]
    if plan.batch is not None:
        lines.append(f"batch = {plan.batch}  # samples of all workers together in a step")
    lines += [_pair(name, getattr(plan, name)) for name in _CHOICES]
    lines.append(_pair("adapt_shares", plan.adapt_shares) + "  # whether shares follow measured speeds")
    if plan.servers:
        lines.append(_pair("servers", list(plan.servers)))
    if plan.groups:
        lines.append(_pair("groups", plan.groups) + "  # ranks that sum together first")
    weights = "samples of the batch" if plan.batch is not None else "parts of a batch, relative to others"
    lines += ["", f"# Ranks follow this order; weights are {weights}.", "workers = ["]
    lines += [f"    {_inline(_worker(worker))}," for worker in plan.workers]
    lines.append("]")
    lines += _facts(plan)
    return "\n".join(lines) + "\n"


def _worker(worker: WorkerPlan) -> dict[str, Any]:
    """What is to be said of a worker."""
    whole = float(worker.weight).is_integer()
    values: dict[str, Any] = {"rank": worker.rank, "node": worker.node}
    values["weight"] = int(worker.weight) if whole else worker.weight
    values["threads"] = worker.threads
    optional = {"speed": 1.0, "delay": "", "site": "", "node_speed": 1.0, "link": "", "memory": ""}
    for name, default in optional.items():
        if getattr(worker, name) != default:
            values[name] = getattr(worker, name)
    return values


def _facts(plan: Plan) -> list[str]:
    """What the plan was made from, and what is expected of it."""
    lines = []
    if plan.uplinks:
        lines += ["", "# Links between sites.", "uplinks = ["]
        lines += [f"    {_inline(_known(msgspec.to_builtins(uplink)))}," for uplink in plan.uplinks]
        lines.append("]")
    if plan.memory is not None:
        lines += ["", "# What a worker needs, and for each sample of its share."]
        lines.append(f"memory = {_inline(msgspec.to_builtins(plan.memory))}")
    if plan.left_out:
        lines += ["", "# Nodes that cost more than they bring.", "left_out = ["]
        lines += [f"    {_inline({'node': out.node, 'why': out.why})}," for out in plan.left_out]
        lines.append("]")
    if plan.candidates:
        lines += ["", "# What else was considered.", "candidates = ["]
        lines += [f"    {_inline(_known(msgspec.to_builtins(one)))}," for one in plan.candidates]
        lines.append("]")
    if plan.predicted is not None:
        lines += ["", f"[predicted]  # {show_seconds(plan.predicted.step_s)} for a step"]
        lines += [_pair(*item) for item in _known(msgspec.to_builtins(plan.predicted)).items()]
    if plan.reasons:
        lines += ["", "[reasons]", *(_pair(*item) for item in plan.reasons.items())]
    return lines


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, "", [], (), {})}


def _pair(key: str, value: Any) -> str:
    """A key and its value on one line."""
    if isinstance(value, list | tuple):
        items = ", ".join(_pair("x", item).removeprefix("x = ") for item in value)
        return f"{tomli_w.dumps({key: 0}).strip().removesuffix(' = 0')} = [{items}]"
    if isinstance(value, float):
        value = float(f"{value:.6g}")
    return tomli_w.dumps({key: value}).strip()


def _inline(values: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(_pair(key, value) for key, value in values.items()) + " }"
