"""How is a backward pass computed in two parts: gradients of a stage's input first, of its weights later?

Autograd computes only what is asked for, so the first part asks for the gradients of the input, and for
those that enter each operation where a weight joins the way from the input to the output. The second part
starts at these operations and goes to the weights alone. Each operation's kernels run as they would in one
pass, so the results are the same.

A weight that several operations use is left in the first part: the way from one of them may lead through
another, and its gradient would be counted twice. A graph is not split at all if it has functions written
in Python, or hooks on activations: both would run twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

Gradients = list[Tensor | None]
_HOOKS = (Tensor.register_hook, Tensor.retain_grad)


class HookWatch(TorchFunctionMode):
    """Notices hooks on activations while a forward pass runs in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do the call; notice whether it sets a hook."""
        self.hooked = self.hooked or func in _HOOKS
        return func(*args, **(kwargs or {}))


class SplitBackward:
    """A backward pass from `roots`, whose gradients are `given`, to `inputs` and `weights`; all are leaves.

    Without `splits` it is computed as a whole by `first`.
    """

    def __init__(
        self,
        roots: Sequence[Tensor],
        given: Sequence[Tensor],
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        *,
        splits: bool,
    ) -> None:
        self._roots = list(roots)
        self._given = list(given)
        self._inputs = list(inputs)
        self._weights = list(weights)
        graph = _Graph(roots, inputs, weights) if splits and roots and inputs and weights else None
        self._whole_later = splits and bool(roots) and not inputs
        self._joins = graph.joins if graph is not None and not graph.has_python else []
        self._entered: Gradients = []

    def first(self) -> tuple[Gradients, Gradients]:
        """The gradients of the inputs, and those of weights that are not put off."""
        none: Gradients = [None] * len(self._weights)
        if not self._roots or self._whole_later:
            return [None] * len(self._inputs), none
        later = {at for join in self._joins for at in join.weights}
        now = [at for at in range(len(self._weights)) if at not in later]
        wanted: list[Any] = [*self._inputs, *(self._weights[at] for at in now)]
        edges = [edge for join in self._joins for edge in join.edges]
        if not wanted:
            return [], none
        found = torch.autograd.grad(
            self._roots,
            [*wanted, *edges],
            self._given,
            retain_graph=bool(edges),
            allow_unused=True,
        )
        self._entered = list(found[len(wanted) :])
        for at, gradient in zip(now, found[len(self._inputs) : len(wanted)], strict=True):
            none[at] = gradient
        if not edges:
            self._let_go()
        return list(found[: len(self._inputs)]), none

    @property
    def has_more(self) -> bool:
        """Whether weights are put off."""
        return self._whole_later or bool(self._joins)

    def second(self) -> Gradients:
        """The gradients of the weights that were put off."""
        found: Gradients = [None] * len(self._weights)
        if self._whole_later:
            found = list(
                torch.autograd.grad(self._roots, self._weights, self._given, allow_unused=True)
                if self._weights
                else []
            )
        entered = iter(self._entered)
        for join in self._joins:
            pairs = [(edge, next(entered)) for edge in join.edges]
            known = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
            if not known:
                continue
            gradients = torch.autograd.grad(
                [edge for edge, _ in known],
                [self._weights[at] for at in join.weights],
                [gradient for _, gradient in known],
                allow_unused=True,
            )
            for at, gradient in zip(join.weights, gradients, strict=True):
                found[at] = gradient
        self._let_go()
        return found

    def _let_go(self) -> None:
        """Free the graph."""
        self._roots, self._given, self._joins, self._entered = [], [], [], []
        self._whole_later = False


class _Join:
    """An operation at which weights, by position, join the way from the input. `edges` enter it."""

    __slots__ = ("edges", "weights")

    def __init__(self, edges: list[GradientEdge], weights: list[int]) -> None:
        self.edges = edges
        self.weights = weights


class _Graph:
    """The operations between roots and leaves."""

    def __init__(
        self, roots: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        self._starts = [get_gradient_edge(root) for root in roots]
        self._inputs = {id(one) for one in inputs}
        self._position = {id(one): at for at, one in enumerate(weights)}
        self._order = list(_after_their_inputs([edge.node for edge in self._starts]))
        self.has_python = any(isinstance(node, BackwardCFunction) for node in self._order)
        self._on_way: set[Node] = set()  # that lead to an input
        self._reached: dict[Node, frozenset[int]] = {}  # the weights that the others lead to
        for node in self._order:
            self._place(node)
        self.joins = [] if self.has_python else self._found()

    def _place(self, node: Node) -> None:
        variable = getattr(node, "variable", None)
        before = [child for child, _ in node.next_functions if child is not None]
        if id(variable) in self._inputs or any(child in self._on_way for child in before):
            self._on_way.add(node)
            return
        own = {self._position[id(variable)]} if id(variable) in self._position else set()
        self._reached[node] = frozenset(own).union(*(self._reached[child] for child in before))

    def _found(self) -> list[_Join]:
        joined = {
            node: frozenset[int]().union(
                *(self._reached[child] for child, _ in node.next_functions if child in self._reached)
            )
            for node in self._order
            if node in self._on_way
        }
        ways = [self._reached[edge.node] for edge in self._starts if edge.node in self._reached]
        uses = Counter(at for reached in joined.values() for at in reached)
        at_once = {at for at, count in uses.items() if count > 1}.union(*ways)
        entering: dict[Node, dict[int, GradientEdge]] = {}
        for edge in (*self._starts, *self._edges()):
            entering.setdefault(edge.node, {})[edge.output_nr] = edge
        return [
            _Join(list(entering[node].values()), sorted(reached - at_once))
            for node, reached in joined.items()
            if reached - at_once
        ]

    def _edges(self) -> Iterator[GradientEdge]:
        for node in self._order:
            for child, number in node.next_functions:
                if child is not None:
                    yield GradientEdge(child, number)


def _after_their_inputs(starts: Sequence[Node]) -> Iterator[Node]:
    """All operations of a graph, each after those that it leads to."""
    seen: set[Node] = set()
    for start in starts:
        stack: list[tuple[Node, bool]] = [(start, False)]
        while stack:
            node, done = stack.pop()
            if done:
                yield node
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack += [(child, False) for child, _ in node.next_functions if child is not None]
