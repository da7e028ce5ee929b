"""Without grad: a graph for evaluation, in which no tensor needs a gradient."""

from __future__ import annotations

from dataclasses import replace

from superscaler_core.graph.graph import Graph
from superscaler_core.graph.tensor import PTensor


def without_grad(graph: Graph) -> Graph:
    """The same ops on the same tensors, without gradients: its programs have only a forward.

    Names are kept, so that decisions about one graph also apply to the other.
    """

    def of(tensor: PTensor) -> PTensor:
        return replace(tensor, requires_grad=False)

    return replace(
        graph,
        ops=tuple(
            replace(op, inputs=tuple(map(of, op.inputs)), outputs=tuple(map(of, op.outputs)))
            for op in graph.ops
        ),
        parameters={name: of(tensor) for name, tensor in graph.parameters.items()},
        loss=of(graph.loss),
        recycled={given: of(made) for given, made in graph.recycled.items()},
        state={buffer: of(kept) for buffer, kept in graph.state.items()},
        results={name: of(tensor) for name, tensor in graph.results.items()},
    )
