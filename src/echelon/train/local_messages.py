"""What the processes of a trial on one machine are told, and what they answer."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import msgspec

from echelon.errors import LaunchError
from echelon.parallel.local_way import LocalWay

M = TypeVar("M")


class LocalJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained: `maker`, a function "module:name", makes a TrialModel of `options`."""

    name: str
    maker: str
    options: dict[str, Any]
    batch: int


class BeginTrial(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Make the model and be process `rank` of a way; ranks meet at `port`."""

    job: LocalJob
    way: LocalWay
    rank: int
    port: int
    cores: tuple[int, ...] = ()  # pinned to these, if any


class TakeTurn(msgspec.Struct, frozen=True, kw_only=True, tag="turn"):
    """Train so many steps of `batch` samples in all."""

    steps: int
    batch: int


class EndTrial(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """End the process."""


class TurnTaken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """How long the turn's steps took together; 0 after the beginning."""

    seconds: float


class TrialFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The way cannot be measured, and why."""

    why: str


Asked = BeginTrial | TakeTurn | EndTrial
Answer = TurnTaken | TrialFailed


def send(to: Connection, letter: Asked | Answer) -> None:
    """Send a letter."""
    to.send_bytes(msgspec.msgpack.encode(letter))


def next_asked(of: Connection) -> Asked:
    """What the process is to do next; it waits without a limit, for as long as the launcher lives."""
    asked: Asked = msgspec.msgpack.decode(of.recv_bytes(), type=Asked)
    return asked


def answer(of: Connection, who: str, deadline: float) -> Answer:
    """The answer of one process, until the monotonic clock shows `deadline`."""
    if not of.poll(max(0.0, deadline - time.monotonic())):
        raise LaunchError(
            f"{who} did not answer in time",
            where="trial on this machine",
            fix="give a smaller --batch, or a machine with less load",
        )
    try:
        told: Answer = msgspec.msgpack.decode(of.recv_bytes(), type=Answer)
    except EOFError:
        return TrialFailed(why=f"{who} ended; it may have had too little memory")
    return told
