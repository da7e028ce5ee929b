"""Calls that are not traced: each is one op; its loops are unknown if it has no annotation."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.errors import AnnotationError
from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, literal
from superscaler_core.rules.calls import TARGET, TracedCall
from superscaler_core.rules.opaque import opaque_op
from superscaler_core.rules.table import rule


@rule(TARGET)
def called(call: RuleCall) -> Sequence[PTensor]:
    what: TracedCall = call["number"]
    if why := what.refused():
        raise call.refusal(why)
    # An annotation has an operand for every tensor, even if some are the same.
    inputs = call.tensors if what.annotation else list(dict.fromkeys(call.tensors))
    code = what.code([literal(t, inputs) for t in call.tensors])
    try:
        return opaque_op(
            call, what.name, inputs, code, imports=what.imports, annotation=what.annotation,
            flops=what.flops, hint=what.hint, modules=what.modules,
        )  # fmt: skip
    except AnnotationError as error:
        raise call.refusal(str(error)) from None
