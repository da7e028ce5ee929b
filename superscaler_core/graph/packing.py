"""Packing: how a graph reads a parameter whose features are several pieces."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """A dim of a parameter that a graph reads as two dims: ``num`` pieces, and their features.

    Law (tests/superscaler_core/graph/test_packed.py): ``unpacked(packed(x))`` is ``x``.

    Attributes:
        dim: the dim of the model's parameter.
        num: number of pieces, all of one size.
    """

    dim: int
    num: int

    def packed(self, whole: Tensor) -> Tensor:
        """A whole tensor of the model as the graph reads it; a view if it is contiguous."""
        return whole.reshape(self.shape(tuple(whole.shape)))

    def unpacked(self, tensor: Tensor) -> Tensor:
        """A tensor, whole or a part, in the dims of the model instead of those of the graph."""
        return tensor.flatten(self.dim, self.dim + 1)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which the graph reads a parameter of this shape."""
        dim, num = self.dim, self.num
        return (*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])

    def merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that ``unpacked`` gives a tensor of this shape."""
        return (*shape[: self.dim], prod(shape[self.dim : self.dim + 2]), *shape[self.dim + 2 :])
