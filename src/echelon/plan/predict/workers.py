"""When is CPU work done if computing and communicating share one budget? All workers at once.

A worker with a quota of q cores gets q seconds of CPU time per second, and after a pause a little at once
(engine_costs.py). `owed_until` is when its work so far would be done at the rate q: the work ends at most
the slack earlier, and no earlier than a core can do it. The thread that moves bytes has a core of its own
where a worker has two; with less it takes time from the training thread.
"""

from __future__ import annotations

import numpy as np

from echelon.plan.job import JobProfile
from echelon.plan.predict.engine_costs import EngineCosts, slack_s
from echelon.plan.predict.flows import Floats
from echelon.plan.predict.network import SharedLinks
from echelon.plan.strategy import RunStrategy


class WorkerCosts:
    """What computing and the engine cost each worker, in seconds of its CPU time.

    quotas    the CPU time that a worker gets, at most one core
    charged   which part of the byte-moving thread's work takes time from the training thread
    engine    how much more the engine's work costs here than on the node with speed 1
    stall_s   how long a message waits on average for a worker that computes, until its quota lets it run
    """

    def __init__(
        self, job: JobProfile, strategy: RunStrategy, network: SharedLinks, engine: EngineCosts
    ) -> None:
        nodes = network.nodes
        costs = [job.cost_on(node) for node in nodes]
        shares = strategy.shares
        cores = np.array([node.cores for node in nodes], dtype=float)
        self.quotas = np.minimum(cores, 1.0)
        self.charged = np.clip(2.0 - cores, 0.0, 1.0)
        self.wall_s = np.array([cost.at(share) for cost, share in zip(costs, shares, strict=True)])
        usual = [max(job.cost.at(share), 1e-12) for share in shares]
        self.engine = np.maximum(self.wall_s / usual * self.quotas, 1e-6)
        self.compute_s = self.wall_s * self.quotas
        self.apply_s = np.array([cost.apply_s for cost in costs]) * self.quotas
        self.slack_s = np.array([slack_s(quota, engine.period_s) for quota in self.quotas.tolist()])
        # A worker that computes for a whole budget is stopped for the rest of the period; who needs it then
        # waits for half of that rest.
        computing = np.minimum(1.0, self.compute_s / (self.quotas * engine.period_s))
        self.stall_s = computing * (1 - self.quotas) ** 2 * engine.period_s / 2
        self.add_s = self.quotas / np.array([node.reduce_bytes_per_s for node in nodes])


class WorkerClocks:
    """The training threads' clocks and the CPU time that workers owe."""

    def __init__(self, costs: WorkerCosts) -> None:
        self._costs = costs
        self.now = np.zeros(len(costs.quotas))
        self.owed_until = np.zeros(len(costs.quotas))
        self.waited_s = np.zeros(len(costs.quotas))
        self.spent_s = np.zeros(len(costs.quotas))  # of the budget, so far

    def work(self, cpu_s: Floats) -> None:
        """The training threads do this work."""
        self.spent_s = self.spent_s + cpu_s
        self.owed_until = np.maximum(self.owed_until, self.now) + cpu_s / self._costs.quotas
        self.now = np.maximum(self.now + cpu_s, self.owed_until - self._costs.slack_s)

    def wait(self, until: Floats | float) -> None:
        """The training threads do nothing until then."""
        after = np.maximum(self.now, until)
        self.waited_s = self.waited_s + (after - self.now)
        self.now = after

    def charge(self, cpu_s: Floats, at: float, *, last: bool) -> Floats:
        """The other threads work from then on; returns when they are done.

        They come before what the training threads have still to do. Unless this is the `last` bucket, those
        may be ahead of that time or not: what they do next is not held up until then.
        """
        costs = self._costs
        self.spent_s = self.spent_s + cpu_s * costs.charged
        owed = np.maximum(self.owed_until, at) if last else self.owed_until
        self.owed_until = owed + cpu_s * costs.charged / costs.quotas
        done: Floats = np.maximum(at + cpu_s, self.owed_until - costs.slack_s)
        return done
