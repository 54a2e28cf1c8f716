"""Is it cheaper to send a linear layer's factors than its weight gradient?

The weight gradient of an M x N layer is a sum over rows, one for each sample: outer products of an output
gradient (M values) and an input (N values). Workers may sum their gradients, or send each other their
rows and sum all outer products themselves (sufficient-factor broadcasting). Of P workers, the one with the
most rows, K of them, sends

    dense      2 (P-1)/P M N values, as in a ring
    factors    (P-1) K (M+N) values

so factors send less while K < 2 M N / (P (M+N)). A worker that receives factors also multiplies the other
workers' rows: 2 M N operations each. The dense gradient shares a bucket and is charged no latency; factors
are messages of their own and are charged one step of P-1 messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.comm.schedule.cost import LinkCost, Work, ring_work
from echelon.config.choices import FactorRule
from echelon.config.units import show_bytes, show_seconds

_ITEM_BYTES = (4, 8)  # float32 and float64: narrower rows would round before they are multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """A linear layer in a step: each worker's rows, and its shape."""

    name: str
    rows_of: tuple[int, ...]
    inputs: int
    outputs: int
    item_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorChoice:
    """Whether a layer's factors are sent, what both forms cost the slowest worker, and the reason."""

    factors: bool
    dense_bytes: float
    factor_bytes: float
    dense_s: float
    factor_s: float
    reason: str


def decide(
    layer: LinearShape, link: LinkCost, *, flops_per_s: float, rule: FactorRule, obstacle: str = ""
) -> FactorChoice:
    """Factors or the dense gradient for this layer; `flops_per_s` is the slowest worker's.

    With one worker, with another type than float32 and float64, or with an `obstacle`, a layer stays dense
    by any rule. A layer without rows stays dense unless the rule is "always".
    """
    dense, factors = _dense_work(layer), _factor_work(layer)
    dense_s = dense.seconds(link, 0.0)
    factor_s = factors.seconds(link, 0.0) + _extra_flops(layer) / flops_per_s
    obstacle = obstacle or _obstacle(layer, rule)
    chosen = not obstacle and (rule == "always" or (rule == "auto" and factor_s < dense_s))
    if obstacle:
        reason = f"dense, {obstacle}"
    else:
        ways = [("factors send", factors, factor_s), ("dense sends", dense, dense_s)]
        (verb, mine, mine_s), (_, other, other_s) = ways if chosen else reversed(ways)
        reason = (
            f"{verb} {show_bytes(mine.wire_bytes)} instead of {show_bytes(other.wire_bytes)}, "
            f"{show_seconds(mine_s)} instead of {show_seconds(other_s)}"
        )
    asked = "" if obstacle or rule == "auto" else f" ({rule} factors, as asked)"
    return FactorChoice(
        factors=chosen,
        dense_bytes=dense.wire_bytes,
        factor_bytes=factors.wire_bytes,
        dense_s=dense_s,
        factor_s=factor_s,
        reason=f"{layer.name} {layer.outputs}x{layer.inputs}: {reason}{asked}",
    )


def _dense_work(layer: LinearShape) -> Work:
    whole_bytes = layer.outputs * layer.inputs * layer.item_bytes
    return Work(wire_bytes=ring_work(len(layer.rows_of), whole_bytes).wire_bytes)


def _factor_work(layer: LinearShape) -> Work:
    others = len(layer.rows_of) - 1
    if not others:
        return Work()
    row_bytes = (layer.outputs + layer.inputs) * layer.item_bytes
    wire_bytes = others * max(layer.rows_of) * row_bytes
    return Work(steps=1, further_messages=others - 1, wire_bytes=wire_bytes)


def _extra_flops(layer: LinearShape) -> float:
    """Those of the worker with the fewest rows: it multiplies the most rows of others."""
    return 2.0 * (sum(layer.rows_of) - min(layer.rows_of)) * layer.outputs * layer.inputs


def _obstacle(layer: LinearShape, rule: FactorRule) -> str:
    if len(layer.rows_of) == 1:
        return "alone: nothing to send"
    if layer.item_bytes not in _ITEM_BYTES:
        return "neither float32 nor float64"
    if rule == "auto" and not any(layer.rows_of):
        return "no rows were seen"
    return ""
