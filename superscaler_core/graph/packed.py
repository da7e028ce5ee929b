"""Packed parameters: one linear map makes several results, such as queries, keys and values.

A device with some of the heads needs a part of *each* piece of the features, which is no box of
their dim. So the graph reads such a parameter with two dims, ``[pieces, features]``: a part along
the features is then a box, and the product stays one product of the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from superscaler_core.graph.annotation import loops_of
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.packing import Packing
from superscaler_core.graph.repeats import is_map
from superscaler_core.graph.tensor import ACTIVATION, INPUT, PARAMETER, PTensor


def find_packings(graph: Graph) -> dict[str, Packing]:
    """The parameters that can be read packed, by name: weights of products, and their biases.

    All readers of a parameter have to agree on its packing, and their results may only be read
    piece by piece.
    """
    found: dict[PTensor, list[Packing]] = {}
    for op in graph.ops:
        for feature, loop in _made(op):
            chain: list[tuple[PTensor, int]] = []
            sizes = set(_pieces(graph, op.outputs[0], feature, chain))
            num = max(sizes, default=1)
            if sizes != {num} or not 1 < num < op.sizes[loop]:
                continue
            for tensor, dim in (*_read_along(op, loop), *chain):
                found.setdefault(tensor, []).append(Packing(dim, num))
    return {
        tensor.name: packings[0]
        for tensor, packings in found.items()
        if len(packings) == len(graph.readers[tensor]) and len(set(packings)) == 1
    }


def _made(op: Op) -> Iterator[tuple[int, str]]:
    """The dims of a linear map's result that its input lacks, each with its loop."""
    if op.kind in ("linear", "matmul") and op.inputs[1].kind == PARAMETER and is_map(op):
        read = loops_of(op.annotation.inputs[0])
        for feature, dim in enumerate(op.annotation.outputs[0]):
            if isinstance(dim, tuple) and len(dim) == 1 and dim[0] not in read:
                yield feature, dim[0]


def _read_along(op: Op, loop: str) -> Iterator[tuple[PTensor, int]]:
    """The parameters of an op that have a loop as one of their dims."""
    for tensor, operand in zip(op.inputs, op.annotation.inputs, strict=True):
        if tensor.kind == PARAMETER and (loop,) in operand:
            yield tensor, operand.index((loop,))


def _pieces(
    graph: Graph, tensor: PTensor, dim: int, chain: list[tuple[PTensor, int]], is_own: bool = False
) -> Iterator[int]:
    """For every reader, the number of pieces into which it cuts a dim; 0 if it does not cut it.

    The tensor is a product's result, or computed from it. The dim is that of the features, or of
    the pieces alone if ``is_own``. ``chain`` collects parameters that are added, with their dims.
    """
    for op, position in graph.readers.get(tensor, ()):
        loops, out = op.annotation.inputs[position][dim], op.annotation.outputs[0]
        activations = [t for t in op.inputs if t.kind in (ACTIVATION, INPUT)]
        if not isinstance(loops, tuple) or len(activations) != 1 or len(op.outputs) != 1:
            yield 0
        elif len(loops) == 1 and loops[0] in op.annotation.fixed:
            num, left = divmod(prod(tensor.shape), prod(op.outputs[0].shape))
            # If the pieces have a dim of their own, every piece is one index of it.
            yield 0 if left or op.flops or (is_own and num != tensor.shape[dim]) else num
        elif len(loops) == 1 and (is_own or op.kind == "add_bias" or not op.flops):
            chain += _read_along(op, loops[0])
            if loops in out:
                yield from _pieces(graph, op.outputs[0], out.index(loops), chain, is_own)
            else:
                yield 0
        elif not is_own and (loops[:1] in out) and not op.flops:
            yield from _pieces(graph, op.outputs[0], out.index(loops[:1]), chain, is_own=True)
        else:
            yield 0
