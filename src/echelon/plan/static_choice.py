"""What do the first seed's equations say of a job on these machines, beside the project's own cost model?

A job of the equations is an equal share of the batch, one for each node; its data are the gradients. Group
1 holds the nodes within a decimal order of magnitude of the fastest, group 2 the next order, and so on;
orders without a node are left out. The transfer cost is that of the slowest node's link.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from echelon.plan.equations import StaticChoice, StaticCosts, cheapest, in_units
from echelon.plan.job import JobProfile
from echelon.plan.topology import Node


def static_choice(job: JobProfile, nodes: Sequence[Node]) -> StaticChoice:
    """Serial, or how many groups, by equations (1) to (5); costs in seconds."""
    share = max(1.0, job.batch / len(nodes))
    seconds = [job.cost_on(node).at(share) for node in nodes]
    orders = Counter(int(math.log10(one / min(seconds)) + 1e-9) for one in seconds)
    rate = min(min(node.up_bytes_per_s, node.down_bytes_per_s) for node in nodes)
    transfer = 1 / rate if rate > 0 else 0.0
    costs = StaticCosts(
        jobs=len(nodes), size=float(job.gradient_bytes), transfer=transfer, compute=min(seconds)
    )
    units, unit_s = in_units(costs)
    found = cheapest(units, [orders[order] for order in sorted(orders)])
    options = tuple(replace(option, cost=option.cost * unit_s) for option in found.options)
    return StaticChoice(best=options[found.options.index(found.best)], options=options)
