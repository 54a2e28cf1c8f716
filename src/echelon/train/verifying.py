"""What do the checks of `--verify` see of a session, and how are their findings told?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.errors import ConfigError
from echelon.plan.plan import Plan
from echelon.train.checks import chosen_verifications
from echelon.train.clock import StepClock
from echelon.train.families.synchronizer import ModelOptions
from echelon.train.record import RunRecord
from echelon.verify.verification import VerifiedRun, refuse_combination
from echelon.verify.verifier import Verifier, reporting

_log = logging.getLogger(__name__)


def make_verifier(
    plan: Plan,
    group: Group,
    clock: StepClock,
    record: RunRecord,
    *,
    optimizers: list[Optimizer],
    weights: Callable[[], list[tuple[str, Tensor]]],
    warn: Callable[[str], None],
) -> Verifier:
    """The checks that the plan names, on this worker."""
    chosen = chosen_verifications(plan, group.size)
    nodes = [worker.node for worker in plan.workers]
    noted: set[str] = set()

    def note(text: str) -> None:
        if group.rank == 0 and text not in noted:
            noted.add(text)
            warn(text)

    run = VerifiedRun(
        group=group.fork() if chosen else group,
        nodes=nodes,
        copies=max((one.copies for one in chosen), default=1),
        step=lambda: clock.step,
        weights=weights,
        optimizers=optimizers,
        report=reporting(nodes, group, lambda: clock.step, record.emit, _say),
        note=note,
    )
    return Verifier(chosen, run, text=plan.verify)


def refuse_preparing(verifier: Verifier, rules: ModelOptions, codec: str) -> None:
    """Refuse to prepare a model in a way that the checks do not work with."""
    for one in verifier.chosen:
        refuse_combination(one, overlap=rules.overlap, coded=codec != "none", where="session.prepare")
    if rules.loss == "sum" and verifier.copies > 1:
        raise ConfigError(
            "replicas would count several times in a sum over workers",
            where='prepare(loss="sum")',
            fix="use a loss that is a mean, or leave replicate out",
        )


def weights_of_shards(weights: Sequence[float], copies: int) -> list[float]:
    """The parts of a batch, one for each shard: the mean of its replicas' parts."""
    shards = len(weights) // copies
    return [sum(weights[shard::shards]) / copies for shard in range(shards)]


def _say(text: str) -> None:
    """In the log only: the record has an event for it."""
    _log.warning(text, extra={"is_noted": True})
