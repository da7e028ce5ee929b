"""Layouts of models: the problem of a step, and the optimizer's answers as candidates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from superscaler_core.evaluation.request import Candidate, Request
from superscaler_core.graph.graph import Op
from superscaler_core.graph.tensor import ACTIVATION, PARAMETER
from superscaler_core.memory import STATES
from superscaler_core.plan import Plan
from superscaler_core.plan.mesh import Mesh
from superscaler_core.planners.row import PlannerRow
from superscaler_core.published.mesh_tf.mesh_layout import named_dims
from superscaler_core.published.mesh_tf.optimizer import auto_mtf
from superscaler_core.published.mesh_tf.plan import mesh_tf
from superscaler_core.published.mesh_tf.problem import LayoutProblem, MeshOp, MeshTensor


def layout_problem(plan: Plan, mesh: Mesh, optimizer: str = "adam") -> LayoutProblem:
    """The layout problem of a step of one microbatch, with the dims of ``named_dims``."""
    graph, dims = plan.graph, named_dims(plan.blocks)
    name_of = {each: name for name, classes in dims.items() for each in classes}
    tensors: dict[str, MeshTensor] = {}
    read = dict.fromkeys((*graph.parameters.values(), *(t for op in graph.ops for t in op.inputs)))
    given = [tensor for tensor in read if tensor not in graph.producer]

    def names(op: Op) -> frozenset[str]:
        return frozenset(n for n, classes in dims.items() for c in classes if plan.dims.ids(op, c))

    for tensor in (*given, *graph.producer):
        own = frozenset(name_of[each] for each in plan.dims.of_tensor(tensor) if each in name_of)
        copies = 2 + STATES[optimizer] if tensor.kind == PARAMETER and tensor.requires_grad else 1
        stays = tensor.kind == PARAMETER
        tensors[tensor.name] = MeshTensor(own, copies * tensor.num_bytes, stays)
        if tensor.kind == ACTIVATION and tensor.requires_grad:
            tensors[f"{tensor.name}'"] = MeshTensor(own, tensor.num_bytes)
    ops = [MeshOp((), tuple(tensor.name for tensor in given))]
    ops += [
        MeshOp(tuple(t.name for t in op.inputs), tuple(t.name for t in op.outputs), names(op))
        for op in graph.ops
    ]
    written: set[str] = set()
    for op in reversed(graph.ops):
        grads = [f"{t.name}'" for t in op.outputs if f"{t.name}'" in tensors]
        made = {f"{t.name}'" for t in op.inputs if f"{t.name}'" in tensors} - written
        operands = (*op.inputs, *op.outputs)
        saved = [operands[i].name for i in op.saves]
        reads = [grad for grad in grads if grad in written] + saved
        if grads:
            ops.append(MeshOp(tuple(reads), tuple(sorted(made)), names(op)))
            written |= made
    sizes = {
        n: frozenset(s for c in classes for s in plan.dims.sizes(c)) for n, classes in dims.items()
    }
    return LayoutProblem(mesh, sizes, tensors, tuple(ops))


def propose_mesh_tf(request: Request) -> Iterator[Candidate]:
    """The optimizer's layout for every size of microbatches and every mesh of at most two sides."""
    num = len(request.devices)
    for samples in reversed(request.samples):
        plan = Plan(request.graph_of(samples), request.devices)
        for cols in (side for side in range(1, num + 1) if num % side == 0):
            mesh = Mesh((("rows", num // cols), ("cols", cols)))
            layout = auto_mtf(layout_problem(plan, mesh, request.optimizer))
            text = f"mesh_tf samples={samples} layout={layout} mesh={mesh}"
            yield Candidate(text, samples, partial(mesh_tf, layout=layout, mesh=mesh))


PLANNER = PlannerRow(propose_mesh_tf, turn=70, thinks_first=True)
