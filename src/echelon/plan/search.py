"""Which strategy is best for a job on these machines? All choices together, by predicted step.

For up to five nodes, and within a budget of predictions (`SearchSpace.most_work`), every set of nodes is
tried in every way (`ways.py`) with every form of shares (`trials.py`), so that the result is the best of
them, and a faster node never makes it worse. Otherwise the search goes from coarse to fine (`explore.py`),
and the result is the best of what was tried; `SearchResult.complete` says which.

The search is deterministic. Strategies that the caller names in `also` are tried too, so a new plan is
never predicted to be slower than the current one, for any number of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from echelon.config.units import show_seconds
from echelon.errors import PlanError
from echelon.plan.bound import JobKind, Predictor, classify
from echelon.plan.equations import StaticChoice
from echelon.plan.explore import Explorer
from echelon.plan.job import JobProfile
from echelon.plan.optimal_shares import check_memory, most_share
from echelon.plan.plan import LeftOut
from echelon.plan.reach import Usable, usable_nodes
from echelon.plan.static_choice import static_choice
from echelon.plan.strategy import RunStrategy
from echelon.plan.subsets import NodeSets
from echelon.plan.topology import Node, Topology
from echelon.plan.trials import SearchCandidate, Trials
from echelon.plan.ways import SearchSpace

_REASONS = 12  # kinds of nodes whose absence is predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    best        the strategy with the shortest predicted step
    top         the best few that differ in more than shares, to be timed
    candidates  all that were predicted, the best first
    left_out    the nodes without a worker, and why
    kind        what limits the job
    skipped     sets of nodes that compute longer than the best step takes
    complete    whether everything was tried, or could not be faster
    equations   what the first seed's equations say, for comparison
    """

    best: SearchCandidate
    top: tuple[SearchCandidate, ...]
    candidates: tuple[SearchCandidate, ...]
    left_out: tuple[LeftOut, ...]
    kind: JobKind
    skipped: int
    complete: bool
    equations: StaticChoice


def search(
    topology: Topology,
    job: JobProfile,
    *,
    predict: Predictor,
    exact: bool = True,
    most_workers: int | None = None,
    allowed: SearchSpace | None = None,
    keep: int = 3,
    also: Sequence[RunStrategy] = (),
) -> SearchResult:
    """Find the best strategy for a job; `exact` leaves out what changes results.

    PlanError if the job fits nowhere. Nodes that cannot take part are left out and named.
    """
    if most_workers is not None and most_workers < 1:
        raise PlanError(f"at most {most_workers} workers cannot train", where="workers", fix="allow one")
    kind = classify(topology, job, predict=predict)
    usable = usable_nodes(topology, job)
    space = allowed or SearchSpace()
    trials = Trials(topology, job, predict, shares=space.shares)
    found = Explorer(trials, space.exactly() if exact else space)
    for strategy in also:
        if _possible(topology, job, strategy, usable):
            trials.take_strategy(strategy)
    parts = (usable.together, *usable.apart)
    sets = [NodeSets(part, job, most_workers or len(part)) for part in parts]
    tried_all = [found.explore(one) for one in sets]
    if trials.best is None:
        _refuse(job, usable, most_workers)
    for candidate in distinct(trials.candidates, keep):
        trials.polish(candidate)
    found.equal_shares(found.best.strategy)
    left_out = _left_out(found, sets, usable, most_workers)
    candidates = [replace(candidate, why=why(candidate, found.best)) for candidate in trials.candidates]
    return SearchResult(
        best=candidates[0],
        top=tuple(distinct(candidates, keep)),
        candidates=tuple(candidates),
        left_out=left_out,
        kind=kind,
        skipped=found.skipped,
        complete=all(tried_all),
        equations=static_choice(job, usable.together),
    )


def _left_out(
    found: Explorer, sets: Sequence[NodeSets], usable: Usable, most_workers: int | None
) -> tuple[LeftOut, ...]:
    """The nodes without a worker; if one of them turns out to be worth it, the best changes first."""
    while True:
        best = found.best
        reasons = _Reasons(found, sets, most_workers).of(found.trials.topology, usable)
        if found.best is best:
            return reasons


