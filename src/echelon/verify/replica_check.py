"""The check by replicas in a run: workers with the same samples compare their gradients in every round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ModelError
from echelon.verify.checksums import checksum
from echelon.verify.replica_choice import (
    NOBODY,
    Choice,
    Consensus,
    Validate,
    by_checksum,
    by_functions,
    named,
)
from echelon.verify.verification import (
    UNKNOWN,
    ActiveVerification,
    CheckFinding,
    Verdict,
    VerifiedRound,
    VerifiedRun,
)

if TYPE_CHECKING:
    from echelon.verify.checks.replicate import Replicate

_NOT_CONCERNED = -2


class ReplicaCheck(ActiveVerification):
    """Compares checksums; where these differ, gives the chosen replica's gradients to the others."""

    def __init__(self, run: VerifiedRun, options: Replicate) -> None:
        super().__init__(run)
        self._options = options
        self._shards = run.group.size // options.n
        self._mates: Group | None = None
        self.consensus: Consensus | None = named(options.consensus, "consensus")  # type: ignore[assignment]
        self.validate: Validate | None = named(options.validate, "validate")  # type: ignore[assignment]

    def replicas(self, shard: int) -> list[int]:
        """The ranks that have the same samples, in ascending order."""
        return list(range(shard, self.run.group.size, self._shards))

    def numbers(self, round_: VerifiedRound) -> list[int]:
        """The checksums of this worker's gradients."""
        return [checksum(p.grad) for _, p in round_.named]

    def judge(self, round_: VerifiedRound) -> Verdict:
        """Compare replicas; decide where they differ."""
        rows = round_.numbers["replicate"]
        self.done += not round_.attempt
        differing = [
            shard
            for shard in range(self._shards)
            if any(rows[rank] != rows[shard] for rank in self.replicas(shard))
        ]
        if not differing:
            return Verdict.FINE
        if round_.attempt:
            self._report_tie(round_, differing[0], "differs between replicas again, after it was repaired")
            return Verdict.REFUSE
        if self.consensus is not None or self.validate is not None:
            return self._by_functions(round_, differing)
        return self._by_checksum(round_, differing)

    # By checksum ---------------------------------------------------------------------------------

    def _by_checksum(self, round_: VerifiedRound, differing: list[int]) -> Verdict:
        """All workers take part in every repair; only replicas that are wrong change anything."""
        rows = round_.numbers["replicate"]
        decided: list[tuple[int, int, Choice]] = []
        for shard in differing:
            ranks = self.replicas(shard)
            for at in range(len(round_.named)):
                numbers = [rows[rank][at] for rank in ranks]
                if len(set(numbers)) > 1:
                    decided.append((shard, at, by_checksum(numbers)))
        tied = next((one for one in decided if one[2].used == NOBODY), None)
        if tied is not None:
            self._report_tie(round_, tied[0], "differs between replicas, without a majority", tied[1])
            return Verdict.REFUSE
        for shard, at, choice in decided:
            ranks = self.replicas(shard)
            source, wrong = ranks[choice.used], [ranks[one] for one in choice.wrong]
            _hand_over(self.run.group, round_.named[at][1], source, wrong, is_none=rows[source][at] == 0)
        self._report_wrong(round_, decided)
        return Verdict.AGAIN

    def _report_wrong(self, round_: VerifiedRound, decided: list[tuple[int, int, Choice]]) -> None:
        """One finding for each worker that was wrong."""
        by_rank: dict[int, list[int]] = {}
        for shard, at, choice in decided:
            for one in choice.wrong:
                by_rank.setdefault(self.replicas(shard)[one], []).append(at)
        for rank, places in sorted(by_rank.items()):
            mates = ", ".join(str(one) for one in self.replicas(rank % self._shards) if one not in by_rank)
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            self.run.report(
                CheckFinding(
                    check="replicate",
                    worker=rank,
                    tensor=round_.named[places[0]][0] + more,
                    what=f"differs from the gradient of its replicas, ranks {mates}",
                    action="repaired",
                )
            )

    # By the user's functions ---------------------------------------------------------------------

    def _by_functions(self, round_: VerifiedRound, differing: list[int]) -> Verdict:
        group = self.run.group
        shard = group.rank % self._shards
        choice = Choice(_NOT_CONCERNED)
        replicas: list[dict[str, Tensor]] = []
        mates = self._row()
        if shard in differing:
            replicas = _gathered(mates, round_.named)
            choice = by_functions(replicas, self.consensus, self.validate)
        width = self._options.n
        mine = torch.full((width + 1,), _NOT_CONCERNED)
        mine[0] = choice.used
        mine[1 : 1 + len(choice.wrong)] = torch.tensor(choice.wrong, dtype=torch.int64)
        told = [one.tolist() for one in group.all_gather(mine)]
        for one in differing:
            ranks = self.replicas(one)
            if any(told[rank] != told[one] for rank in ranks):
                raise ModelError(
                    f"the functions of verify replicate decide differently on ranks {ranks}",
                    where=f"verify replicate, step {round_.step}",
                    fix="let consensus and validate depend on nothing but the gradients they are given",
                )
            if told[one][0] == NOBODY:
                self._report_tie(round_, one, "of no replica passes the consensus function")
                return Verdict.REFUSE
            for wrong in (place for place in told[one][1:] if place >= 0):
                self.run.report(
                    CheckFinding(
                        check="replicate",
                        worker=ranks[wrong],
                        tensor=self._first(round_, one),
                        what="does not pass the consensus function",
                        action="repaired",
                    )
                )
        if shard in differing:
            _install(round_.named, replicas[choice.used])
        return Verdict.AGAIN

    def _row(self) -> Group:
        """The workers with this worker's samples, as a group; made when it is first needed, by all."""
        if self._mates is None:
            made = [self.run.group.subgroup(self.replicas(shard)) for shard in range(self._shards)]
            self._mates = next(one for one in made if one is not None)
        return self._mates

    # Reports -------------------------------------------------------------------------------------

    def _first(self, round_: VerifiedRound, shard: int) -> str:
        """The first parameter whose gradient differs between a shard's replicas."""
        rows = [round_.numbers["replicate"][rank] for rank in self.replicas(shard)]
        at = next(at for at in range(len(round_.named)) if len({row[at] for row in rows}) > 1)
        return round_.named[at][0]

    def _report_tie(self, round_: VerifiedRound, shard: int, what: str, at: int | None = None) -> None:
        """Nobody knows which replica is right: the step is refused, or training stops."""
        stops = self._options.tie == "stop"
        name = round_.named[at][0] if at is not None else self._first(round_, shard)
        ranks = self.replicas(shard)
        between = f"{what} (ranks {', '.join(str(rank) for rank in ranks)})"
        self.run.report(
            CheckFinding(
                check="replicate",
                worker=UNKNOWN,
                tensor=name,
                what=between,
                action="stopped" if stops else "refused",
            )
        )
        if stops:
            raise ModelError(
                f"the gradient of parameter {name} {between}",
                where=f"verify replicate, step {round_.step}",
                fix="use three replicas, so that a majority decides; tie=refuse goes on without the step",
            )


