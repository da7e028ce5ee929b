"""Functions under ``@register_op``: one op each, called by its import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from superscaler_core.errors import AnnotationError
from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, fields, iterations, largest, literal
from superscaler_core.rules.opaque import flops_of_products
from superscaler_core.rules.register import NOT_IMPORTED, REGISTERED, Registered
from superscaler_core.rules.table import rule


@rule("registered")
def registered(call: RuleCall) -> Sequence[PTensor]:
    known = REGISTERED[call.node.base]
    if not known.is_importable():
        raise call.refusal(NOT_IMPORTED.format(known.path))
    inputs = [v for v in call.args.values() if isinstance(v, PTensor)]
    words = [fields(len(inputs))]
    words += [f"{name}={literal(call[name], ())}" for name in known.attributes]
    try:
        return call.op_of_many(
            known.function.__name__, str(known.annotation), inputs,
            f"{known.path}({', '.join(words)})",
            call.outputs, saves=known.saves, flops=_flops(call, known, inputs),
            sizes=known.sizes_of(call.args), imports=[known.function.__module__],
        )  # fmt: skip
    except AnnotationError as error:
        raise call.refusal(str(error)) from None


def _flops(call: RuleCall, known: Registered, inputs: Sequence[PTensor]) -> float:
    shapes = [t.shape for t in inputs], [value.shape for value in call.node.outputs]
    if known.flops is not None:
        return known.flops * iterations(known.annotation, *shapes, known.sizes_of(call.args))

    def run(args: Mapping[str, Any]) -> Any:
        given = {name: args[name] for name in known.attributes}
        return known.function(*(x for name, x in args.items() if name not in given), **given)

    return max(flops_of_products(call, run), largest(*shapes))
