"""Tofu's planner: cut every op in two along one loop, and each half again, by bytes moved.

For 2**m devices there are m levels. Each level cuts every op in two along one of its loops. Only an
op without a loop that can be cut is replicated (for example one on scalars). So a level cuts every
tensor that has the loop of its op along one dim. The objective of a level is the bytes that the two
halves move, forward and backward. For a tensor of S bytes, from the way in which its writer leaves
it to the way in which a reader needs it:

    halves along one dim -> the same            0
    halves along one dim -> along another       S / 2
    halves along one dim -> whole on both       S
    partial sums on both -> halves              S
    partial sums on both -> whole on both       2 S

If an op is cut along a loop that an input lacks, it reads that input whole, and the gradient of the
input is a partial sum. If its result lacks the loop (a reduction), the result is a partial sum, and
the op needs the whole gradient of the result. Weights are stored in halves, along the dim that
moves least; a tied weight has one such dim for all its readers.

Complexity: a level is one optimization over the graph (``elimination``). Ops with at most two
neighbours, which are most, are eliminated in linear time, like dynamic programming along a chain
whose state is the one or two tensors between both sides. The few remaining ops are decided by an
integer programme. A level is solved exactly. Deciding the levels one after another is a heuristic:
an early level may use up a short loop that a later level needs.

Differences from the published algorithm: it merges ops into groups (forward with backward,
elementwise ops with the ops they follow, steps of a recurrence), and runs dynamic programming along
the chain of groups. Here only forward and backward are merged, because elimination finds the chains
itself. In the paper, every tensor has a dim of its own, and every op fetches what it needs. Here an
activation stays as its writer leaves it, and moves once per reader.

Source: Wang et al., Supporting Very Large Models using Automatic Dataflow Graph Partitioning
(Tofu), EuroSys 2019, sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import Candidate, Request
from superscaler_core.graph.annotation import Operand
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.sliding import SlidingWindow
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.plan import Plan
from superscaler_core.plan.op_trans import replicate, split
from superscaler_core.planners.row import PlannerRow
from superscaler_core.plans import plan_row
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.schedules import one_f_one_b
from superscaler_core.space import Space, SpaceEdge, SpaceNode

WHOLE, SUM = "whole", "sum"

Way = int | str
"""State of a tensor on two halves: cut along a dim, ``WHOLE`` on both, or a partial ``SUM``."""

NO_LOOP = ""
"""Choice of an op that has no loop to cut: both halves compute the whole op."""


@dataclass(frozen=True)
class Halvings:
    """The loops along which every op is cut in two, one loop per level.

    Attributes:
        loops: loops by the op's index; ``NO_LOOP`` where both halves compute the whole op.
        moved_bytes: for each level, the bytes that all devices together move for a microbatch,
            forward and backward.
    """

    loops: Mapping[int, tuple[str, ...]]
    moved_bytes: tuple[float, ...] = ()


def halve(graph: Graph, levels: int) -> Halvings:
    """Decide all levels, one after another."""
    found = Halvings({op.index: () for op in graph.ops})
    for level in range(levels):
        space = halving_space(graph, found)
        best = alpa_intra(space)
        loops = {
            op.index: (*found.loops[op.index], space.nodes[op.index].choices[best.assignment[i]])
            for i, op in enumerate(graph.ops)
        }
        found = Halvings(loops, (*found.moved_bytes, 2.0**level * best.secs))
    return found


def halving_space(graph: Graph, before: Halvings) -> Space:
    """The choices of the next level: nodes are ops and tied weights, costs are bytes, not seconds.

    Args:
        graph: graph of one microbatch.
        before: decisions of the earlier levels.
    """
    nodes = []
    for op in graph.ops:
        ways = _loops(op, before.loops[op.index])
        own = [t for t in op.parameters if len(graph.readers[t]) == 1]
        moved = [sum(_read_once(op, t, loop, before) for t in own) for loop in ways]
        nodes.append(SpaceNode.of(op.name, ways, forward_secs=moved))
    edges = []
    for tensor, uses in graph.readers.items():
        writer = graph.producer.get(tensor)
        if writer is not None:
            edges += [_edge(nodes, writer, op, i, before) for op, i in uses]
        elif tensor.kind == PARAMETER and len(uses) > 1:
            dims = [str(i) for i, size in enumerate(tensor.shape) if size > 1] or [WHOLE]
            nodes.append(SpaceNode.of(f"{tensor.name}:stored", dims, forward_secs=0))
            edges += [_stored_edge(nodes, op, i, before) for op, i in uses]
    return Space(tuple(nodes), tuple(edges))


def moved_share(src: Way, dst: Way) -> float:
    """Bytes that two halves move in total, over the tensor's bytes; see the module's table."""
    if src == SUM:
        return 2.0 if dst == WHOLE else 1.0
    if src in (WHOLE, dst):
        return 0.0
    return 1.0 if dst == WHOLE else 0.5


@plan_row(is_proposed=False)
def tofu(plan: Plan, *, microbatches: int = 1) -> None:
    """An sProgram: Tofu's cuts of a model on N devices, with weights stored in pieces of 1/N.

    Every device computes 1/N of every op; only ops without a loop to cut are computed whole. A
    device stores 1/N of every weight, its gradient and its optimizer states. Where ops read more of
    a weight, it is gathered for the ops of a block, as in ``zero3``. A device holds 1/N of an
    activation that has all the loops along which its reader is cut; an input that an op reads whole
    stays whole on the device until the backward.

    Args:
        plan: the plan to fill; its number of devices is a power of two.
        microbatches: microbatches per step, each as large as the captured one.

    Raises:
        PlanError: the number of devices is not a power of two.
    """
    num = len(plan.devices)
    levels = num.bit_length() - 1
    if num != 1 << levels:
        raise PlanError(
            f"tofu on {num} devices: it cuts in two again and again; use {1 << levels}."
        )
    cut(plan, halve(plan.graph, levels))
    if microbatches > 1:
        plan.op_order(one_f_one_b(1, microbatches))


def propose_tofu(request: Request) -> Iterator[Candidate]:
    """Tofu's plan for every microbatch size, largest first."""
    for samples in reversed(request.samples):
        yield Candidate(f"tofu samples={samples}", samples, tofu)


