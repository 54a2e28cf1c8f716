"""Where does a search go? From what was tried to what is tried next, within a budget of predictions.

Everything: each set of nodes in every way with every form of shares, where that is within the budget; sets
that compute longer than the best step are skipped. Otherwise from coarse to fine:

    1. sets of whole groups and of the most useful nodes, in one flat way and one hierarchy
    2. the best three of these sets: all arrangements, then all options of the best three arrangements
    3. sets that differ from the best one by a group or a node, in ways like its, until none is better

Candidates do not depend on the nodes' speeds, only on links: shares make up for speeds. So a faster node
takes nothing away from what can be chosen.
"""

from __future__ import annotations

from dataclasses import replace

from echelon.errors import PlanError
from echelon.plan.optimal_shares import most_share
from echelon.plan.shares import split
from echelon.plan.strategy import RunStrategy
from echelon.plan.subsets import Members, NodeSets
from echelon.plan.topology import Topology
from echelon.plan.trials import SearchCandidate, Trials, work_of
from echelon.plan.ways import Arrangement, SearchSpace, Way, in_site_order, ways_of

_FEW = 5  # nodes of which every set may be tried
_BEST_SETS = 3
_BEST_ARRANGEMENTS = 3
_CLIMBS = 12


class Explorer:
    """One search: what was tried, and where it goes on."""

    def __init__(self, trials: Trials, space: SearchSpace) -> None:
        self.trials = trials
        self.skipped = 0
        self.space = space
        self._job = trials.job
        self._topology = trials.topology
        alike = tuple(replace(node, speed=1.0) for node in trials.topology.nodes)
        self._links = Topology(nodes=alike, uplinks=trials.topology.uplinks)
        self._ways: dict[tuple[str, ...], list[Way]] = {}
        self._arrangements: dict[tuple[tuple[str, ...], str], Arrangement] = {}
        self._kind: str | None = None  # of the hierarchies that did best so far

    @property
    def best(self) -> SearchCandidate:
        """The best so far; there is one."""
        if self.trials.best is None:
            raise PlanError("no strategy was tried", where="search")
        return self.trials.best

    def explore(self, sets: NodeSets) -> bool:
        """Search among nodes that reach each other; returns whether everything was tried."""
        self._unplanned(sets)
        if self.space.all_nodes:
            self._fully(tuple(sets.nodes))
            return False
        if self._affordable(sets):
            self._everything(sets)
            return True
        self._coarse(sets)
        self._fine(sets)
        return False

    def equal_shares(self, strategy: RunStrategy) -> None:
        """Try a strategy with equal shares, if the user left shares open and memory holds them."""
        job = self._job
        shares = split(job.batch, [1.0] * len(strategy.nodes))
        nodes = [self._topology.node(name) for name in strategy.nodes]
        fits = all(share <= most_share(job, node) for share, node in zip(shares, nodes, strict=True))
        if self.space.shares == "auto" and fits:
            self.trials.take_strategy(replace(strategy, shares=shares))

    def ways_like_best(self, members: Members) -> list[Way]:
        """The ways with the options and the form of the best strategy; plain ones if there is none."""
        best = self.best.strategy
        options = (best.codec, best.overlap, best.factors, best.sync)
        like = [way for way in self._all_ways(members) if way.options == options]
        known = self._arrangements.get((best.nodes, best.collective))
        form = known.form if known else best.collective
        return [way for way in like if way.arrangement.form == form] or like[:1] or self._plain(members)

    def _unplanned(self, sets: NodeSets) -> None:
        """What somebody gets who plans nothing: all nodes, equal shares."""
        space = self.space
        if (
            space.groups
            or len(sets.nodes) > sets.most
            or "none" not in space.codecs
            or "full" not in space.syncs
        ):
            return
        names = in_site_order(self._topology, sets.nodes).nodes
        self.equal_shares(
            RunStrategy(
                nodes=names,
                shares=(),
                collective=space.collectives[0],
                overlap=space.overlaps[0],
                factors=space.factors[0],
            )
        )

    def _affordable(self, sets: NodeSets) -> bool:
        """Whether the budget is enough to try everything."""
        if len(sets.nodes) > _FEW:
            return False
        work = 0
        for members in sets.every():
            forms = len(self.trials.shares_of(members))
            work += forms * len(self._all_ways(members)) * work_of(len(members))
        return work <= self.space.most_work

    def _everything(self, sets: NodeSets) -> None:
        for members in sorted(sets.every(), key=self.trials.bound_s):
            if not self._hopeless(members):
                first = self.trials.take(members, self._all_ways(members)[:1], all_shares=False)
                if first is not None:
                    self.trials.settle(members, first)
                self.trials.take(members, self._all_ways(members))

    def _coarse(self, sets: NodeSets) -> None:
        """The first sets in plain ways, and the best of them in all ways."""
        tried: list[tuple[float, Members]] = []
        few = len(sets.nodes) <= _FEW
        for members in sets.every() if few else sets.first():
            if self._hopeless(members) or self._spent(0.5):
                continue
            found = self._in_plain_ways(members)
            if found is not None:
                tried.append((found.step_s, members))
        for _, members in sorted(tried, key=lambda one: one[0])[:_BEST_SETS]:
            if not self._spent(0.7):
                self._fully(members)

    def _in_plain_ways(self, members: Members) -> SearchCandidate | None:
        """The best of the plain ways; the first set with hierarchies decides on their kind."""
        found = [
            (one, way.arrangement.kind)
            for way in self._plain(members)
            if (one := self.trials.take(members, [way], all_shares=False)) is not None
        ]
        found.sort(key=lambda pair: pair[0].step_s)
        if self._kind is None:
            self._kind = next((kind for _, kind in found if kind), None)
        return found[0][0] if found else None

    def _fine(self, sets: NodeSets) -> None:
        """From the best set to better ones beside it."""
        trials = self.trials
        names = {node.name for node in sets.nodes}
        for _ in range(_CLIMBS):
            if trials.best is None or trials.best.strategy.nodes[0] not in names:
                return
            start = trials.best
            for members in sorted(sets.beside(self._members(start.strategy)), key=trials.bound_s):
                if not self._hopeless(members) and not self._spent(0.9):
                    trials.take(members, self.ways_like_best(members), all_shares=False)
            if trials.best is start:
                break
            if not self._spent(0.8):
                self._fully(self._members(trials.best.strategy))
        here = self._members(self.best.strategy)
        trials.take(here, self.ways_like_best(here))

    def _fully(self, members: Members) -> None:
        """All arrangements with plain options; then all options of those that did best."""
        trials = self.trials
        ways = self._all_ways(members)
        plain = [way for way in ways if way.options == ways[0].options]
        first = self._in_plain_ways(members)
        if first is not None:
            trials.settle(members, first)
        found: list[tuple[float, Arrangement]] = []
        for way in plain:
            one = trials.take(members, [way], all_shares=False)
            if one is not None:
                found.append((one.step_s, way.arrangement))
        found.sort(key=lambda pair: pair[0])
        best = [arrangement for _, arrangement in found[:_BEST_ARRANGEMENTS]]
        self._kind = next((one.kind for one in best if one.groups), self._kind)
        exact = {way.options for way in ways if way.codec == "none" and way.sync == "full"}
        others = [way for way in ways if way.arrangement in best or way.options not in exact]
        trials.take(members, others, all_shares=False)

    def _hopeless(self, members: Members) -> bool:
        hopeless = self.trials.bound_s(members) > self.trials.best_s
        self.skipped += hopeless
        return hopeless

    def _spent(self, fraction: float) -> bool:
        return self.trials.work > fraction * self.space.most_work

    def _all_ways(self, members: Members) -> list[Way]:
        names = tuple(node.name for node in members)
        known = self._ways.get(names)
        if known is None:
            known = self._ways[names] = ways_of(self._links, self._job, members, self.space)
            places = [way.arrangement for way in known]
            self._arrangements |= {(place.nodes, place.collective): place for place in places}
        return known

    def _plain(self, members: Members) -> list[Way]:
        """The simplest flat way, and the simplest hierarchy of each kind, or of the best kind so far."""
        ways = self._all_ways(members)
        first = [way for way in ways if way.options == ways[0].options]
        chosen: dict[str, Way] = {}
        for way in first:
            chosen.setdefault(way.arrangement.kind, way)
        if self._kind in chosen:
            return [way for kind, way in chosen.items() if kind in ("", self._kind)]
        return list(chosen.values())

    def _members(self, strategy: RunStrategy) -> Members:
        names = set(strategy.nodes)
        return tuple(node for node in self._topology.nodes if node.name in names)
