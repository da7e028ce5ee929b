"""Calls of a ``torch.autograd.Function``: one op each, whose loops are unknown and never cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from superscaler_core.front_end.call import Call, literal, text
from superscaler_core.front_end.functions import TARGET, FunctionCall
from superscaler_core.front_end.rules.table import rule
from superscaler_core.graph.tensor import PTensor


@rule(TARGET)
def function(call: Call) -> Sequence[PTensor]:
    """Every device that needs its result computes all of it, as its gradient may not be a sum."""
    called: FunctionCall = call["number"]
    if not called.is_importable():
        raise call.error(
            f"generated code cannot import {called.path}; define it at the top of a module that is "
            "not the script itself."
        )
    inputs = list(dict.fromkeys(call.tensors))
    outputs = [(value.shape, value.dtype) for value in call.node.outputs]
    shapes = [t.shape for t in inputs], [shape for shape, _ in outputs]
    left, right = (", ".join(map(_whole, side)) for side in shapes)
    words = called.texts([literal(t, inputs) for t in call.tensors], lambda v: literal(v, ()))
    code = f"{called.path}.apply({', '.join(words)})"
    if called.returns_tuple and len(outputs) == 1:
        code += "[0]"
    # Dims of equal position and size share a loop: a few operations for each element.
    loops = {(i, size) for side in shapes for shape in side for i, size in enumerate(shape)}
    size = max(prod(shape) for side in shapes for shape in side)
    return call.op_of_many(
        called.name, f"{left} -> {right}", inputs, code, outputs,
        saves=range(len(inputs) + len(outputs)), imports=[called.module],
        flops=max(size, 1) / max(prod(size for _, size in loops), 1),
    )  # fmt: skip


def _whole(shape: tuple[int, ...]) -> str:
    return text(f"d{i}_{size}^" for i, size in enumerate(shape))
