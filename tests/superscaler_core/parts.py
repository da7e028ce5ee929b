"""Run the parts of an op on slices, and assemble their results and gradients."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.run import run_part


def values_of(graph: ss.Graph, inputs, parameters, seed: int = 0) -> dict:
    """The detached values of all tensors of a graph."""
    values = dict(zip(graph.inputs, inputs, strict=True))
    values |= {t: parameters[name].detach() for name, t in graph.parameters.items()}
    for op in graph.ops:
        for tensor in op.inputs:
            values.setdefault(tensor, graph.constants.get(tensor.name))
        results = run_part(ss.Part(op), [values[t] for t in op.inputs], seed)
        values |= dict(zip(op.outputs, (r.detach() for r in results), strict=True))
    return values


def pieces_of(op: ss.Op, loops) -> list[tuple]:
    """All combinations of pieces if every loop is cut in two, unevenly if possible."""
    cuts = [(0, op.sizes[i] - op.sizes[i] // 3 - (op.sizes[i] < 3), op.sizes[i]) for i in loops]
    halves = [[(i, a, b), (i, b, c)] for i, (a, b, c) in zip(loops, cuts, strict=True)]
    return [tuple(sorted(combination)) for combination in product(*halves)]


def loops_of(op: ss.Op) -> list[str]:
    return [i for i in op.sizes if op.is_splittable(i) and op.sizes[i] > 1]


def run_split(op: ss.Op, inputs: list[Tensor], pieces: list[tuple], seed: int = 0):
    """Outputs and input gradients of an op, as sums over its parts at their positions."""
    torch.manual_seed(1)
    outputs: list[Tensor | None] = [None] * len(op.outputs)
    grads: list[Tensor] = [
        torch.zeros_like(x, dtype=None if x.is_complex() else torch.float64) for x in inputs
    ]
    weights = [torch.randn(t.shape, dtype=torch.float64) for t in op.outputs]
    for piece in pieces:
        part = ss.Part(op, piece)
        wholes = [range_slices(view.box) for view in part.inputs]
        shards = [
            x[at]
            .clone()
            .requires_grad_(t.requires_grad and (x.is_floating_point() or x.is_complex()))
            for x, at, t in zip(inputs, wholes, op.inputs, strict=True)
        ]
        results = run_part(part, shards, seed)
        total = torch.zeros((), dtype=torch.float64)
        for i, (view, result) in enumerate(zip(part.outputs, results, strict=True)):
            assert tuple(result.shape) == view.box.shape, (part, i)
            assert str(result.dtype) == f"torch.{view.tensor.dtype}", (part, i)
            if outputs[i] is None:
                outputs[i] = torch.zeros(
                    view.tensor.shape,
                    dtype=torch.int64 if result.dtype == torch.bool else result.dtype,
                )
            outputs[i][range_slices(view.box)] += result.detach()
            if result.requires_grad:
                weighed = result * weights[i][range_slices(view.box)]
                weighed = torch.view_as_real(weighed) if weighed.is_complex() else weighed
                total = total + weighed.sum()
        if total.requires_grad:
            wanted = [s for s in shards if s.requires_grad]
            found = iter(torch.autograd.grad(total, wanted, allow_unused=True))
            for grad, shard, at in zip(grads, shards, wholes, strict=True):
                made = next(found) if shard.requires_grad else None
                if made is not None:
                    grad[at] += made
    return outputs, grads


def range_slices(box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))


def check_splits(op: ss.Op, inputs: list[Tensor], seed: int = 3) -> None:
    """Check splits by each loop, and by the first four loops together, against the whole op."""
    whole = run_split(op, inputs, [()], seed)
    loops = loops_of(op)
    for chosen in [*([i] for i in loops), loops[:4]]:
        split = run_split(op, inputs, pieces_of(op, chosen), seed)
        for kind, expected, found in zip(("output", "gradient"), whole, split, strict=True):
            for i, (a, b) in enumerate(zip(expected, found, strict=True)):
                same = torch.allclose(b, a, rtol=1e-12, atol=1e-12)
                assert same, f"{op} cut along {chosen}: {kind} {i}\n{a}\n{b}"
