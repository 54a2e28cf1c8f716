"""What a training job costs: computing by share, gradients by layer, memory. Measured, never guessed.

Costs are those of one worker on a machine with speed 1, which is the one that the job was measured on; its
`reference_s` is what the probe's fixed small step takes there. A topology's speeds are relative to a
reference of its own: `on_topology` brings both together. A step of a share of s samples
takes fixed_s + s * per_sample_s for forward and backward, and apply_s for the optimizer. Nodes that were
measured themselves have costs of their own in `costs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from echelon.plan.topology import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCost:
    """What forward, backward and the optimizer take on one node, in seconds of wall time."""

    fixed_s: float
    per_sample_s: float
    apply_s: float = 0.0

    def at(self, share: float) -> float:
        """Forward and backward of a share of so many samples."""
        return self.fixed_s + share * self.per_sample_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The parameters that get their gradients together.

    size_bytes  of their gradients
    ready_at    when backward has computed them, as a fraction of forward and backward together: the last
                layer's are ready first, the first layer's at 1
    factors     outputs and inputs of a linear layer, whose gradient can travel as factors; else (0, 0)
    rows        gradients' rows per sample, for factors: 1, or the length of a sequence
    """

    name: str
    size_bytes: int
    ready_at: float = 1.0
    factors: tuple[int, int] = (0, 0)
    rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProfile:
    """One training job: a model, a batch, and what they cost.

    batch           the global batch
    cost            on the node with speed 1
    layers          in the order of the model
    base_bytes      memory of a worker with the model, its gradients and the optimizer's states
    sample_bytes    additional memory for each sample of a share
    exchanges       other exchanges within a step: one forward and one backward for each BatchNorm layer
    costs           of nodes that were measured themselves, by name; they come before speed
    reference_s     what the probe's fixed small step takes on the machine with speed 1; 0 if unknown, then
                    that machine is taken for the topology's node with speed 1
    """

    name: str
    batch: int
    cost: ComputeCost
    layers: tuple[Layer, ...]
    base_bytes: float = 0.0
    sample_bytes: float = 0.0
    exchanges: int = 0
    costs: Mapping[str, ComputeCost] = field(default_factory=dict)
    reference_s: float = 0.0

    @property
    def gradient_bytes(self) -> int:
        """The size of all gradients."""
        return sum(layer.size_bytes for layer in self.layers)

    def cost_on(self, node: Node) -> ComputeCost:
        """What computing costs on a node."""
        own = self.costs.get(node.name)
        if own is not None:
            return own
        return ComputeCost(
            fixed_s=self.cost.fixed_s / node.speed,
            per_sample_s=self.cost.per_sample_s / node.speed,
            apply_s=self.cost.apply_s / node.speed,
        )

    def on_topology(self, reference_s: float) -> JobProfile:
        """The same job, with costs of a node that has speed 1 in a topology of this reference."""
        if not self.reference_s or not reference_s:
            return self
        times = reference_s / self.reference_s
        cost = ComputeCost(
            fixed_s=self.cost.fixed_s * times,
            per_sample_s=self.cost.per_sample_s * times,
            apply_s=self.cost.apply_s * times,
        )
        return replace(self, cost=cost, reference_s=reference_s)

    def memory_bytes(self, share: float) -> float:
        """What a worker with this share needs."""
        return self.base_bytes + share * self.sample_bytes
