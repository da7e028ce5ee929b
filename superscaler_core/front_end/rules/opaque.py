"""Opaque ops: calls that no rule covers. They are never cut, so they are correct in every plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from torch._library.custom_ops import OPDEFS

from superscaler_core.front_end.call import Call
from superscaler_core.front_end.calls import hint_of_function
from superscaler_core.graph.annotation import Annotation
from superscaler_core.graph.opaque import rows_annotation, whole_annotation
from superscaler_core.graph.tensor import PTensor


def opaque(call: Call) -> tuple[PTensor, ...]:
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
    return opaque_op(call, call.kind, inputs, code, imports=_imports(call))


def opaque_op(
    call: Call,
    kind: str,
    inputs: Sequence[PTensor],
    code: str,
    *,
    imports: Sequence[str] = (),
    annotation: str = "",
    flops: float | None = None,
    hint: Callable[[str], str] = hint_of_function,
    modules: Sequence[str] = (),
) -> tuple[PTensor, ...]:
    """An op whose gradient autograd computes, from all tensors that the op reads and writes.

    Args:
        call: the call.
        kind, inputs, code, imports, modules: as in ``Call.op_of_many``.
        annotation: how its dims relate; if empty, every dim is fixed and the op is opaque.
        flops: operations of the forward; one for each element of its largest tensor if None.
        hint: how to make the op splittable, given its annotation if its rows are independent.
    """
    outputs = [(value.shape, value.dtype) for value in call.node.outputs]
    shapes = [t.shape for t in inputs], [shape for shape, _ in outputs]
    marked = Annotation.parse(annotation or whole_annotation(*shapes))
    volume = prod(marked.sizes(*shapes).values())
    if flops is None:
        flops = max(prod(shape) for side in shapes for shape in side)
    return call.op_of_many(
        kind, str(marked), inputs, code, outputs, saves=range(len(inputs) + len(outputs)),
        flops=max(flops, 1) / max(volume, 1), imports=imports,
        modules=modules, hint="" if annotation else hint(rows_annotation(inputs, shapes[1])),
    )  # fmt: skip


def _imports(call: Call) -> list[str]:
    """The module that defines the op, if that is not torch."""
    found = OPDEFS.get(call.node.base.replace(".", "::"))
    return [found._init_fn.__module__] if found is not None else []
