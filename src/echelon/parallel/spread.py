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
from echelon.errors import ConfigError
from echelon.parallel.chain import Given, LayerChain, chain_of, check_cuts
from echelon.parallel.cut import ChainCost, best_chunk_cuts, best_cuts, wires_s
from echelon.parallel.gathered_layers import GatheredLayers
from echelon.parallel.holdings import Holdings
from echelon.parallel.late import WeightCopies
from echelon.parallel.layout import Mesh
from echelon.parallel.measure import LayerCosts, measure
from echelon.parallel.micro import cut_call
from echelon.parallel.norms import WholeNorms
from echelon.parallel.pass_times import PassTimes, resident_bytes
from echelon.parallel.schedule import most_kept, schedule
from echelon.parallel.split import Gradients
from echelon.parallel.stage import PipelineStage
from echelon.parallel.stage_chunk import StagePart
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
        if pipeline.parts > 1 and mesh.stages == 1:
            raise ConfigError(
                "one worker has nobody to interleave its chunks with",
                where="prepare, parallel",
                fix="use at least 2 stages, or schedule=1f1b",
            )
        check_cuts(self._chain, pipeline.cut_points, mesh.stages, pipeline.parts)
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
        ranks = self._mesh.ranks[replica] * self._pipeline.parts
        parts = [
            StagePart(stage=at, ranks=ranks, begin=edges[replica][at], end=edges[replica][at + 1])
            for at in range(stage, len(ranks), self._mesh.stages)
        ]
        self.holdings.part()
        self._tell(parts, replica)
        chain, count = self._chain, self._pipeline.count
        if self._division is not None:
            self.shards = shards = StageShards(self.holdings.own, self._division)
            if self._division.level == 3:
                layers = [at for part in parts for at in range(part.begin, part.end)]
                chain = self._gathered = GatheredLayers(chain, self._model, shards, layers)
                count = lambda rows: shards.agreed_micro(self._pipeline.count(rows), rows)  # noqa: E731
        return PipelineStage(
            chain,
            parts,
            self._messages,
            self.holdings,
            options=self._pipeline,
            count=count,
            weight=self._weight,
            landed=self._landed,
            timed=self._timed,
            training=self._trains,
            copies=WeightCopies(self._model, self.holdings.own),
        )

    def _tell(self, parts: Sequence[StagePart], replica: int) -> None:
        """Record which layers this worker has."""
        took_s, needs_bytes = self._predicted(parts)
        names, first, last = self._chain.names, parts[0], parts[-1]
        self._observer.staged(
            replica=replica,
            stage=first.stage,
            ranks=list(self._mesh.ranks[replica]),
            begin=first.begin,
            end=last.end,
            first=names[first.begin],
            last=names[last.end - 1],
            schedule=self._pipeline.schedule,
            micro=self._micro,
            predicted_s=took_s,
            predicted_bytes=needs_bytes,
            chunks=[(part.begin, part.end) for part in parts] if len(parts) > 1 else [],
        )

    def _predicted(self, parts: Sequence[StagePart]) -> tuple[float, float]:
        """The time of a micro-batch in a worker, and the worker's memory; zeros if nothing was measured."""
        costs = self._costs
        if costs is None:
            return 0.0, 0.0
        kept = self._kept_of(parts[0].stage)
        took_s = needs_bytes = 0.0
        for part, count in zip(parts, kept, strict=True):
            own = slice(part.begin, part.end)
            passed = sum(costs.passed_bytes[own])
            took_s += sum(costs.times_s[own])
            needs_bytes += sum(costs.held_bytes[own])
            if self._pipeline.recompute:
                received = costs.passed_bytes[part.begin - 1] if part.begin else 0.0
                needs_bytes += passed + count * received
            else:
                needs_bytes += count * passed
        return took_s, needs_bytes

    def _kept_of(self, stage: int) -> list[int]:
        """Of how many micro-batches a worker keeps activations at most, for each of its chunks."""
        pipeline = self._pipeline
        actions = schedule(
            pipeline.schedule, stage, self._mesh.stages, self._micro, pipeline.ahead, pipeline.parts
        )
        batches = 1 + pipeline.late
        return [
            batches * most_kept([one for one in actions if one.chunk == chunk])
            for chunk in range(pipeline.parts)
        ]

    def _timed(self, times: PassTimes) -> None:
        """A batch has gone through this stage."""
        memory_bytes = max(0, resident_bytes() - self._without_bytes)
        chunks = times.chunks if self._pipeline.parts > 1 else []
        self._observer.passed(times.begun, times.passes, memory_bytes, chunks)

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
            for part, rank in enumerate(ranks * self._pipeline.parts):
                begin, end = edges[replica][part], edges[replica][part + 1]
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
        kept = 1 if pipeline.recompute else max(self._kept_of(0))  # the first stage keeps most
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
        count, parts, workers = len(self._chain), self._pipeline.parts, len(replicas[0])
        stages = list(zip(*replicas, strict=True)) * parts
        first = replicas[0][0]
        cost = ChainCost(
            times_s=[[max(told[rank][at] for rank in peers) for at in range(count)] for peers in stages],
            sizes_bytes=told[0][count : 2 * count],
            limits_bytes=[min(told[rank][-1] for rank in peers) for peers in stages],
            wires_s=wires_s(self._slowest_rates(replicas), told[first][2 * count : 3 * count]),
            closed=self._chain.closed,
        )
        micro = int(told[first][-2])
        return best_cuts(cost, micro) if parts == 1 else best_chunk_cuts(cost, micro, workers)

    def _slowest_rates(self, replicas: Sequence[Sequence[int]]) -> list[float]:
        found = [rates for ranks in replicas if (rates := self._rates(ranks))]
        return [min(rates) for rates in zip(*found, strict=True)]

    def _rates(self, ranks: Sequence[int]) -> list[float]:
        """The bytes per second of the links between parts; none if nothing is known."""
        links, pairs = self._links, pairwise([*ranks] * self._pipeline.parts)
        return [links.bytes_per_s.get(pair, math.inf) for pair in pairs] if links else []

    def _why(self, cuts: list[tuple[int, ...]], told: list[list[float]]) -> str:
        parts, count = [], len(self._chain)
        for ranks, cut in zip(self._mesh.ranks, cuts, strict=True):
            edges = [0, *cut, len(self._chain)]
            for at, rank in enumerate(ranks):
                own = [(edges[part], edges[part + 1]) for part in range(at, len(edges) - 1, len(ranks))]
                took_ms = sum(1e3 * sum(told[rank][begin:end]) for begin, end in own)
                size = sum(sum(told[0][count + begin : count + end]) for begin, end in own)
                layers = " and ".join(
                    f"{begin} to {end - 1} (from {self._chain.names[begin]})" for begin, end in own
                )
                parts.append(
                    f"rank {rank} has layers {layers}, {took_ms:.2f} ms a micro-batch, "
                    f"{show_memory(size)} with activations"
                )
        return "cut by measured times: " + "; ".join(parts)

    # Gradients -------------------------------------------------------------------------------------

    def drop_late(self) -> None:
        """Forget gradients that are under way from earlier batches; all workers call this together."""
        if self._stage is not None:
            self._stage.drop()

    def _landed(self, gradients: Gradients, weight: float) -> None:
        """A backward pass has ended on this stage: sum its gradients over their owners, unless kept."""
        holdings = self.holdings
        assert holdings is not None
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


def _sum(kept: Tensor | None, fresh: Tensor | None, weight: float) -> Tensor | None:
    if fresh is None:
        return kept
    scaled = fresh if weight == 1.0 else fresh.mul_(weight)
    return scaled if kept is None else kept.add_(scaled)
