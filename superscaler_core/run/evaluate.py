"""Evaluate: run a whole graph in one process, as the reference for every plan."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor

from superscaler_core import ops
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.ops import mix


def code_names(op: Op) -> dict[str, Any]:
    """The values of the names that occur in an op's code."""
    names: dict[str, Any] = {"torch": torch, "F": F, "ops": ops, "math": math}
    for path in op.imports:
        importlib.import_module(path)
        root = path.partition(".")[0]
        names[root] = importlib.import_module(root)
    return names


def run_part(part: Part, inputs: Sequence[Tensor], seed: int = 0) -> tuple[Tensor, ...]:
    """Compute the outputs of one part from its shards, in the order of its op.

    Args:
        part: the part.
        inputs: shards with the boxes of ``part.inputs``.
        seed: seed of the microbatch; the op's number is added, as in generated code.
    """
    fields = [f"x{i}" for i in range(len(inputs))]
    code = part.call(fields, seed=f"seed + {part.op.index}")
    names = code_names(part.op) | dict(zip(fields, inputs, strict=True)) | {"seed": seed}
    result = eval(code, names)
    return tuple(result) if len(part.op.outputs) > 1 else (result,)


def evaluate(
    graph: Graph,
    inputs: Sequence[Tensor] | Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    seed: int = 0,
    *,
    passes: int = 0,
) -> Tensor:
    """The loss of one microbatch; differentiable with respect to the parameters.

    Args:
        graph: a captured model.
        inputs: inputs by position or by name, without the recycled ones.
        parameters: by the names of ``graph.parameters``; others are ignored.
        seed: seed of dropout.
        passes: number of forwards without gradient before the one that computes the loss.

    Returns:
        The scalar loss.
    """
    given = (
        inputs
        if isinstance(inputs, Mapping)
        else dict(zip((t.name for t in graph.batch_inputs), inputs, strict=True))
    )
    values: dict[PTensor, Tensor] = {t: given[t.name] for t in graph.batch_inputs}
    for name, tensor in graph.parameters.items():
        packing = graph.packed.get(name)
        values[tensor] = packing.packed(parameters[name]) if packing else parameters[name]
    values |= {t: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in graph.recycled}
    for number in range(passes):
        with torch.no_grad():
            made = _forward(graph, values, mix(seed, number))
        values |= {given: made[tensor] for given, tensor in graph.recycled.items()}
    return _forward(graph, values, seed)[graph.loss]


def _forward(graph: Graph, given: Mapping[PTensor, Tensor], seed: int) -> dict[PTensor, Tensor]:
    """All tensors of one pass."""
    values = dict(given)
    for op in graph.ops:
        for tensor in op.inputs:
            if tensor.kind == "constant":
                values[tensor] = graph.constants[tensor.name]
        results = run_part(Part(op), [values[t] for t in op.inputs], seed)
        values |= dict(zip(op.outputs, results, strict=True))
    return values
