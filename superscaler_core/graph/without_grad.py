"""Without grad: graphs whose loss needs no gradient, which are for evaluation alone."""

from __future__ import annotations

from dataclasses import replace

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.tensor import PTensor


def check_loss(graph: Graph) -> None:
    """Refuse to train on a loss without gradient, as torch's ``backward`` does.

    Raises:
        PlanError: the loss has none.
    """
    if not graph.loss.requires_grad:
        raise PlanError(
            f"{graph.name} cannot be trained: element 0 of tensors does not require grad (the loss "
            "is an integer, or is detached, or nothing that it depends on is trained). To evaluate "
            "only, use Plan.without_grad, or evaluate instead of step."
        )


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