def cut(plan: Plan, halvings: Halvings) -> None:
    """Fill a plan with given cuts."""
    for op in plan.graph.ops:
        for loop in halvings.loops[op.index]:
            plan.op_trans(op, split(loop, 2) if loop else replicate(2))
        plan.op_assign(op, plan.devices)
    shard_storage(plan)
    plan.unshard(*plan.blocks.groups)


def _loops(op: Op, before: Sequence[str]) -> tuple[str, ...]:
    """The loops that can be cut in two once more; only those with equal halves if any exist."""
    sizes = {i: op.sizes[i] / 2 ** before.count(i) for i in op.sizes if op.is_splittable(i)}
    even = tuple(i for i, size in sizes.items() if size % 2 == 0)
    return even or tuple(i for i, size in sizes.items() if size >= 2) or (NO_LOOP,)


def _dim(operand: Operand, loop: str) -> int | None:
    """The dim of an operand that a cut of the loop cuts; None if there is none."""
    has = (loop in ((d.loop,) if isinstance(d, SlidingWindow) else d) for d in operand)
    return next((i for i, is_cut in enumerate(has) if is_cut), None)


def _bytes(op: Op, position: int, before: Halvings) -> float:
    """Bytes of an input that one part reads after the cuts of the earlier levels."""
    operand = op.annotation.inputs[position]
    levels = sum(_dim(operand, loop) is not None for loop in before.loops[op.index])
    return float(op.inputs[position].num_bytes / 2**levels)


def _written(op: Op, tensor: PTensor, loop: str) -> tuple[Way, Way]:
    """How an op cut along a loop leaves a result, and how it needs the result's gradient."""
    dim = _dim(op.annotation.outputs[op.outputs.index(tensor)], loop)
    return (dim, dim) if dim is not None else (SUM if loop else WHOLE, WHOLE)


def _read(op: Op, position: int, loop: str) -> tuple[Way, Way]:
    """How an op cut along a loop needs an input, and how it leaves the input's gradient."""
    dim = _dim(op.annotation.inputs[position], loop)
    return (dim, dim) if dim is not None else (WHOLE, SUM if loop else WHOLE)


def _moved(tensor: PTensor, src: tuple[Way, Way], dst: tuple[Way, Way]) -> float:
    """Bytes moved forward and for the gradient backward, over the tensor's bytes."""
    (wrote, needs_grad), (reads, leaves_grad) = src, dst
    back = moved_share(leaves_grad, needs_grad) if tensor.requires_grad else 0.0
    return moved_share(wrote, reads) + back


def _edge(
    nodes: Sequence[SpaceNode], writer: Op, op: Op, position: int, before: Halvings
) -> SpaceEdge:
    tensor = op.inputs[position]
    size = _bytes(op, position, before)
    table = [
        [
            size * _moved(tensor, _written(writer, tensor, src), _read(op, position, dst))
            for dst in nodes[op.index].choices
        ]
        for src in nodes[writer.index].choices
    ]
    return SpaceEdge.of(writer.index, op.index, table)


def _stored_edge(nodes: Sequence[SpaceNode], op: Op, position: int, before: Halvings) -> SpaceEdge:
    """The edge from a tied weight's storage, which is the last node, to an op that reads it."""
    tensor, size = op.inputs[position], _bytes(op, position, before)
    stored: Iterable[Way] = (int(d) if d != WHOLE else WHOLE for d in nodes[-1].choices)
    table = [
        [size * _moved(tensor, (way, way), _read(op, position, i)) for i in nodes[op.index].choices]
        for way in stored
    ]
    return SpaceEdge.of(len(nodes) - 1, op.index, table)


def _read_once(op: Op, tensor: PTensor, loop: str, before: Halvings) -> float:
    """Bytes moved for a weight with one reader: stored as it is read, or cut if read whole."""
    position = op.inputs.index(tensor)
    way = _read(op, position, loop)
    is_cut = way[0] != WHOLE or max(tensor.shape, default=1) < 2
    stored = way[0] if is_cut else 0
    return _bytes(op, position, before) * _moved(tensor, (stored, stored), way)


PLANNER = PlannerRow(propose_tofu, turn=10)
