"""Traits: properties of a model that plans can use, derived from its graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.evaluation.least_recomputed import saved_values
from superscaler_core.graph.blocks import Blocks, OpGroup, find_blocks
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.once import once_per_graph
from superscaler_core.known import remembers
from superscaler_core.plans.pieces.axial import EVOFORMER, axial_loops


@dataclass(frozen=True, eq=False)
class Traits:
    """The properties of one model, from its graph with one microbatch."""

    graph: Graph

    @cached_property
    def blocks(self) -> Blocks:
        """The parts of the model."""
        return find_blocks(self.graph)

    @cached_property
    def has_blocks(self) -> bool:
        """Whether the model has repeated blocks, not only layers."""
        return _has(lambda: self.blocks.all)

    @cached_property
    def num_layers(self) -> int:
        """The number of blocks, which is the largest number of pipeline stages."""
        return len(self.blocks.layers)

    @cached_property
    def has_features(self) -> bool:
        """Whether blocks have inner features, which tensor parallelism cuts."""
        return _has(lambda: self.blocks.inner)

    @remembers()
    def can_cut_features(self, num: int, *, heavy: bool = False) -> bool:
        """Whether the inner features of all blocks, or of heavy ones, can be cut into ``num``."""
        dims, inner = self.blocks.dims, {*self.blocks.inner}
        chosen = heavy_blocks(self.blocks) if heavy else range(self.num_layers)
        ops = (op for i in chosen for op in self.blocks.layers[i])
        found = inner.intersection(dim for op in ops for dim in dims.of_op(op))
        return all(dims.can_cut(dim, num) for dim in found)

    @cached_property
    def has_tokens(self) -> bool:
        """Whether inputs are sequences."""
        return _has(lambda: self.blocks.tokens)

    @cached_property
    def has_words(self) -> bool:
        """Whether there is an embedding or a head that can be cut along the words."""
        return bool(self.blocks.vocabulary) and self.has_tokens

    @cached_property
    def has_lookups(self) -> bool:
        """Whether words are looked up in an embedding."""
        return _has(lambda: self.blocks.embedding)

    @cached_property
    def num_experts(self) -> int:
        """The largest degree of expert parallelism; 0 without experts."""
        if not _has(lambda: self.blocks.experts):
            return 0
        dims = self.blocks.expert_dims
        return gcd(*(n for dim in dims for n in self.blocks.dims.sizes(dim)))

    @cached_property
    def has_attention(self) -> bool:
        """Whether any block attends."""
        return _has(lambda: any(self.blocks.attention))

    @cached_property
    def is_axial(self) -> bool:
        """Whether the model has an Evoformer's modules, which can be cut along rows or columns."""
        return _has(lambda: axial_loops(self.graph, EVOFORMER))

    @cached_property
    def has_images(self) -> bool:
        """Whether the model convolves images."""
        shape = self.graph.inputs[0].shape if self.graph.inputs else ()
        return len(shape) == 4 and any("conv" in op.kind for op in self.graph.ops)

    @cached_property
    def has_heavy_blocks(self) -> bool:
        """Whether some blocks, but not all, are heavy (``heavy_blocks``)."""
        return 0 < len(heavy_blocks(self.blocks)) < len(self.blocks.layers)


@once_per_graph
def traits_of(graph: Graph) -> Traits:
    """The traits of a graph; cached."""
    return Traits(graph)


def _has(find: Callable[[], Any]) -> bool:
    try:
        return bool(find())
    except PlanError:
        return False


def heavy_blocks(blocks: Blocks) -> tuple[int, ...]:
    """Numbers of the heavy blocks: those that keep at least half as much as the largest does."""
    kept = [kept_bytes(blocks.graph, ops) for ops in blocks.layers]
    return tuple(i for i, size in enumerate(kept) if 2 * size >= max(kept))


@once_per_graph
def kept_bytes(graph: Graph, ops: OpGroup | None = None) -> int:
    """Bytes that autograd saves of an uncut microbatch: each tensor once, of which views are taken.

    Only saved tensors of ``ops`` count; those of all ops if None.
    """
    return sum(saved_values(graph, ops).values())
