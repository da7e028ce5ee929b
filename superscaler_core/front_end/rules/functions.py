"""Calls of a ``torch.autograd.Function``: one op each, whose loops are unknown and never cut."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.front_end.call import Call, literal
from superscaler_core.front_end.functions import TARGET, FunctionCall
from superscaler_core.front_end.rules.opaque import opaque_op
from superscaler_core.front_end.rules.table import rule
from superscaler_core.graph.tensor import PTensor


@rule(TARGET)
def function(call: Call) -> Sequence[PTensor]:
    """Every device that needs its result computes all of it, as its gradient may not be a sum."""
    called: FunctionCall = call["number"]
    if not called.is_importable():
        raise call.refusal(
            f"generated code cannot import {called.path}; define it at the top of a module that is "
            "not the script itself."
        )
    inputs = list(dict.fromkeys(call.tensors))
    words = called.texts([literal(t, inputs) for t in call.tensors], lambda v: literal(v, ()))
    code = f"{called.path}.apply({', '.join(words)})"
    if called.returns_tuple and len(call.node.outputs) == 1:
        code += "[0]"
    return opaque_op(call, called.name, inputs, code, imports=[called.module])
