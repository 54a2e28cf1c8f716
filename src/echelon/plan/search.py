"""Which strategy is best for a job on these machines? All choices together, by predicted step.

For up to five usable nodes every set of nodes is tried in every way (`ways.py`) with every form of shares
(`trials.py`), except sets that compute longer than the best step found. So the result is the best of them.

For more nodes the search goes from coarse to fine: sets of whole groups and of the most useful nodes in the
plain ways; all ways for the best sets; then sets that differ by a group or a node from the best, until none
is better or the budget of predictions is used up. The result is the best of what was tried; a better set
further away is possible.

The search is deterministic. Strategies that the caller names in `also` are tried too, so a new plan is
never predicted to be slower than the current one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from echelon.config.units import show_seconds
from echelon.errors import PlanError
from echelon.plan.bound import JobKind, Predictor, classify
from echelon.plan.equations import StaticChoice
from echelon.plan.job import JobProfile
from echelon.plan.optimal_shares import check_memory, most_share
from echelon.plan.plan import LeftOut
from echelon.plan.reach import Usable, usable_nodes
from echelon.plan.shares import split
from echelon.plan.static_choice import static_choice
from echelon.plan.strategy import Strategy
from echelon.plan.subsets import Members, NodeSets
from echelon.plan.topology import Node, Topology
from echelon.plan.trials import SearchCandidate, Trials
from echelon.plan.ways import SearchSpace, Way, in_site_order, ways_of

_ALL_SETS = 5  # nodes
_BEST_SETS = 3
_CLIMBS = 12
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
    complete    whether all sets of nodes were considered
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
    also: Sequence[Strategy] = (),
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
    found = _Searching(trials, space.exactly() if exact else space)
    for strategy in also:
        if _possible(topology, job, strategy, usable):
            trials.take_strategy(strategy)
    complete = sum(len(part) for part in (usable.together, *usable.apart)) <= _ALL_SETS
    for part in (usable.together, *usable.apart):
        found.part(NodeSets(part, job, most_workers or len(part)), complete=complete)
    if trials.best is None:
        _refuse(job, usable, most_workers)
    for candidate in distinct(trials.candidates, keep):
        trials.polish(candidate)
    found.equal_shares(found.best.strategy)
    left_out = found.reasons(usable, most_workers)
    candidates = [replace(candidate, why=why(candidate, found.best)) for candidate in trials.candidates]
    return SearchResult(
        best=candidates[0],
        top=tuple(distinct(candidates, keep)),
        candidates=tuple(candidates),
        left_out=left_out,
        kind=kind,
        skipped=found.skipped,
        complete=complete,
        equations=static_choice(job, usable.together),
    )


class _Searching:
    """One search: what was tried, and where it goes on."""

    def __init__(self, trials: Trials, space: SearchSpace) -> None:
        self.trials = trials
        self.skipped = 0
        self._topology = trials.topology
        self._job = trials.job
        self._space = space
        self._ways: dict[tuple[str, ...], list[Way]] = {}
        self._sets: dict[str, NodeSets] = {}

    @property
    def best(self) -> SearchCandidate:
        """The best so far; there is one."""
        if self.trials.best is None:
            raise PlanError("no strategy was tried", where="search")
        return self.trials.best

    def part(self, sets: NodeSets, *, complete: bool) -> None:
        """Search among nodes that reach each other."""
        self._sets |= {node.name: sets for node in sets.nodes}
        self._unplanned(sets)
        if complete:
            self._everything(sets)
        else:
            self._coarse_to_fine(sets)

    def equal_shares(self, strategy: Strategy) -> None:
        """Try a strategy with equal shares, if the user left shares open and memory holds them."""
        job = self._job
        shares = split(job.batch, [1.0] * len(strategy.nodes))
        nodes = [self._topology.node(name) for name in strategy.nodes]
        fits = all(share <= most_share(job, node) for share, node in zip(shares, nodes, strict=True))
        if self._space.shares == "auto" and fits:
            self.trials.take_strategy(replace(strategy, shares=shares))

    def _unplanned(self, sets: NodeSets) -> None:
        """What somebody gets who plans nothing: all nodes, equal shares."""
        space = self._space
        if len(sets.nodes) > sets.most or "none" not in space.codecs or "full" not in space.syncs:
            return
        names = in_site_order(self._topology, sets.nodes).nodes
        self.equal_shares(
            Strategy(
                nodes=names,
                shares=(),
                collective=space.collectives[0],
                overlap=space.overlaps[0],
                factors=space.factors[0],
            )
        )

    def _everything(self, sets: NodeSets) -> None:
        every = sorted(sets.every(), key=self.trials.bound_s)
        for members in every:
            if self._hopeless(members):
                continue
            self.trials.take(members, self._all_ways(members))

    def _coarse_to_fine(self, sets: NodeSets) -> None:
        trials = self.trials
        tried: list[tuple[float, Members]] = []
        for members in sorted(sets.first(), key=trials.bound_s):
            if self._hopeless(members) or self._spent(0.4):
                continue
            found = trials.take(members, self._plain_ways(members), all_shares=False)
            if found is not None:
                tried.append((found.step_s, members))
        for _, members in sorted(tried, key=lambda one: one[0])[:_BEST_SETS]:
            if not self._spent(0.7):
                trials.take(members, self._all_ways(members), all_shares=False)
        for _ in range(_CLIMBS):
            before_s = trials.best_s
            self._climb(sets)
            if trials.best_s >= before_s or self._spent(0.9):
                break
        if trials.best is not None:
            here = self._members(trials.best.strategy)
            trials.take(here, self._like_best(here))

    def _climb(self, sets: NodeSets) -> None:
        """Try the sets beside the best one, in ways like its; then the best of them in all ways."""
        trials = self.trials
        if trials.best is None or trials.best.strategy.nodes[0] not in {node.name for node in sets.nodes}:
            return
        start = trials.best
        here = self._members(start.strategy)
        for members in sorted(sets.beside(here), key=trials.bound_s):
            if self._hopeless(members) or self._spent(0.9):
                continue
            trials.take(members, self._like_best(members), all_shares=False)
        if trials.best is not start:
            members = self._members(trials.best.strategy)
            if not self._spent(0.9):
                trials.take(members, self._all_ways(members), all_shares=False)

    def _hopeless(self, members: Members) -> bool:
        hopeless = self.trials.bound_s(members) > self.trials.best_s
        self.skipped += hopeless
        return hopeless

    def _spent(self, fraction: float) -> bool:
        return self.trials.work > fraction * self._space.most_work

    def _all_ways(self, members: Members) -> list[Way]:
        names = tuple(node.name for node in members)
        known = self._ways.get(names)
        if known is None:
            known = self._ways[names] = ways_of(self._topology, self._job, members, self._space)
        return known

    def _plain_ways(self, members: Members) -> list[Way]:
        """The first of each arrangement's ways, without the variants of flat collectives."""
        ways = self._all_ways(members)
        first = [way for way in ways if way.options == ways[0].options]
        flat = [way for way in first if not way.arrangement.groups]
        return [*flat[:1], *(way for way in first if way.arrangement.groups)]

    def _like_best(self, members: Members) -> list[Way]:
        """The ways with the options of the best strategy: codec, overlap, factors, policy."""
        best = self.best.strategy
        options = (best.codec, best.overlap, best.factors, best.sync)
        like = [way for way in self._all_ways(members) if way.options == options]
        grouped = bool(best.groups)
        same = [way for way in like if bool(way.arrangement.groups) == grouped]
        same.sort(key=lambda way: way.arrangement.collective != best.collective)
        return (same if grouped else same[:1]) or like[:1] or self._plain_ways(members)

    def _members(self, strategy: Strategy) -> Members:
        names = set(strategy.nodes)
        return tuple(node for node in self._topology.nodes if node.name in names)

    def reasons(self, usable: Usable, most_workers: int | None) -> tuple[LeftOut, ...]:
        """Why each node without a worker has none."""
        chosen = self.best.strategy.nodes
        known = {out.node: out.why for out in usable.left_out}
        reached = self._sets[chosen[0]]
        by_kind: dict[str, str] = {}  # by the first node of a group
        out = []
        for node in self._topology.nodes:
            if node.name in chosen:
                continue
            if self._sets.get(node.name) is reached:
                group = reached.group_of(node)[0].name
                if group not in by_kind:
                    by_kind[group] = self._cost_of(node, reached, most_workers, len(by_kind) < _REASONS)
                reason = by_kind[group]
            else:
                reason = known.get(node.name, f"it cannot reach {chosen[0]}")
            out.append(LeftOut(node=node.name, why=reason))
        return tuple(out)

    def _cost_of(self, node: Node, sets: NodeSets, most_workers: int | None, predicted: bool) -> str:
        """What a step would take with this node too."""
        best = self.best
        count = len(best.strategy.nodes)
        if count >= self._job.batch:
            return f"the batch of {self._job.batch} has no sample left for it"
        if most_workers is not None and count >= most_workers:
            return f"at most {most_workers} workers were asked for"
        if not predicted:
            return "others like it cost more than they bring"
        names = {*best.strategy.nodes, node.name}
        members = tuple(other for other in sets.nodes if other.name in names)
        with_it = self.trials.take(members, self._like_best(members))
        if with_it is None:
            return "with it the batch does not fit into memory"
        now, then = show_seconds(best.step_s), show_seconds(with_it.step_s)
        more = 100 * (with_it.step_s / best.step_s - 1)
        if more < 0.1:
            return f"it brings nothing: a step takes {now} with and without it"
        return f"it costs more than it brings: with it a step takes {then} instead of {now} (+{more:.1f} %)"


def distinct(candidates: Iterable[SearchCandidate], count: int) -> list[SearchCandidate]:
    """The first few that differ in more than their shares."""
    found: dict[Strategy, SearchCandidate] = {}
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


def _possible(topology: Topology, job: JobProfile, strategy: Strategy, usable: Usable) -> bool:
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
