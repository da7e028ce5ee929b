"""Opaque ops: calls that no rule covers. They are never cut, so they are correct in every plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils.flop_counter import FlopCounterMode

from superscaler_core.graph.opaque import rows_annotation, whole_annotation
from superscaler_core.graph.tensor import PTensor
from superscaler_core.rules.call import RuleCall, largest
from superscaler_core.rules.calls import hint_of_function
from superscaler_core.rules.records import mapped


def opaque(call: RuleCall) -> tuple[PTensor, ...]:
    """The call as it was traced, as one op.

    Raises:
        CaptureError: the call draws random numbers, which devices would draw differently.
    """
    if call.node.is_random:
        raise call.refusal(
            "it draws random numbers, and no rule says how devices draw the same; pass them to the "
            "model as an input, or use dropout."
        )
    inputs = list(dict.fromkeys(call.tensors))
    code = call.fallback(inputs)
    if call.node.returns_list:
        one = len(call.node.outputs) == 1
        code = f"{'next' if one else 'tuple'}(x for x in {code} if torch.is_tensor(x))"
    return opaque_op(
        call, call.kind, inputs, code, imports=_imports(call), flops=flops_of_products(call)
    )


def opaque_op(
    call: RuleCall,
    kind: str,
    inputs: Sequence[PTensor],
    code: str,
    *,
    imports: Sequence[str] = (),
    annotation: str = "",
    flops: float = 0,
    hint: Callable[[str], str] = hint_of_function,
    modules: Sequence[str] = (),
) -> tuple[PTensor, ...]:
    """An op whose gradient autograd computes, from all tensors that the op reads and writes.

    Args:
        call, kind, inputs, code, imports, modules: as in ``RuleCall.op_of_many``.
        annotation: how its dims relate; if empty, every dim is fixed and the op is opaque.
        flops: operations of its products; at least one for each element of its largest tensor.
        hint: how to make the op splittable, given its annotation if its rows are independent.
    """
    shapes = [t.shape for t in inputs], [shape for shape, _ in call.outputs]
    return call.op_of_many(
        kind, annotation or whole_annotation(*shapes), inputs, code, call.outputs,
        saves=range(len(inputs) + len(shapes[1])), flops=max(flops, largest(*shapes)),
        imports=imports, modules=modules,
        hint="" if annotation else hint(rows_annotation(inputs, shapes[1])),
    )  # fmt: skip


def flops_of_products(call: RuleCall, run: Callable[[Mapping[str, Any]], Any] | None = None) -> int:
    """Operations of the products and convolutions that torch computes inside a call.

    Torch counts them while the call runs without values; 0 if it cannot run so. ``run`` computes
    the call from its arguments by name, if torch's op cannot be looked into.
    """
    with FlopCounterMode(display=False) as counter:
        try:
            (run or call.node.run)(mapped(call.args, _without_values))
        except Exception:  # the call looks at values, or torch cannot run it without values
            return 0
    return int(counter.get_total_flops())


def _without_values(value: Any) -> Any:
    if isinstance(value, PTensor):
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
    return value


def _imports(call: RuleCall) -> list[str]:
    """The module that defines the op, if that is not torch."""
    found = OPDEFS.get(call.node.base.replace(".", "::"))
    return [found._init_fn.__module__] if found is not None else []
