"""Which gradients travel together, when are they ready, and in which form?

Buckets are packed as the reducer packs them, from the last layer to the first. A bucket is ready when its
lowest layer is. Linear layers may send factors, where that is cheaper; codecs make buckets smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from echelon.config.call import parse_call
from echelon.plan.job import JobProfile, Layer
from echelon.plan.predict.engine_costs import CodecCost, EngineCosts
from echelon.plan.predict.flows import Floats, Phases, gathered_phases, on_members, phases_of
from echelon.plan.predict.network import EXACT, CollectiveCost, SharedLinks
from echelon.plan.strategy import RunStrategy
from echelon.reduce.factors import LinearShape, decide
from echelon.reduce.packing import Item, assign, sizes

_LANES = 4
_LANE_BYTES = 1 << 20
_ITEM_BYTES = 4
_CODED_LEAST_BYTES = 1 << 20  # as buckets of encoded gradients: a quarter of the model, within limits
_CODED_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLoad:
    """One bucket: its form on the network, and what it costs besides.

    sent_bytes  the length of the buffer that the collective moves
    main_s      CPU seconds of the training thread to fill or encode it, by worker
    land_s      and to read it when it has arrived
    lanes       parts that are reduced at the same time
    """

    ready_at: float
    size_bytes: int
    sent_bytes: float
    parameters: int
    cost: CollectiveCost
    main_s: Floats
    land_s: Floats
    lanes: int = 1


def buckets_of(
    job: JobProfile,
    strategy: RunStrategy,
    network: SharedLinks,
    engine: EngineCosts,
    collective: CollectiveCost | None,
) -> list[BucketLoad]:
    """All buckets of a step in the order in which they are sent; `collective` replaces the strategy's."""
    factored = _factored(job, strategy, network, engine) if strategy.factors else {}
    dense = [(at, layer) for at, layer in enumerate(job.layers) if at not in factored]
    codec = codec_cost(strategy.codec, engine)
    made = [(at, load) for at, load in factored.items()]
    for part in _packed([layer for _, layer in dense], network, coded=codec is not None):
        held = [dense[index] for index in part]
        load = _dense([layer for _, layer in held], strategy, network, engine, collective, codec)
        made.append((min(at for at, _ in held), load))
    return [load for _, load in sorted(made, key=lambda pair: -pair[0])]


def _packed(layers: Sequence[Layer], network: SharedLinks, *, coded: bool) -> list[list[int]]:
    items = [Item(size_bytes=layer.size_bytes, kind=0) for layer in layers]
    total_bytes = sum(item.size_bytes for item in items)
    if coded:
        most = min(max(_CODED_LEAST_BYTES, total_bytes // 4), _CODED_MOST_BYTES)
        return assign(items, first_bytes=most, bucket_bytes=most)
    alone = len(set(network.node_names)) == 1
    size = network.size if network.size <= EXACT else 1 << (network.size.bit_length() - 1)
    first, rest = sizes(None if alone else network.slowest, size, total_bytes=total_bytes)
    return assign(items, first_bytes=first, bucket_bytes=rest)


def _dense(
    layers: Sequence[Layer],
    strategy: RunStrategy,
    network: SharedLinks,
    engine: EngineCosts,
    collective: CollectiveCost | None,
    codec: CodecCost | None,
) -> BucketLoad:
    size_bytes = sum(layer.size_bytes for layer in layers)
    buffer_bytes = size_bytes + _ITEM_BYTES * len(layers)  # and one flag for each parameter
    workers = np.ones(network.size)
    main_s, land_s = workers * engine.fill_s_per_byte * size_bytes, 0.0 * workers
    sent_bytes = float(buffer_bytes)
    cost = collective
    if codec is not None and parse_call(strategy.codec).name == "between" and strategy.groups:
        cost = network.of(_between(strategy, codec.smaller))
        main_s = workers * codec.encode_s_per_byte * size_bytes
        land_s = workers * codec.read_s_per_byte * size_bytes
    elif codec is not None:
        sent_bytes = size_bytes / codec.smaller
        main_s = workers * codec.encode_s_per_byte * size_bytes
        reads = {"gather": float(network.size), "scatter": 2.0, "sum": 1.0}[codec.travels]
        land_s = workers * reads * codec.read_s_per_byte * size_bytes
        if codec.travels == "gather":
            cost = network.of(gathered_phases([1.0] * network.size))
        elif codec.travels == "scatter":
            cost = network.of(phases_of("direct", network.size))
    if cost is None:
        cost = network.cost(strategy.collective, sent_bytes)
    return BucketLoad(
        ready_at=max(layer.ready_at for layer in layers),
        size_bytes=size_bytes,
        sent_bytes=sent_bytes,
        parameters=len(layers),
        cost=cost,
        main_s=main_s,
        land_s=land_s,
        lanes=min(_LANES, max(1, int(sent_bytes) // _LANE_BYTES)),
    )


def _between(strategy: RunStrategy, smaller: float) -> Phases:
    """Groups sum inside; what crosses from one to another is encoded."""
    sizes_text = [len(group) for group in strategy.groups]
    order = [rank for group in strategy.groups for rank in group]
    group_of = np.zeros(len(order), dtype=np.int64)
    for at, group in enumerate(strategy.groups):
        group_of[list(group)] = at
    return tuple(
        replace(
            phase,
            fractions=np.where(group_of[phase.senders] != group_of[phase.receivers], 1 / smaller, 1.0)
            * phase.fractions,
        )
        for phase in on_members(phases_of(f"hierarchical(sizes={sizes_text})", len(order)), order)
    )


def _factored(
    job: JobProfile, strategy: RunStrategy, network: SharedLinks, engine: EngineCosts
) -> dict[int, BucketLoad]:
    """The layers that send factors, by index."""
    found: dict[int, BucketLoad] = {}
    for at, layer in enumerate(job.layers):
        outputs, inputs = layer.factors
        if not outputs or network.size == 1:
            continue
        rows = tuple(share * layer.rows for share in strategy.shares)
        shape = LinearShape(
            name=layer.name, rows_of=rows, inputs=inputs, outputs=outputs, item_bytes=_ITEM_BYTES
        )
        slowest = min(node.speed for node in network.nodes)
        choice = decide(shape, network.slowest, flops_per_s=engine.flops_per_s * slowest, rule="auto")
        if not choice.factors:
            continue
        row_bytes = (outputs + inputs) * _ITEM_BYTES
        others = np.array([sum(rows) - own for own in rows], dtype=float)
        found[at] = BucketLoad(
            ready_at=layer.ready_at,
            size_bytes=layer.size_bytes,
            sent_bytes=float(row_bytes),
            parameters=1,
            cost=network.of(gathered_phases([float(count) for count in rows])),
            main_s=np.array(rows) * row_bytes * engine.fill_s_per_byte,
            land_s=2.0 * others * outputs * inputs / engine.flops_per_s,
        )
    return found


def codec_cost(codec: str, engine: EngineCosts) -> CodecCost | None:
    """What a codec costs; None without one. An unknown one is taken for one that helps a little."""
    call = parse_call(codec)
    if call.name == "between" and call.args and isinstance(call.args[0], str):
        call = parse_call(call.args[0])
    if call.name in ("none", "auto"):
        return None
    return engine.codecs.get(codec) or engine.codecs.get(call.name) or CodecCost(smaller=math.sqrt(2))
