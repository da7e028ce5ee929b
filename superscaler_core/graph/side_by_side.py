"""Side by side: copies of a model that share weights, one copy per route of microbatches."""

from __future__ import annotations

from dataclasses import replace

from superscaler_core.graph.graph import Graph
from superscaler_core.graph.tensor import PTensor


def copy_name(name: str, copy: int) -> str:
    """The name of an op or a tensor in a copy of its model; the first copy is the model itself."""
    return f"{name}@{copy}" if copy else name


def side_by_side(graph: Graph, num: int) -> Graph:
    """``num`` copies of a graph that share parameters, constants and the inputs of the batch.

    Copy 0 is the graph's own ops; its ops come first, then those of copy 1, and so on.

    Law (tests/superscaler_core/graph/test_graph.py): every copy computes what the graph computes,
    with the same random numbers for the same microbatch.
    """
    own = {t for op in graph.ops for t in op.outputs} | set(graph.recycled)

    def of(tensor: PTensor, copy: int) -> PTensor:
        return replace(tensor, name=copy_name(tensor.name, copy)) if tensor in own else tensor

    copies = range(1, num)
    ops = (
        replace(
            op,
            index=copy * len(graph.ops) + op.index,
            name=copy_name(op.name, copy),
            inputs=tuple(of(t, copy) for t in op.inputs),
            outputs=tuple(of(t, copy) for t in op.outputs),
            copy_of=op,
        )
        for copy in copies
        for op in graph.ops
    )
    inputs = (of(t, copy) for copy in copies for t in graph.inputs if t in own)
    recycled = {of(a, i): of(b, i) for i in copies for a, b in graph.recycled.items()}
    return replace(
        graph,
        ops=(*graph.ops, *ops),
        inputs=(*graph.inputs, *inputs),
        more_losses=tuple(of(graph.loss, copy) for copy in copies),
        recycled={**graph.recycled, **recycled},
        more_results=tuple((n, of(t, copy)) for copy in copies for n, t in graph.results.items()),
    )
