"""SplitBackward: the backward of one graph in two halves, for inputs (I) and for weights (W).

A node of the autograd graph is *on the chain* if it leads to an input; I runs all of these nodes. A
*border* is a node on the chain with a *branch*: an edge to a node that leads to weights, but to no
input. I records the gradients that enter a border, and W runs the border again for its branches
only. For a product of an input and a weight, I computes one of the two products of a whole
backward, and W the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = Mapping[GradientEdge, Tensor]
"""Gradients, by the edges at which they enter a graph."""

_ACCUMULATE = "torch::autograd::AccumulateGrad"
"""Name of the nodes that accumulate the gradient of a leaf."""

_ASK_FOR_MEMORY = frozenset(
    {"NativeLayerNormBackward0", "NativeGroupNormBackward0", "ConvolutionBackward0"}
)
"""Nodes whose kernels require the memory of a weight even if they do not read its values."""


@dataclass(frozen=True)
class _BorderNode:
    """A node on the chain with branches that lead only to weights.

    Attributes:
        node: the node.
        edges: the edges at which gradients enter it.
        branches: its edges to nodes that lead to weights, but to no input.
        weights: the nodes that accumulate the gradients of these weights.
    """

    node: Node
    edges: tuple[GradientEdge, ...]
    branches: tuple[GradientEdge, ...]
    weights: frozenset[Node]


class SplitBackward:
    """The backward of one graph, from the gradients that enter it to its leaves.

    Law (tests/superscaler_core/run/test_backward_halves.py): ``inputs`` and then ``weights`` give
    bitwise the same gradients as one ``torch.autograd.backward``, and no gradient is computed in
    both. The exception is a custom ``autograd.Function`` with weights: torch does not tell it
    which gradients are needed, so it computes all of them twice.

    If a border leads to a weight both directly and through another border (for example two layers
    in a row with a shared bias), torch cannot run only the direct way. The gradient of such a
    weight is computed in I (it is *early*), and W adds it to the weight.

    Args:
        given: gradients, by the edges at which they enter.
        leaves: the inputs.
    """

    def __init__(self, given: Grads, leaves: Sequence[Tensor]) -> None:
        graph = _Graph(given, leaves)
        self._leaves = tuple(leaves)
        self._early = graph.early
        direct = [e for e in given if graph.behind.get(e.node) and not graph.is_early(e)]
        self._direct = {edge: given[edge] for edge in direct}
        self._roots = {edge: grad for edge, grad in given.items() if edge not in self._direct}
        self._borders = graph.late_borders
        self._uses = graph.uses
        # The Python object of a custom function does not keep its node alive; edges to it do.
        has_custom = any(isinstance(border.node, BackwardCFunction) for border in self._borders)
        self._owners = tuple(self._roots) if has_custom else ()
        self._ends: dict[GradientEdge, Tensor] = {}
        self._entered: list[tuple[_BorderNode, Grads]] = []

    def inputs(self) -> tuple[Tensor | None, ...]:
        """The gradients of the leaves, None for a leaf without one; keep what W needs."""
        early = [GradientEdge(node, 0) for node in self._early]
        wanted = [*early, *(edge for border in self._borders for edge in border.edges)]
        # torch accepts a mix of tensors and edges, but its type annotations do not say so.
        ends: Any = (*self._leaves, *wanted)
        if not (self._roots and ends):
            return (None,) * len(self._leaves)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            tuple(self._roots),
            ends,
            tuple(self._roots.values()),
            retain_graph=bool(self._borders),
            allow_unused=True,
        )
        num_leaves, self._leaves = len(self._leaves), ()
        grad_of = dict(zip(wanted, found[num_leaves:], strict=True))
        self._ends = _there(early, grad_of)
        self._entered = [(border, _there(border.edges, grad_of)) for border in self._borders]
        self._roots, self._borders = {}, ()
        return found[:num_leaves]

    def weights(self) -> None:
        """Add the gradients of weights to their ``grad``; release what ``inputs`` has kept."""
        ends = {**self._direct, **self._ends}
        self._direct, self._ends = {}, {}
        left, self._entered = self._entered[::-1], []
        while left:
            border, entered = left.pop()
            if not entered:
                continue
            roots, grads = tuple(entered), tuple(entered.values())
            with _memory_for(border):
                if all(self._uses[weight] == 1 for weight in border.weights):
                    leaves = [_variable(node) for node in border.weights]
                    torch.autograd.backward(roots, grads, inputs=leaves)
                    continue
                found = torch.autograd.grad(roots, border.branches, grads, allow_unused=True)
            # A weight of several borders gets their sum in one addition, as in a single backward.
            grad_of = _there(border.branches, dict(zip(border.branches, found, strict=True)))
            for edge, grad in grad_of.items():
                ends[edge] = ends[edge] + grad if edge in ends else grad
        if ends:
            torch.autograd.backward(tuple(ends), tuple(ends.values()))
        self._owners = ()


class _Graph:
    """The nodes of an autograd graph that can be reached from some edges.

    Attributes:
        behind: for each node off the chain, the weights that it leads to, as the nodes that
            accumulate their gradients.
        uses: for each weight, how many borders and roots have a branch to it.
        early: weights whose gradients I computes.
        late_borders: the borders with branches left to W; each comes before those it leads to.

    Args:
        roots: the edges.
        leaves: the inputs.
    """

    def __init__(self, roots: Iterable[GradientEdge], leaves: Sequence[Tensor]) -> None:
        self._roots = tuple(roots)
        self._next: dict[Node, tuple[GradientEdge, ...]] = {}
        self._order = self._ordered()
        self._chain = {get_gradient_edge(leaf).node for leaf in leaves}
        self.behind: dict[Node, frozenset[Node]] = {}
        for node in self._order:
            after = [edge.node for edge in self._next[node]]
            if not self._chain.isdisjoint(after):
                self._chain.add(node)
            elif node not in self._chain:
                mine = frozenset({node} if node.name() == _ACCUMULATE else ())
                self.behind[node] = mine.union(*(self.behind[other] for other in after))
        borders = tuple(self._borders())
        self.uses = Counter(weight for border in borders for weight in border.weights)
        for edge in self._roots:
            self.uses.update(self.behind.get(edge.node, ()))
        self.early = self._find_early(borders)
        self.late_borders = tuple(self._late(borders))

    def _ordered(self) -> list[Node]:
        """All nodes, each after the nodes that it leads to."""
        order: list[Node] = []
        # A node is popped twice: the nodes that it leads to are emitted before its second time.
        stack: list[tuple[Node, bool]] = [(edge.node, False) for edge in reversed(self._roots)]
        while stack:
            node, is_done = stack.pop()
            if is_done:
                order.append(node)
            elif node not in self._next:
                after = [GradientEdge(n, nr) for n, nr in node.next_functions if n is not None]
                self._next[node] = tuple(after)
                stack.append((node, True))
                stack += [(edge.node, False) for edge in after if edge.node not in self._next]
        return order

    # --- borders --------------------------------------------------------------------------------

    def _borders(self) -> Iterator[_BorderNode]:
        """All borders, each before those it leads to."""
        entering: dict[Node, dict[GradientEdge, None]] = {}
        for edge in self._roots:
            entering.setdefault(edge.node, {})[GradientEdge(edge.node, edge.output_nr)] = None
        for node in reversed(self._order):
            if node not in self._chain:
                continue
            for edge in self._next[node]:
                entering.setdefault(edge.node, {})[edge] = None
            branches = tuple(dict.fromkeys(e for e in self._next[node] if self.behind.get(e.node)))
            if branches:
                yield _BorderNode(node, tuple(entering[node]), branches, self._weights(branches))

    def _weights(self, edges: Iterable[GradientEdge]) -> frozenset[Node]:
        return frozenset[Node]().union(*(self.behind[edge.node] for edge in edges))

    def _late(self, borders: Iterable[_BorderNode]) -> Iterator[_BorderNode]:
        for border in borders:
            branches = tuple(edge for edge in border.branches if not self.is_early(edge))
            if branches:
                yield replace(border, branches=branches, weights=self._weights(branches))

    # --- weights that I computes ----------------------------------------------------------------

    def is_early(self, edge: GradientEdge) -> bool:
        """Whether the weights of an edge are early; either all of them are, or none."""
        return not self.early.isdisjoint(self.behind.get(edge.node, ()))

    def _find_early(self, borders: Sequence[_BorderNode]) -> frozenset[Node]:
        """The weights that some border reaches both by a branch and in another way."""
        num_parents = Counter(edge.node for after in self._next.values() for edge in set(after))
        groups = [self.behind[e.node] for border in borders for e in border.branches]
        groups += [self.behind[e.node] for e in self._roots if e.node in self.behind]
        found: set[Node] = set()
        for border in borders:
            if any(self.uses[weight] > 1 for weight in border.weights):
                for edge in border.branches:
                    # A node with one parent can be reached in one way only.
                    if num_parents[edge.node] > 1 and self._has_detour(border.node, edge.node):
                        found |= self.behind[edge.node]
        # Weights that share an edge are early together.
        size = -1
        while len(found) > size:
            size = len(found)
            found.update(*(group for group in groups if not found.isdisjoint(group)))
        return frozenset(found)

    def _has_detour(self, start: Node, end: Node) -> bool:
        """Whether a path besides the edge between them leads from ``start`` to ``end``."""
        stack = [edge.node for edge in self._next[start] if edge.node is not end]
        seen = set(stack)
        while stack:
            after = {edge.node for edge in self._next[stack.pop()]}
            if end in after:
                return True
            stack += after - seen
            seen |= after
        return False


def _there(edges: Iterable[GradientEdge], grad_of: Mapping[GradientEdge, Tensor | None]) -> Any:
    """The gradients that exist."""
    return {edge: grad for edge in edges if (grad := grad_of[edge]) is not None}


def _variable(node: Any) -> Tensor:
    found: Tensor = node.variable
    return found


@contextmanager
def _memory_for(border: _BorderNode) -> Iterator[None]:
    """Give dropped weights memory without values, for kernels that need it but do not read it."""
    weights = map(_variable, border.weights if border.node.name() in _ASK_FOR_MEMORY else ())
    dropped = [weight for weight in weights if not weight.untyped_storage().nbytes()]
    for weight in dropped:
        weight.untyped_storage().resize_(weight.nbytes)
    try:
        yield
    finally:
        for weight in dropped:
            weight.untyped_storage().resize_(0)
