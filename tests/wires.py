"""Several workers' loops in one process, each connected with each by a pair of sockets."""

from __future__ import annotations

import socket
import threading
from itertools import combinations

import torch

from echelon.comm.schedule.collective import COLLECTIVES
from echelon.comm.wire.connection import Connection
from echelon.comm.wire.exchange import Exchange
from echelon.comm.wire.loop import CHANNEL_BITS, Loop
from echelon.comm.wire.seals import Keys

VIEW = bytes(range(16))


def keys_of(rank, peer):
    """The keys that the two have for each other, as if after a handshake."""
    there, back = (bytes([one]) * 16 + bytes([other]) * 16 for one, other in ((rank, peer), (peer, rank)))
    return Keys(sending=there, receiving=back)


class Wires:
    """`loops` by rank. Close it, also after a failure."""

    def __init__(self, size, *, frame_bytes=256 * 1024, buffer_bytes=None, tcp=False, silent=()):
        """With `tcp`, over loopback; `silent` ranks are connected, but their connections are not served."""
        self.size = size
        self.names = [f"rank {rank} on n{rank}" for rank in range(size)]
        self.ends = {rank: {} for rank in range(size)}
        for low, high in combinations(range(size), 2):
            pair = _over_tcp() if tcp else socket.socketpair()
            for rank, peer, sock in zip((low, high), (high, low), pair, strict=True):
                if buffer_bytes:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
                self.ends[rank][peer] = Connection(
                    sock,
                    view=VIEW,
                    peer=self.names[peer],
                    keys=keys_of(rank, peer),
                    frame_bytes=frame_bytes,
                )
        self._silent = silent
        names = dict(enumerate(self.names))
        self.loops = [
            Loop(self.ends[rank], names, me=self.names[rank]) if rank not in silent else None
            for rank in range(size)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        closing = [threading.Thread(target=loop.close) for loop in self.loops if loop is not None]
        for thread in closing:
            thread.start()
        for rank in self._silent:
            for connection in self.ends[rank].values():
                connection.sock.close()
        for thread in closing:
            thread.join()

    def make(self, rank, flat, schedule, *, number=1, channel=1, op="sum", deadline_s=90.0, priority=0):
        """One worker's part, not yet submitted."""
        return Exchange(
            channel << CHANNEL_BITS | number,
            flat,
            schedule,
            rank=rank,
            op=op,
            deadline_s=deadline_s,
            priority=priority,
        )

    def start(self, rank, flat, collective="ring", **options):
        """One worker's part of an all-reduce in flight."""
        schedule = COLLECTIVES.build(collective).schedule(rank, self.size, flat.numel())
        exchange = self.make(rank, flat, schedule, **options)
        self.loops[rank].submit(exchange)
        return exchange

    def kill(self, rank):
        """Let a worker's connections break, as when its process is killed."""
        for connection in self.ends[rank].values():
            connection.tell = lambda notice: None  # its loop lives on, and must not have the last word
        for connection in self.ends[rank].values():
            connection.sock.shutdown(socket.SHUT_RDWR)


def _over_tcp():
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        return one, door.accept()[0]


def values(rank, length, dtype=torch.float32, seed=0):
    """Numbers that add up exactly in every type, for a few workers."""
    made = torch.Generator().manual_seed(seed * 100 + rank)
    return torch.randint(0, 8, (length,), generator=made).to(dtype)
