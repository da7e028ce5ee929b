"""Place graph: the placement problem of a captured model, and the plan of a placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np

from superscaler_core.cost import CostModel
from superscaler_core.cost.memory_cost import counted_once
from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import Candidate, Request, SearchPlanner
from superscaler_core.graph.blocks import find_blocks
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.plan import Device, OpSplit, Plan
from superscaler_core.plan.overlap import Overlap
from superscaler_core.planners.row import PlannerRow
from superscaler_core.published.placement.earliest_finish import earliest_finish
from superscaler_core.published.placement.min_cut import min_cut
from superscaler_core.published.placement.problem import (
    Operation,
    OperationResult,
    PlacementProblem,
    with_backward,
)
from superscaler_core.schedules import one_f_one_b
from superscaler_core.space import Assignment, Solution


def place_graph(
    costs: CostModel, devices: Sequence[Device], memory_bytes: float = inf
) -> PlacementProblem:
    """The placement problem of a model: a microbatch, its backward, and the optimizer.

    Operation i of the problem is op i of the graph; the backwards come behind all forwards. An op
    holds its weights, gradients and optimizer states, and what it saves for its backward. Ops with
    a common parameter are one group. An op whose results only one op reads is in the group of that
    op, unless a repeated block begins or ends between them (the rule of Mirhoseini et al., within
    blocks).

    Args:
        costs: the cost functions; devices are equal, and links are those of its topology.
        devices: devices of the topology; an assignment names them by their place here.
        memory_bytes: memory of a device for what ops hold; what they need while they run is not
            counted.
    """
    graph, whole = costs.graph, OpSplit.of([((), 0, devices[0])])
    prices = [costs.op_cost(op, whole) for op in graph.ops]
    memory = counted_once(graph.ops, [costs.memory_cost(op, whole) for op in graph.ops])
    update = dict.fromkeys(graph.ops, 0.0)
    for parameter in graph.parameters.values():
        readers = graph.readers.get(parameter, ())
        if readers:
            update[readers[-1][0]] += costs.sync_cost(parameter, whole).update_secs
    num = len(devices)
    forward = [
        Operation(
            op.name,
            (price.forward_secs,) * num,
            float(held.resting_bytes + held.grads_bytes + held.kept_bytes),
            group,
        )
        for op, price, held, group in zip(graph.ops, prices, memory, _groups(graph), strict=True)
    ]
    results = [
        OperationResult(
            op.index,
            tuple(sorted({reader.index for reader, _ in graph.readers[tensor]})),
            float(tensor.num_bytes),
        )
        for op in graph.ops
        for tensor in op.outputs
        if tensor in graph.readers
    ]
    secs = [price.backward_secs + update[op] for op, price in zip(graph.ops, prices, strict=True)]
    operations, messages = with_backward(forward, results, [(each,) * num for each in secs])
    latency, speed = np.zeros((num, num)), np.full((num, num), inf)
    levels = costs.topology.levels
    for a, b in np.ndindex(num, num):
        passed = levels[: costs.topology.distance(devices[a], devices[b])]
        if passed:
            latency[a, b] = costs.topology.latencies[len(passed) - 1]
            speed[a, b] = min(level.link.bytes_per_sec for level in passed)
    return PlacementProblem(operations, messages, latency, speed, (float(memory_bytes),) * num)


def _groups(graph: Graph) -> list[str]:
    """The name of every op's group: the name of the group's last op in the graph."""
    block_of = {op: i for i, layer in enumerate(find_blocks(graph).layers) for op in layer}
    found: dict[Op, Op] = {}

    def last(op: Op) -> Op:
        while op in found:
            op = found[op]
        return op

    def join(a: Op, b: Op) -> None:
        first, then = sorted((last(a), last(b)), key=lambda op: op.index)
        if first is not then:
            found[first] = then

    for op in graph.ops:
        readers = {r for tensor in op.outputs for r, _ in graph.readers.get(tensor, ())}
        if len(readers) == 1 and block_of.get(op) == block_of.get(next(iter(readers))):
            join(op, *readers)
    for parameter in graph.parameters.values():
        ops = [op for op, _ in graph.readers.get(parameter, ())]
        for op in ops[1:]:
            join(ops[0], op)
    return [last(op).name for op in graph.ops]


def assign(
    plan: Plan, *, problem: PlacementProblem, assignment: Assignment, microbatches: int = 1
) -> None:
    """An sProgram: every op whole, on the device of its group; moves overlap with computing.

    The step of the program differs from that of the problem. A value moves at the end of the
    segment that computes it, which may be later than the end of the op. Gradients of weights are
    computed while other gradients move.

    Args:
        plan: a plan of the model, on the problem's devices, in their order.
        problem: from ``place_graph``.
        assignment: an assignment of the problem.
        microbatches: microbatches in a step, one after another.
    """
    for op in plan.graph.ops:
        plan.op_assign(op, plan.devices[assignment[problem.group_of[op.index]]])
    plan.overlap = Overlap(moves=True)
    if microbatches > 1:
        plan.op_order(one_f_one_b(1, microbatches))


Placing = Callable[[PlacementProblem], Solution]

PLACERS: dict[str, Placing] = {"earliest_finish": earliest_finish, "min_cut": min_cut}
"""Planners that place models of any size without further input, by name."""


def search_placement(placer: Placing) -> SearchPlanner:
    """A search planner from a placement planner: a candidate for every size of microbatch."""
    return partial(_propose, placer=placer)


def _propose(request: Request, *, placer: Placing) -> Iterator[Candidate]:
    for samples in reversed(request.samples):
        problem = place_graph(request.costs(samples), request.devices, request.memory_bytes)
        try:
            found = placer(problem)
        except PlanError:
            continue
        microbatches = request.microbatches(samples)
        how: dict[str, Any] = {
            "problem": problem,
            "assignment": found.assignment,
            "microbatches": microbatches,
        }
        used = len(set(found.assignment))
        name = f"{samples} samples, {len(problem.groups)} groups on {used} devices"
        yield Candidate(name, samples, partial(assign, **how))


EARLIEST_FINISH = PlannerRow(search_placement(earliest_finish), turn=100, thinks_first=True)
MIN_CUT = PlannerRow(search_placement(min_cut), turn=110, thinks_first=True)