class _Reasons:
    """Why each node without a worker has none."""

    def __init__(self, found: Explorer, sets: Sequence[NodeSets], most_workers: int | None) -> None:
        self._found = found
        self._job = found.trials.job
        self._most_workers = most_workers
        chosen = found.best.strategy.nodes
        self._reached = next(one for one in sets if chosen[0] in {node.name for node in one.nodes})
        self._by_kind: dict[str, str] = {}  # by the first node of a group

    def of(self, topology: Topology, usable: Usable) -> tuple[LeftOut, ...]:
        """All nodes that are left out."""
        chosen = self._found.best.strategy.nodes
        known = {out.node: out.why for out in usable.left_out}
        reached = {node.name for node in self._reached.nodes}
        out = []
        for node in topology.nodes:
            if node.name in chosen:
                continue
            if node.name in reached:
                reason = self._reason(node)
            else:
                reason = known.get(node.name, f"it cannot reach {chosen[0]}")
            out.append(LeftOut(node=node.name, why=reason))
        return tuple(out)

    def _reason(self, node: Node) -> str:
        """The same for nodes that are alike, of which one is predicted."""
        like = self._reached.group_of(node)[0].name
        if like not in self._by_kind:
            self._by_kind[like] = self._cost_of(node, predicted=len(self._by_kind) < _REASONS)
        return self._by_kind[like]

    def _cost_of(self, node: Node, *, predicted: bool) -> str:
        """What a step would take with this node too."""
        best = self._found.best
        count = len(best.strategy.nodes)
        if count >= self._job.batch:
            return f"the batch of {self._job.batch} has no sample left for it"
        if self._most_workers is not None and count >= self._most_workers:
            return f"at most {self._most_workers} workers were asked for"
        if not predicted:
            return "others like it cost more than they bring"
        names = {*best.strategy.nodes, node.name}
        members = tuple(other for other in self._reached.nodes if other.name in names)
        with_it = self._found.trials.take(members, self._found.ways_like_best(members), all_shares=False)
        if with_it is None:
            return "with it the batch does not fit into memory"
        now, then = show_seconds(best.step_s), show_seconds(with_it.step_s)
        more = 100 * (with_it.step_s / best.step_s - 1)
        if more < 0.1:
            return f"it brings nothing: a step takes {now} with and without it"
        return f"it costs more than it brings: with it a step takes {then} instead of {now} (+{more:.1f} %)"


def distinct(candidates: Iterable[SearchCandidate], count: int) -> list[SearchCandidate]:
    """The first few that differ in more than their shares."""
    found: dict[RunStrategy, SearchCandidate] = {}
    for candidate in candidates:
        if len(found) == count:
            break
        found.setdefault(replace(candidate.strategy, shares=()), candidate)
    return list(found.values())


def why(candidate: SearchCandidate, best: SearchCandidate) -> str:
    """How a candidate compares with the best, and what limits it."""
    said = candidate.prediction
    limit = f", limited by {said.bottleneck}" if said.bottleneck else ""
    if candidate.strategy == best.strategy:
        return f"the shortest predicted step{limit}"
    more = 100 * (candidate.step_s / best.step_s - 1)
    if more < 0.1:
        return f"as fast, but tried after a simpler one{limit}"
    return f"{more:.1f} % slower: {show_seconds(said.exposed_s)} of communication are not hidden{limit}"


def _possible(topology: Topology, job: JobProfile, strategy: RunStrategy, usable: Usable) -> bool:
    """Whether a strategy that was made for other machines or another batch still works here."""
    if strategy.batch != job.batch or len(strategy.shares) != len(strategy.nodes):
        return False
    for part in (usable.together, *usable.apart):
        limits = {node.name: most_share(job, node) for node in part}
        if all(
            share <= limits.get(name, 0)
            for name, share in zip(strategy.nodes, strategy.shares, strict=True)
        ):
            return True
    return False


def _refuse(job: JobProfile, usable: Usable, most_workers: int | None) -> None:
    """Say what is missing, if no set of nodes can hold the batch."""
    check_memory(job, usable.together)
    raise PlanError(
        f"{most_workers} workers cannot hold a batch of {job.batch}",
        where="workers, memory",
        fix="allow more workers, or lower the batch",
    )
