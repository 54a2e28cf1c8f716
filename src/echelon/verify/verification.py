"""The contract of a check that `--verify` names, and the registry.

A check has options (a strategy like any other) and a part that takes place in every run, on every worker.
All workers take the same decisions from the same numbers, so none of them steps alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from echelon.config.registry import Registry, Strategy
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from echelon.comm.group import Group

_NOTHING = "none"
_BETWEEN = ";"
UNKNOWN = -1
"""The worker of a finding that cannot be assigned to one."""


class Verdict(IntEnum):
    """What becomes of a round. A higher one overrides a lower one."""

    FINE = 0
    REFUSE = 1  # nobody applies its gradients
    AGAIN = 2  # a worker's gradients were repaired: all workers reduce theirs again


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """What a check found. `action` is what was done: warned, refused, repaired, kept or stopped."""

    check: str
    worker: int
    tensor: str
    what: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRun:
    """What checks see of a run.

    group       all workers
    nodes       where each worker runs, by the rank that it had first
    copies      how many workers have the same samples
    weights     the weights that must be the same on all workers, by name
    optimizers  the prepared ones
    report      tells the user and the record; all workers call it with the same
    note        tells the user a sentence, once
    """

    group: Group
    nodes: Sequence[str]
    copies: int
    step: Callable[[], int]
    weights: Callable[[], list[tuple[str, Tensor]]]
    optimizers: list[Optimizer]
    report: Callable[[CheckFinding], None]
    note: Callable[[str], None]

    def name(self, slot: int) -> str:
        """How sentences call a worker, by the rank that it had first."""
        return f"rank {slot} on {node_of(self.nodes, slot)}" if slot >= 0 else "a worker"


def node_of(nodes: Sequence[str], slot: int) -> str:
    """Where a worker runs; those that have joined are where the last of the first workers is."""
    return nodes[min(slot, len(nodes) - 1)]


@dataclass(slots=True, kw_only=True)
class VerifiedRound:
    """A round whose sums have arrived and are not assigned yet: `p.grad` is still this worker's own.

    named    the parameters of the round, by name
    attempt  how often the round was repeated
    suspect  whether a check doubts it, so that others look closer
    slots    whose numbers these are, by row: the ranks that workers had first
    """

    named: list[tuple[str, nn.Parameter]]
    model: int
    step: int
    attempt: int = 0
    suspect: bool = False
    numbers: dict[str, list[list[int]]] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)


class ActiveVerification:
    """A check in a run, on one worker. All workers call the same methods in the same order."""

    def __init__(self, run: VerifiedRun) -> None:
        self.run = run
        self.done = 0  # how many comparisons were made

    def attach(self, model: nn.Module) -> None:
        """A model was prepared."""
        return

    def numbers(self, round_: VerifiedRound) -> list[int]:
        """What every worker is told of this worker's gradients, while they are in flight."""
        return []

    def judge(self, round_: VerifiedRound) -> Verdict:
        """Look at a round; `round_.numbers` are all workers', by rank."""
        return Verdict.FINE

    def settle(self, round_: VerifiedRound) -> Verdict:
        """All checks have looked at the round, and nothing is repeated."""
        return Verdict.FINE

    def stepped(self, step: int) -> None:
        """All workers have finished a step; `step` counts from 1."""
        return

    def vote(self) -> None:
        """Compare weights now: the run is about to compare, save or end."""
        return

    def state(self) -> dict[str, Any]:
        """What the next verdicts depend on besides gradients, for a worker that comes back or joins."""
        return {"done": self.done}

    def adopt(self, state: dict[str, Any]) -> None:
        """Take over another worker's."""
        self.done = state["done"]

    def remove(self) -> None:
        """Remove what `attach` installed."""
        return


class Verification(Strategy):
    """A check. Holds only its options.

    order       checks of lower order look at a round first
    in_rounds   it looks at each round's gradients, so `backward()` must wait for them
    repairs     it changes gradients and lets them be reduced again, which a codec's state does not allow
    comparing   it compares workers, and does nothing if there is only one
    """

    __slots__ = ()
    order: ClassVar[int] = 0
    in_rounds: ClassVar[bool] = True
    repairs: ClassVar[bool] = False
    comparing: ClassVar[bool] = False

    @property
    def copies(self) -> int:
        """How many workers have the same samples."""
        return 1

    def check(self, workers: int, others: Sequence[Verification]) -> None:
        """Raise ConfigError, with a fix, if the check cannot work beside these others."""
        return

    @abstractmethod
    def begin(self, run: VerifiedRun) -> ActiveVerification:
        """The check in one run."""


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
VERIFICATIONS: Registry[Verification] = Registry(
    "verify",
    Verification,  # type: ignore[type-abstract]
    "echelon.verify.checks",
)


def verifications(text: str, *, where: str = "--verify") -> tuple[Verification, ...]:
    """The checks that a text names: `gradients; weights(every=10)`. None for `none`."""
    texts = [part.strip() for part in text.split(_BETWEEN)]
    if texts in ([_NOTHING], [""]):
        return ()
    found = [VERIFICATIONS.build(part, where=where) for part in texts if part]
    names = [one.name for one in found]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise ConfigError(f"{twice} is given twice", where=where, fix="give each check once")
    return tuple(sorted(found, key=lambda one: one.order))


def check_verifications(
    text: str, *, workers: int, together: bool, overlap: str, coded: bool
) -> tuple[Verification, ...]:
    """Refuse checks that do not work in this run; returns those that have something to do.

    `together`: workers step together (sync full); `coded`: a codec writes their gradients.
    """
    asked = verifications(text)
    if not asked:
        return ()
    if workers > 1 and not together:
        raise ConfigError(
            f"verify {asked[0].name} compares workers that step together, and these do not",
            where="--verify",
            fix="use --sync full, or leave --verify out",
        )
    chosen = tuple(one for one in asked if workers > 1 or not one.comparing)
    for one in chosen:
        one.check(workers, chosen)
        refuse_combination(one, overlap=overlap, coded=coded, where="--verify")
    return chosen


def refuse_combination(one: Verification, *, overlap: str, coded: bool, where: str) -> None:
    """Refuse a check with an overlap or a codec that it does not work with."""
    if one.in_rounds and overlap == "step":
        raise ConfigError(
            f"verify {one.name} looks at gradients before a step, and with overlap step that does not wait",
            where=where,
            fix="use overlap backward, or only verify weights",
        )
    if one.repairs and coded:
        raise ConfigError(
            f"verify {one.name} repairs gradients, which a codec has encoded by then",
            where=where,
            fix="use codec none, or verify gradients and weights",
        )