@torch.no_grad()
def _hand_over(group: Group, p: nn.Parameter, source: int, wrong: list[int], *, is_none: bool) -> None:
    """Give the source's gradient to those who are wrong."""
    if is_none:
        if group.rank in wrong:
            p.grad = None
        return
    own = p.grad if p.grad is not None else torch.zeros_like(p)
    values = own.detach().clone(memory_format=torch.contiguous_format)
    group.broadcast(values, source)
    if group.rank in wrong:
        p.grad = values


def _gathered(mates: Group, parameters: list[tuple[str, nn.Parameter]]) -> list[dict[str, Tensor]]:
    """Every replica's gradients, by name; parameters without one are left out."""
    used = [(name, p) for name, p in parameters if p.grad is not None]
    flat = torch.cat([p.grad.detach().reshape(-1).cpu() for _, p in used if p.grad is not None])
    return [
        {
            name: part.view(p.shape).to(p.device)
            for (name, p), part in zip(used, one.split([p.numel() for _, p in used]), strict=True)
        }
        for one in mates.all_gather(flat)
    ]


@torch.no_grad()
def _install(parameters: list[tuple[str, nn.Parameter]], chosen: dict[str, Tensor]) -> None:
    for name, p in parameters:
        p.grad = chosen[name].to(p.dtype).clone() if name in chosen else None
