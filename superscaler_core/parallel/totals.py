"""Totals: sums over the whole batch that a step's microbatches read, such as the number of labels.

A mean over labels, spread unevenly, is no mean of microbatches' means. So its divisor is found
before the step, and is an input: a microbatch's loss is its share in that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from superscaler_core.graph.annotation import Annotation
from superscaler_core.graph.graph import Graph, Op, Total, ops_for
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import ACTIVATION, CONSTANT, INPUT, PTensor
from superscaler_core.parallel.extent import BatchExtent
from superscaler_core.parallel.sample_flow import SampleFlow
from superscaler_core.run.evaluate import code_names


def totals_of(graph: Graph, batch: Mapping[str, Tensor], num: int) -> dict[str, Tensor]:
    """The totals of a whole batch of ``num`` microbatches, by the names of the graph's inputs.

    The graph is that of a microbatch; ``batch`` has the other inputs, whole, by their names.
    """
    found: dict[str, Tensor] = {}
    for total in graph.totals:
        given = {**batch, **found}
        with torch.no_grad():
            parts = [_of_microbatch(graph, total, given, mb) for mb in range(num)]
        whole = torch.stack(parts).sum(0, dtype=parts[0].dtype)
        found[total.given.name] = _mean(whole, num) if total.is_mean else whole
    return found


def _mean(total: Tensor, num: int) -> Tensor:
    """A sum of ``num`` values divided by ``num``; of whole numbers it is one, and stays one."""
    return total / num if total.is_floating_point() or total.is_complex() else total // num


def _of_microbatch(graph: Graph, total: Total, given: Mapping[str, Tensor], mb: int) -> Tensor:
    """The value of a total for one microbatch."""
    device = next(iter(given.values())).device
    values: dict[PTensor, Tensor] = {}

    def read(tensor: PTensor) -> Tensor:
        if tensor.kind == ACTIVATION:
            return values[tensor]
        if tensor.kind == CONSTANT:
            constant: Tensor = graph.constants[tensor.name]
            return constant.to(device)
        whole, dim = given[tensor.name], graph.samples_dim(tensor)
        if dim is None:
            return whole
        return whole.narrow(dim, mb * tensor.shape[dim], tensor.shape[dim])

    for op in total.ops:
        code, names = _code_of(op)
        result = eval(code, {**names, **{f"x{i}": read(t) for i, t in enumerate(op.inputs)}})
        values |= zip(op.outputs, result if len(op.outputs) > 1 else [result], strict=True)
    return values[total.result]


@lru_cache(maxsize=1 << 10)
def _code_of(op: Op) -> tuple[CodeType, dict[str, Any]]:
    """An op's expression, which every step evaluates, with the names in it."""
    text = Part(op).call([f"x{i}" for i in range(len(op.inputs))])
    return compile(text, op.name, "eval"), code_names(op)


def with_totals(graph: Graph, flow: SampleFlow, num: int) -> Graph:
    """The graph of a microbatch whose mean over ``num`` microbatches is the whole batch's loss.

    An op that computes a total reads it from an input instead. If the flow, as ``flow_of`` found
    it, has nothing to change, the graph is the one that was given.
    """
    made = {op: _patched(op, flow, num) for op in graph.ops}
    ends = [(graph.loss, flow.loss), *((graph.results[n], of) for n, of in flow.results.items())]
    for tensor, extent in dict(ends).items():
        if extent.is_total and extent.degree != -1:
            op, power = graph.producer[tensor], extent.degree + 1
            factor = f"* {num**power}" if power > 0 else f"/ {num**-power}"
            made[op] = replace(made[op], computes=f"({made[op].code}) {factor}")
    totals: list[Total] = []
    inputs: list[PTensor] = []
    for op in graph.ops:
        if op.outputs[0].name not in flow.known:
            continue
        (result,) = op.outputs
        given = replace(result, name=f"{result.name}.whole", kind=INPUT, requires_grad=False)
        before = ops_for([made[o] for o in graph.ops[: op.index + 1]], [result])
        totals.append(Total(given, before, result, flow.known[result.name].degree == -1))
        made[op] = _reading(op, given)
        inputs.append(given)
    if all(op is made[op] for op in graph.ops):
        return graph
    return replace(
        graph,
        ops=tuple(made[op] for op in graph.ops),
        inputs=(*graph.inputs, *inputs),
        samples={**graph.samples, **{t.name: None for t in inputs if t.shape}},
        totals=tuple(totals),
    )


def result_fault(graph: Graph, tensor: PTensor, extent: BatchExtent) -> str:
    """Why a result of microbatches is none of the whole batch; "" if it is one.

    Microbatches' results are joined along their samples, and the mean of scalars is taken, of which
    ``with_totals`` makes a sum.
    """
    if extent.is_mixed:
        return extent.why
    if extent.is_rows:
        if extent.degree:
            return "its values grow with the number of samples"
        return "" if extent.place.outer == 1 else "its samples are not next to each other"
    if tensor.shape:
        return "" if extent.is_known and not extent.is_total else "it is over all samples"
    op = graph.producer[tensor]
    is_read = len(op.outputs) > 1 or bool(graph.readers.get(tensor))
    has_factor = extent.degree != (-1 if extent.is_total else 0)
    if has_factor and (is_read or not extent.is_total):
        return "its value grows with the number of samples, and others are computed of it"
    return ""


def _patched(op: Op, flow: SampleFlow, num: int) -> Op:
    """The op with the inputs divided or multiplied by the number of microbatches that need it."""
    computes = op.computes
    for position in range(len(op.inputs)):
        is_share = (op.name, position) in flow.shares
        if is_share or (op.name, position) in flow.scaled:
            # Whole numbers are not divided, as their quotient would be of torch's default dtype:
            # the numerator, input 0, is multiplied in their place.
            is_divided = is_share and op.inputs[position].dtype.startswith(("float", "bfloat"))
            field = f"{{x{position if is_divided or not is_share else 0}}}"
            computes = computes.replace(field, f"({field} {'/' if is_divided else '*'} {num})")
    return op if computes is op.computes else replace(op, computes=computes)


def _reading(op: Op, given: PTensor) -> Op:
    """An op at the place of another one that reads its result from an input."""
    dims = " ".join(f"d{i}" for i in range(len(given.shape))) or "()"
    sizes = {f"d{i}": size for i, size in enumerate(given.shape)}
    return Op(
        op.index, op.name, "whole", op.module, Annotation.parse(f"{dims} -> {dims}"), sizes,
        (given,), op.outputs, "{x0}.clone()", (), 0.0, copy_of=op.copy_of,
    )  # fmt: skip
