"""Resized: the graph of a microbatch of any size, from the graphs of two other sizes.

Capturing a large model takes seconds, and a search asks for many sizes. In nearly all models, the
sizes of tensors and loops are linear in the batch, and everything else is constant. A model is not
resized if the arguments of an op contain the size of the batch, as a mean over the batch does. A
size that is not linear, such as a capacity that is rounded up, is not detected. A user of a resized
graph therefore has to compare it with the captured one in the end (``Request.captured``,
``is_same``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class _Line:
    """A linear interpolation of sizes, from two numbers of samples to a third one.

    Attributes:
        places: the numbers of samples of the two graphs.
        place: the number of samples that is asked for.
    """

    places: tuple[int, int]
    place: int

    def at(self, first: int, second: int) -> int:
        """The interpolated size, given the size in both graphs.

        Raises:
            _DifferError: the result is not a whole number above 0.
        """
        if first == second:
            return first
        start, end = self.places
        steps, rest = divmod((second - first) * (self.place - start), end - start)
        if rest or first + steps < 1:
            raise _DifferError
        return first + steps


def resized(small: Graph, large: Graph, samples: tuple[int, int], wanted: int) -> Graph | None:
    """The graph of a microbatch of another size; None if two graphs differ in more than sizes.

    Law (tests/superscaler_core/planners/search): if the model's sizes are linear in the batch, the
    result equals the graph that is captured with this size, op by op.

    Args:
        small, large: two graphs of one model.
        samples: samples of their microbatches, two different numbers.
        wanted: samples of the microbatch that is asked for.
    """
    try:
        return _resized(small, large, _Line(samples, wanted))
    except _DifferError:
        return None


def _resized(small: Graph, large: Graph, line: _Line) -> Graph:
    made: dict[str, PTensor] = {}

    def tensor(a: PTensor, b: PTensor) -> PTensor:
        if a.name not in made:
            made[a.name] = _tensor(a, b, line)
        return made[a.name]

    def tensors(a: Iterable[PTensor], b: Iterable[PTensor]) -> tuple[PTensor, ...]:
        return tuple(tensor(x, y) for x, y in _pairs(tuple(a), tuple(b)))

    inputs = tensors(small.inputs, large.inputs)
    ops = tuple(_op(a, b, line, tensors) for a, b in _pairs(small.ops, large.ops))
    if small.parameters != large.parameters or small.constants.keys() != large.constants.keys():
        raise _DifferError
    losses = tensors(small.losses, large.losses)
    return replace(
        small,
        ops=ops,
        inputs=inputs,
        loss=losses[0],
        more_losses=losses[1:],
        recycled=_mapped(small.recycled, large.recycled, tensors),
        state=_mapped(small.state, large.state, tensors),
        results={name: made[of.name] for name, of in small.results.items()},
        more_results=tuple((name, made[of.name]) for name, of in small.more_results),
    )


def _tensor(a: PTensor, b: PTensor, line: _Line) -> PTensor:
    """The interpolated tensor; a constant is taken from ``a``."""
    if (a.name, a.dtype, a.kind, a.requires_grad) != (b.name, b.dtype, b.kind, b.requires_grad):
        raise _DifferError
    if a.shape == b.shape:
        return a
    if a.kind in (PARAMETER, CONSTANT):
        raise _DifferError
    return replace(a, shape=tuple(line.at(x, y) for x, y in _pairs(a.shape, b.shape)))


_SAME = ("name", "kind", "module", "annotation", "computes", "saves", "flops", "imports", "modules")
"""Attributes of an op that have to be equal in both graphs."""


def _op(
    a: Op,
    b: Op,
    line: _Line,
    tensors: Callable[[Iterable[PTensor], Iterable[PTensor]], tuple[PTensor, ...]],
) -> Op:
    if (
        any(getattr(a, name) != getattr(b, name) for name in _SAME)
        or a.sizes.keys() != b.sizes.keys()
    ):
        raise _DifferError
    return replace(
        a,
        sizes={loop: line.at(size, b.sizes[loop]) for loop, size in a.sizes.items()},
        inputs=tensors(a.inputs, b.inputs),
        outputs=tensors(a.outputs, b.outputs),
    )


def _mapped(
    a: Mapping[PTensor, PTensor],
    b: Mapping[PTensor, PTensor],
    tensors: Callable[[Iterable[PTensor], Iterable[PTensor]], tuple[PTensor, ...]],
) -> dict[PTensor, PTensor]:
    found = tensors(chain(*a.items()), chain(*b.items()))
    return dict(zip(found[::2], found[1::2], strict=True))


def _pairs(a: tuple[Key, ...], b: tuple[Key, ...]) -> Iterable[tuple[Key, Key]]:
    if len(a) != len(b):
        raise _DifferError
    return zip(a, b, strict=True)
