"""Opens a table on the servers: what they keep, first weights and states, and memory that they share.

It also fetches the states back.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint import state_tree
from echelon.comm.wire.exchange import as_bytes
from echelon.errors import ConfigError, LaunchError
from echelon.server.channel import Request, ServerChannel
from echelon.server.layout import TableLayout
from echelon.server.mail import OwnSegment
from echelon.server.protocol import (
    FetchedState,
    FetchState,
    OpenTable,
    Seeded,
    SeedState,
    SeedWeights,
    ShardShared,
    ShareShard,
    TableOpened,
)
from echelon.server.shared_table import SharedShard

_NOTHING = memoryview(b"")
_log = logging.getLogger(__name__)


def open_table(
    channel: ServerChannel, opening: OpenTable, layout: TableLayout, states: dict[Tensor, Any]
) -> None:
    """Tell the servers what they keep, then send them the parameters' weights and optimizer states."""
    requests = [(server, opening, _NOTHING) for server in channel.servers]
    for _, answer, _ in channel.request(requests, TableOpened):
        if isinstance(answer, TableOpened) and answer.problem:
            raise ConfigError(answer.problem, where="--sync")
    # Wait until the servers have all of it, or other workers would get zeros.
    channel.request(_seeds(channel, opening, layout, states), Seeded)


@torch.no_grad()
def _seeds(
    channel: ServerChannel, opening: OpenTable, layout: TableLayout, states: dict[Tensor, Any]
) -> list[Request]:
    parts = layout.split_states(states)
    flats = layout.new_flats()
    layout.to_shards(flats, [p.detach() for p in layout.parameters])
    table, servers = opening.table, channel.servers
    requests: list[Request] = []
    for index, flat in enumerate(flats):
        if not flat.numel():
            continue
        for copy in range(opening.replicas + 1):
            server = servers[(index + copy) % len(servers)]
            requests.append((server, SeedWeights(table=table, shard=index), as_bytes(flat)))
            if parts:
                packed = memoryview(state_tree.pack({"parts": parts[index]}))
                requests.append((server, SeedState(table=table, shard=index), packed))
    return requests


def share_shards(channel: ServerChannel, table: int, layout: TableLayout) -> dict[int, SharedShard]:
    """Share memory for pushes and weights with the servers of this machine; returns it by shard.

    Servers that it cannot be shared with get pieces over TCP.
    """
    made: dict[int, OwnSegment] = {}
    try:
        for server in channel.near:
            index = channel.servers.index(server)
            if layout.shards[index].length:
                made[index] = OwnSegment(SharedShard.size_bytes(layout.shards[index].length, layout.dtype))
    except LaunchError as error:
        _log.warning("%s; pushes to servers of this machine go over TCP instead", error.message)
    try:
        requests: list[Request] = [
            (channel.servers[index], ShareShard(table=table, shard=index, memory=one.shared), _NOTHING)
            for index, one in made.items()
        ]
        mapped = {
            channel.servers.index(server)
            for server, answer, _ in channel.request(requests, ShardShared)
            if isinstance(answer, ShardShared) and answer.mapped
        }
    finally:
        for one in made.values():
            one.close()
    return {
        index: SharedShard(one.memory, layout.shards[index].length, layout.dtype)
        for index, one in made.items()
        if index in mapped
    }


def fetch_states(channel: ServerChannel, table: int, layout: TableLayout) -> dict[Tensor, Any]:
    """The optimizer states of all parameters, from the servers."""
    servers, message = channel.servers, FetchState(table=table)
    kept = [index for index, shard in enumerate(layout.shards) if shard.length]
    answers = channel.request([(servers[index], message, _NOTHING) for index in kept], FetchedState)
    packed = sorted((servers.index(peer), bytes(payload)) for peer, _, payload in answers)
    return layout.join_states((index, state_tree.unpack(state)["parts"]) for index, state in packed)
