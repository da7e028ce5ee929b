"""SplitBackward: the backward of one graph in two halves, for inputs (I) and for weights (W).

A node of the graph is *on the chain* if an input is behind it; I runs all of these. A *border* is a
node on the chain with a *branch*: an edge to a node that has weights behind it, but no input. I
captures the gradients that enter a border, and W runs the border again for its branches alone. A
product of an input and a weight makes one product in I and the other in W, where a whole backward
makes both.
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
"""Gradients by the edges by which they enter a graph."""

_ACCUMULATE = "torch::autograd::AccumulateGrad"
"""Name of the nodes that add to the gradient of a leaf."""

_ASK_FOR_MEMORY = frozenset(
    {"NativeLayerNormBackward0", "NativeGroupNormBackward0", "ConvolutionBackward0"}
)
"""Nodes whose kernels ask for the memory of a weight also where they read nothing of it."""


@dataclass(frozen=True)
class _BorderNode:
    """A node on the chain that has weights behind branches of its own.

    Attributes:
        node: the node.
        edges: by which gradients enter it.
        branches: the edges to what has weights behind it, but no input.
        weights: the nodes that add to the gradients of these weights.
    """

    node: Node
    edges: tuple[GradientEdge, ...]
    branches: tuple[GradientEdge, ...]
    weights: frozenset[Node]


class SplitBackward:
    """The backward of one graph, from gradients that enter it to its leaves.

    Law (tests/superscaler_core/run/test_split_backward.py): ``inputs`` and then ``weights`` leave
    the gradients that one ``torch.autograd.backward`` leaves, bit by bit. Neither computes what the
    other does. The exception is a custom ``autograd.Function`` with weights: torch does not tell it
    which gradients are asked for, so it computes all of them twice.

    If a border leads to a weight both directly and through another border (two layers in a row that
    share a bias), torch cannot run it for the first way alone. The gradient of such a weight is
    computed in I (it is *early*), and W adds it to the weight.

    Args:
        given: gradients by where they enter.
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
        # The Python object of a custom function does not keep its node; what leads to it does.
        has_custom = any(isinstance(border.node, BackwardCFunction) for border in self._borders)
        self._owners = tuple(self._roots) if has_custom else ()
        self._ends: dict[GradientEdge, Tensor] = {}
        self._entered: list[tuple[_BorderNode, Grads]] = []

    def inputs(self) -> tuple[Tensor | None, ...]:
        """The gradients of the leaves, None where none reaches a leaf; what W needs is kept."""
        early = [GradientEdge(node, 0) for node in self._early]
        wanted = [*early, *(edge for border in self._borders for edge in border.edges)]
        # torch takes tensors and edges together, which its types do not say.
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
        """Add to the gradients of weights; what this half needs is freed as it goes."""
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
            # A weight that several borders lead to gets their sum in one go, as in one backward.
            grad_of = _there(border.branches, dict(zip(border.branches, found, strict=True)))
            for edge, grad in grad_of.items():
                ends[edge] = ends[edge] + grad if edge in ends else grad
        if ends:
            torch.autograd.backward(tuple(ends), tuple(ends.values()))
        self._owners = ()


class _Graph:
    """The nodes behind some edges.

    Args:
        roots: the edges.
        leaves: the inputs.

    Attributes:
        behind: by node off the chain, the weights behind it, as the nodes that add to their
            gradients.
        uses: by weight, how many borders and roots have a branch to it.
        early: weights that are not left to W.
        late_borders: borders with what is left to W of them, each before those behind it.
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
        """All nodes, each after what is behind it."""
        order: list[Node] = []
        # A node is met twice: what is behind it goes before its second time.
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
        """All borders, each before those behind it."""
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

    # --- what is not left to W ------------------------------------------------------------------

    def is_early(self, edge: GradientEdge) -> bool:
        """Whether the weights behind an edge are early; all of them are, or none."""
        return not self.early.isdisjoint(self.behind.get(edge.node, ()))

    def _find_early(self, borders: Sequence[_BorderNode]) -> frozenset[Node]:
        """The weights that some border leads to by a branch and in another way."""
        num_parents = Counter(edge.node for after in self._next.values() for edge in set(after))
        groups = [self.behind[e.node] for border in borders for e in border.branches]
        groups += [self.behind[e.node] for e in self._roots if e.node in self.behind]
        found: set[Node] = set()
        for border in borders:
            if any(self.uses[weight] > 1 for weight in border.weights):
                for edge in border.branches:
                    # With one parent there is no other way.
                    if num_parents[edge.node] > 1 and self._has_detour(border.node, edge.node):
                        found |= self.behind[edge.node]
        # What ends together is early together.
        size = -1
        while len(found) > size:
            size = len(found)
            found.update(*(group for group in groups if not found.isdisjoint(group)))
        return frozenset(found)

    def _has_detour(self, start: Node, end: Node) -> bool:
        """Whether a way leads from a node to another but for the edge between them."""
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
    """The gradients that are there."""
    return {edge: grad for edge in edges if (grad := grad_of[edge]) is not None}


def _variable(node: Any) -> Tensor:
    found: Tensor = node.variable
    return found


@contextmanager
def _memory_for(border: _BorderNode) -> Iterator[None]:
    """Give dropped weights memory, without values, where a kernel asks for it and reads nothing."""
    weights = map(_variable, border.weights if border.node.name() in _ASK_FOR_MEMORY else ())
    dropped = [weight for weight in weights if not weight.untyped_storage().nbytes()]
    for weight in dropped:
        weight.untyped_storage().resize_(weight.nbytes)
    try:
        yield
    finally:
        for weight in dropped:
            weight.untyped_storage().resize_(0)
