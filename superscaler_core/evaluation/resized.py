"""Resized: the graph of a microbatch of any size, from the graphs of two other sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.tensor import CONSTANT, PARAMETER, PTensor

Key = TypeVar("Key")


class _DifferError(Exception):
    """Raised if two graphs differ in more than sizes."""


def is_same(a: Graph, b: Graph) -> bool:
    """Whether two graphs are equal, op by op and size by size; values of constants may differ."""
    return _sizes(a) == _sizes(b)


def _sizes(graph: Graph) -> list[object]:
    ops = [(op.name, op.form, op.inputs, op.outputs) for op in graph.ops]
    return [ops, graph.inputs, graph.losses, graph.recycled, graph.state, graph.results]


def resized(small: Graph, large: Graph, samples: tuple[int, int], wanted: int) -> Graph | None:
    """The graph of a microbatch of another size; None if two graphs differ in more than sizes.

    In nearly all models, the sizes of tensors and loops are linear in the batch, and everything
    else is constant. A model is not resized if the arguments of an op contain the size of the
    batch, as a mean over the batch does. A size that is not linear, such as a capacity that is
    rounded up, is not detected. A user of a resized graph therefore has to compare it with the
    captured one in the end (``Request.captured``, ``is_same``).

    Law (tests/superscaler_core/evaluation): if the model's sizes are linear in the batch, the
    result equals the graph that is captured with this size, op by op.

    Args:
        small, large: two graphs of one model.
        samples: samples of their microbatches, two different numbers.
        wanted: samples of the microbatch that is asked for.
    """
    try:
        return _Interpolation(small, large, samples, wanted).graph()
    except _DifferError:
        return None


_SAME = ("name", "kind", "module", "annotation", "computes", "saves", "flops", "imports", "modules")
"""Attributes of an op that have to be equal in both graphs."""


@dataclass(frozen=True, eq=False)
class _Interpolation:
    """A linear interpolation of two graphs with these samples; each tensor is made once."""

    small: Graph
    large: Graph
    samples: tuple[int, int]
    wanted: int
    made: dict[str, PTensor] = field(default_factory=dict)

    def graph(self) -> Graph:
        """The graph of ``wanted`` samples."""
        small, large = self.small, self.large
        inputs = self._tensors(small.inputs, large.inputs)
        ops = tuple(self._op(a, b) for a, b in _pairs(small.ops, large.ops))
        if small.parameters != large.parameters or small.constants.keys() != large.constants.keys():
            raise _DifferError
        losses = self._tensors(small.losses, large.losses)
        return replace(
            small,
            ops=ops,
            inputs=inputs,
            loss=losses[0],
            more_losses=losses[1:],
            recycled=self._mapped(small.recycled, large.recycled),
            state=self._mapped(small.state, large.state),
            results={name: self.made[of.name] for name, of in small.results.items()},
            more_results=tuple((name, self.made[of.name]) for name, of in small.more_results),
        )

    def _size(self, first: int, second: int) -> int:
        """The interpolated size, given the size in both graphs; it has to be whole and above 0."""
        if first == second:
            return first
        start, end = self.samples
        steps, rest = divmod((second - first) * (self.wanted - start), end - start)
        if rest or first + steps < 1:
            raise _DifferError
        return first + steps

    def _tensors(self, a: Iterable[PTensor], b: Iterable[PTensor]) -> tuple[PTensor, ...]:
        return tuple(self._tensor(x, y) for x, y in _pairs(tuple(a), tuple(b)))

    def _tensor(self, a: PTensor, b: PTensor) -> PTensor:
        """The interpolated tensor; a constant is taken from ``a``."""
        if a.name in self.made:
            return self.made[a.name]
        found = a
        if (a.name, a.dtype, a.kind, a.requires_grad) != (b.name, b.dtype, b.kind, b.requires_grad):
            raise _DifferError
        if a.shape != b.shape:
            if a.kind in (PARAMETER, CONSTANT):
                raise _DifferError
            found = replace(a, shape=tuple(self._size(x, y) for x, y in _pairs(a.shape, b.shape)))
        return self.made.setdefault(a.name, found)

    def _op(self, a: Op, b: Op) -> Op:
        is_same = all(getattr(a, name) == getattr(b, name) for name in _SAME)
        if not is_same or a.sizes.keys() != b.sizes.keys():
            raise _DifferError
        return replace(
            a,
            sizes={loop: self._size(size, b.sizes[loop]) for loop, size in a.sizes.items()},
            inputs=self._tensors(a.inputs, b.inputs),
            outputs=self._tensors(a.outputs, b.outputs),
        )

    def _mapped(
        self, a: Mapping[PTensor, PTensor], b: Mapping[PTensor, PTensor]
    ) -> dict[PTensor, PTensor]:
        found = self._tensors(chain(*a.items()), chain(*b.items()))
        return dict(zip(found[::2], found[1::2], strict=True))


def _pairs(a: tuple[Key, ...], b: tuple[Key, ...]) -> Iterable[tuple[Key, Key]]:
    if len(a) != len(b):
        raise _DifferError
    return zip(a, b, strict=True)
