"""One model, spread over workers: cut at its first call, then run stage by stage.

The module stays the script's own: `model(x)` returns the whole output on every worker, `state_dict` has
all parameters under their own names. Until the first call every worker has the whole model. Then the
layers are measured on every worker, each replica is cut by what its own workers take, and each worker
keeps its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.config.units import show_memory
from echelon.parallel.chain import Given, LayerChain, chain_of, check_cuts
from echelon.parallel.cut import ChainCost, best_cuts, wires_s
from echelon.parallel.gathered_layers import GatheredLayers
from echelon.parallel.holdings import Holdings
from echelon.parallel.layout import Mesh
from echelon.parallel.measure import LayerCosts, measure
from echelon.parallel.micro import cut_call
from echelon.parallel.norms import WholeNorms
from echelon.parallel.pass_times import PassTimes, resident_bytes
from echelon.parallel.schedule import StageAction, most_kept, schedule
from echelon.parallel.split import Gradients
from echelon.parallel.stage import PipelineStage, StagePart
from echelon.parallel.stage_shards import StageDivision, StageShards
from echelon.parallel.strategies.pipeline import Pipeline

Explain = Callable[[str, str, str], None]


class SpreadModel:
    """A model over the workers of a mesh.

    group         all workers; `memory_bytes` is what this one may use
    links         measured ones; None: all workers are on one machine, or nothing is known
    weight        of this replica's loss, when a backward pass ends
    keeps         whether gradients stay on this worker for now (accumulation)
    agree         all workers make the call that is described, or all raise
    division      how the workers with this stage divide its states; None: each has all of them
    begun         called when this worker has its part
    """

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        mesh: Mesh,
        group: Group,
        *,
        memory_bytes: float,
        links: Links | None = None,
        weight: Callable[[], float],
        keeps: Callable[[], bool],
        agree: Callable[[str], None],
        observer: Any,
        explain: Explain,
        division: StageDivision | None = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self._begun = begun
        self._division = division
        self.shards: StageShards | None = None
        self._gathered: GatheredLayers | None = None
        self._model = model
        self._pipeline = pipeline
        self._mesh = mesh
        self._group = group
        self._memory_bytes = memory_bytes
        self._links = links
        self._weight = weight
        self._keeps = keeps
        self._agree = agree
        self._observer = observer
        self._explain = explain
        self._chain: LayerChain = chain_of(model)
        check_cuts(self._chain, pipeline.cut_points, mesh.stages)
        self._messages = group.fork()
        self._stage: PipelineStage | None = None
        self._costs: LayerCosts | None = None
        self._micro = 1
        tensors = (*model.parameters(), *model.buffers())
        self._without_bytes = resident_bytes() - sum(one.nbytes for one in tensors)
        self.holdings: Holdings | None = None
        self.quiet = False  # state_dict gives what is there, and does not ask the other workers
        self._kept: Gradients = []
        self.unreduced = False
        self._own_forward = vars(model).get("forward")
        model.forward = self._forward
        self._handles = [
            model.register_state_dict_pre_hook(self._before_state),
            model.register_state_dict_post_hook(
                lambda *_: self._after_state()
            ),  # torch sets an attribute of it
            model.register_load_state_dict_pre_hook(self._before_load),
            model.register_load_state_dict_post_hook(self._after_load),
        ]
        self._norms = WholeNorms(group, self._held, self._counted)
        self._norms.install()

    # Calls -----------------------------------------------------------------------------------------

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._stage is None:
            self._stage = self._begin((args, kwargs))
            self._begun()
        if self.shards is not None:
            self.shards.show_whole()
        return self._stage.forward(args, kwargs)

    def _begin(self, given: Given) -> PipelineStage:
        """Cut the model, and keep this worker's part."""
        cuts = self._cuts(given)
        edges = [(0, *cut, len(self._chain)) for cut in cuts]
        apart = self._mesh.ranks if self._division is not None else ()
        self.holdings = Holdings(self._model, self._group, self._owners(edges), apart)
        rank = self._group.rank
        replica, stage = self._mesh.replica_of(rank), self._mesh.stage_of(rank)
        part = StagePart(
            stage=stage,
            ranks=self._mesh.ranks[replica],
            begin=edges[replica][stage],
            end=edges[replica][stage + 1],
        )
        self.holdings.part()
        self._tell(part, replica)
        chain, count = self._chain, self._pipeline.count
        if self._division is not None:
            self.shards = shards = StageShards(self.holdings.own, self._division)
            if self._division.level == 3:
                chain = self._gathered = GatheredLayers(chain, self._model, shards, part.begin, part.end)
                count = lambda rows: shards.agreed_micro(self._pipeline.count(rows), rows)  # noqa: E731
        return PipelineStage(
            chain,
            part,
            self._messages,
            self.holdings,
            options=self._pipeline,
            count=count,
            landed=self._landed,
            timed=self._timed,
            training=self._trains,
        )

    def _tell(self, part: StagePart, replica: int) -> None:
        """Record which layers this worker has."""
        took_s, needs_bytes = self._predicted(part)
        self._observer.staged(
            replica=replica,
            stage=part.stage,
            ranks=list(part.ranks),
            begin=part.begin,
            end=part.end,
            first=self._chain.names[part.begin],
            last=self._chain.names[part.end - 1],
            schedule=self._pipeline.schedule,
            micro=self._micro,
            predicted_s=took_s,
            predicted_bytes=needs_bytes,
        )

    def _predicted(self, part: StagePart) -> tuple[float, float]:
        """The time of a micro-batch in a stage, and the stage's memory; zeros if nothing was measured."""
        costs, pipeline = self._costs, self._pipeline
        if costs is None:
            return 0.0, 0.0
        own = slice(part.begin, part.end)
        kept = most_kept(
            schedule(pipeline.schedule, part.stage, len(part.ranks), self._micro, pipeline.ahead)
        )
        passed = sum(costs.passed_bytes[own])
        if pipeline.recompute:
            received = costs.passed_bytes[part.begin - 1] if part.begin else 0.0
            return sum(costs.times_s[own]), sum(costs.held_bytes[own]) + passed + kept * received
        return sum(costs.times_s[own]), sum(costs.held_bytes[own]) + kept * passed

    def _timed(self, times: PassTimes) -> None:
        """A batch has gone through this stage."""
        memory_bytes = max(0, resident_bytes() - self._without_bytes)
        self._observer.passed(times.begun, times.passes, memory_bytes)

    def _trains(self) -> bool:
        return any(module.training for module in self._model.modules())

    def _owners(self, edges: list[tuple[int, ...]]) -> dict[str, list[int]]:
        """The workers that hold each parameter and buffer, by name; what no layer uses, stage 0 holds."""
        model = self._model
        first = {id(p): name for name, p in (*model.named_parameters(), *model.named_buffers())}
        everything = (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
        canonical = {name: first[id(tensor)] for name, tensor in everything}
        owners: dict[str, set[int]] = {name: set() for name in first.values()}
        for replica, ranks in enumerate(self._mesh.ranks):
            for stage, rank in enumerate(ranks):
                begin, end = edges[replica][stage], edges[replica][stage + 1]
                for name in self._chain.holds(begin, end):
                    if name in canonical:
                        owners[canonical[name]].add(rank)
        unused = set(self._mesh.peers(0))
        return {name: sorted(ranks or unused) for name, ranks in owners.items()}

    def _cuts(self, given: Given) -> list[tuple[int, ...]]:
        """Each replica's cuts."""
        pipeline, mesh = self._pipeline, self._mesh
        call = cut_call(given, pipeline.count)
        micro = self._micro = len(call.edges)
        if pipeline.cuts or mesh.stages == 1:
            return [pipeline.cut_points] * mesh.replicas
        costs = self._costs = measure(self._model, self._chain, call.part(0), recompute=pipeline.recompute)
        kept = 1 if pipeline.recompute else most_kept(_longest(pipeline, mesh.stages, micro))
        sizes_bytes = [
            held + kept * passed for held, passed in zip(costs.held_bytes, costs.passed_bytes, strict=True)
        ]
        figures = [*costs.times_s, *sizes_bytes, *costs.passed_bytes, float(micro), self._memory_bytes]
        mine = torch.tensor(figures, dtype=torch.float64)
        told = [one.tolist() for one in self._group.all_gather(mine)]
        if self._division is None:
            found = [self._cut(told, [ranks]) for ranks in mesh.ranks]
        else:  # replicas that divide stages have the same ones
            found = [self._cut(told, mesh.ranks)] * mesh.replicas
        self._explain("pipeline", self._why(found, told), "")
        return found

    def _cut(self, told: list[list[float]], replicas: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """The cuts of replicas that are cut alike, by their slowest workers; `told` has all figures."""
        count, stages = len(self._chain), list(zip(*replicas, strict=True))
        first = replicas[0][0]
        return best_cuts(
            ChainCost(
                times_s=[
                    [max(told[rank][at] for rank in peers) for at in range(count)] for peers in stages
                ],
                sizes_bytes=told[0][count : 2 * count],
                limits_bytes=[min(told[rank][-1] for rank in peers) for peers in stages],
                wires_s=wires_s(self._slowest_rates(replicas), told[first][2 * count : 3 * count]),
                closed=self._chain.closed,
            ),
            int(told[first][-2]),
        )

    def _slowest_rates(self, replicas: Sequence[Sequence[int]]) -> list[float]:
        found = [rates for ranks in replicas if (rates := self._rates(ranks))]
        return [min(rates) for rates in zip(*found, strict=True)]

    def _rates(self, ranks: Sequence[int]) -> list[float]:
        """The bytes per second of the links between stages; none if nothing is known."""
        links = self._links
        return [links.bytes_per_s.get(pair, math.inf) for pair in pairwise(ranks)] if links else []

    def _why(self, cuts: list[tuple[int, ...]], told: list[list[float]]) -> str:
        parts, count = [], len(self._chain)
        for ranks, cut in zip(self._mesh.ranks, cuts, strict=True):
            edges = [0, *cut, len(self._chain)]
            for stage, rank in enumerate(ranks):
                begin, end = edges[stage], edges[stage + 1]
                took_ms = 1e3 * sum(told[rank][begin:end])
                parts.append(
                    f"rank {rank} has layers {begin} to {end - 1} (from {self._chain.names[begin]}), "
                    f"{took_ms:.2f} ms a micro-batch, "
                    f"{show_memory(sum(told[0][count + begin : count + end]))} with activations"
                )
        return "cut by measured times: " + "; ".join(parts)

    # Gradients -------------------------------------------------------------------------------------

    def _landed(self, gradients: Gradients) -> None:
        """A backward pass has ended on this stage: sum its gradients over their owners, unless kept."""
        holdings = self.holdings
        assert holdings is not None
        weight = self._weight()
        kept = self._kept or [None] * len(gradients)
        self._kept = [_sum(mine, fresh, weight) for mine, fresh in zip(kept, gradients, strict=True)]
        self._observer.computing()
        if self._keeps() and (self.shards is None or self.shards.level == 1):
            self.unreduced = True
            return
        self._observer.arrived()
        total, self._kept, self.unreduced = self._kept, [], False
        sent_bytes = holdings.reduce(total)
        if self.shards is not None:
            self._divide(self.shards, total, sent_bytes)
            return
        for p, gradient in zip(holdings.own, total, strict=True):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        self._observer.reduced(sent_bytes)

    def _divide(self, shards: StageShards, total: Gradients, sent_bytes: int) -> None:
        """Sum gradients slice by slice; before a step parameters are slices."""
        if self._gathered is not None:
            self._gathered.end_pass()
        shards.sum(total)
        self.unreduced = self._keeps()
        if not self.unreduced:
            shards.show_slices()
        self._observer.reduced(sent_bytes + shards.taken_bytes())

    def _held(self) -> list[Tensor]:
        own = self.holdings.own if self.holdings is not None else []
        return [p.grad for p in own if p.grad is not None]

    def _counted(self) -> list[Tensor]:
        holdings, shards = self.holdings, self.shards
        counted = holdings.counted if holdings is not None else []
        if holdings is not None and shards is not None:
            stage = set(self._mesh.peers(self._mesh.stage_of(self._group.rank)))
            counted = [p for p in holdings.own if shards.counts and holdings.first_owner(p) in stage]
        return [p.grad for p in counted if p.grad is not None]

    # State -------------------------------------------------------------------------------------------

    def _before_state(self, *_: Any) -> None:
        if self.holdings is None:
            return
        if self.quiet:
            self.lend(values=False)
            return
        self._agree("state_dict of a model in parts")
        self.whole()

    def whole(self) -> None:
        """Give every worker the whole model, until `part`; all call this together."""
        if self.holdings is not None:
            self.lend(values=True)
            self.holdings.whole()

    def lend(self, *, values: bool) -> None:
        """Show this stage's parameters whole, until `part`."""
        shards = self.shards
        if shards is None or shards.lends:
            return
        if self._gathered is not None:
            self._gathered.end_pass()
        shards.lend(values=values)

    def part(self) -> None:
        """Keep only this worker's part again."""
        if self.holdings is not None:
            self.holdings.part()
        if self.shards is not None:
            self.shards.take_back()

    def _after_state(self) -> None:
        if not self.quiet:
            self.part()

    def _before_load(self, *_: Any) -> None:
        if self.holdings is not None:
            self.lend(values=False)
            self.holdings.room()

    def _after_load(self, *_: Any) -> None:
        if self.shards is not None:
            self.shards.loaded()
        if self.holdings is not None and not self.quiet:
            self.holdings.part()

    def close(self) -> None:
        """Give the module back. Parameters of other stages stay where they are."""
        self._norms.remove()
        if self._gathered is not None:
            self._gathered.close()
        if self.shards is not None:
            self.shards.close()
        for handle in self._handles:
            handle.remove()
        if self._own_forward is None:
            vars(self._model).pop("forward", None)
        else:
            self._model.forward = self._own_forward


def _longest(pipeline: Pipeline, stages: int, micro: int) -> list[StageAction]:
    """The actions of the stage that keeps most: the first."""
    return schedule(pipeline.schedule, 0, stages, micro, pipeline.ahead)


def _sum(kept: Tensor | None, fresh: Tensor | None, weight: float) -> Tensor | None:
    if fresh is None:
        return kept
    scaled = fresh if weight == 1.0 else fresh.mul_(weight)
    return scaled if kept is None else kept.add_(scaled)
