"""Along: how an op is cut along a dim of the model, the same in all ops that have it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from superscaler_core.checks import at_least
from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Axis, Device, Plan
from superscaler_core.plan.op_trans import Split, Transformation, pieces


def along(plan: Plan, op: Op, num: int, *dims: DimClass) -> Transformation:
    """Cut an op along the first of ``dims`` that it has, or replicate it if it has none.

    If an op that is no product has fewer iterations than there are devices, neighbouring devices
    share one. So keys that several query heads read are cut among more devices than key heads.

    Raises:
        PlanError: other ops cannot be cut at the same places; the message says into how many
            pieces they can.
    """
    return _along(plan, op, Axis(num, dims))


def spread(plan: Plan, ops: Iterable[Op], devices: Sequence[Device], *axes: Axis) -> None:
    """Cut or replicate ops along every axis of a grid of devices, the last axis innermost.

    Raises:
        PlanError: as in ``along``.
    """
    for op in ops:
        for axis in axes:
            plan.op_trans(op, _along(plan, op, axis))
        plan.op_assign(op, devices)


def _along(plan: Plan, op: Op, axis: Axis) -> Transformation:
    """As ``along``, for an axis that many ops share."""
    how, num = plan.along(op, axis), axis.num
    if not isinstance(how, Split):
        return how
    loop = how.identifier
    dim = plan.dims.of_loop(op, loop)
    ranges = {part.range(loop) for part in plan.parts(op)}
    _check(plan, dim, num * len(ranges))
    size = op.sizes[loop]
    if size < num and len(ranges) == 1:
        return pieces(*({loop: (i * size // num, i * size // num + 1)} for i in range(num)))
    return how


def shares(plan: Plan, **sides: int) -> int:
    """The number of devices per cell of a grid, such as ``tp=2`` times ``pp=4``.

    Raises:
        PlanError: a side is no number of at least 1, or the sides do not divide the devices.
    """
    at_least(1, **sides)
    num, product = len(plan.devices), 1
    for side in sides.values():
        product *= side
    if num % product:
        text = " times ".join(f"{name}={side}" for name, side in sides.items())
        raise PlanError(f"{text} on {num} devices: their product {product} has to divide {num}.")
    return num // product


def _check(plan: Plan, dim: DimClass, num: int) -> None:
    if plan.dims.can_cut(dim, num):
        return
    sizes = plan.dims.sizes(dim)
    counts = " and ".join(f"{size} in {op.name}" for size, op in sorted(sizes.items()))
    degrees = [n for n in range(1, max(sizes) + 1) if plan.dims.can_cut(dim, n)]
    right = f"at most {min(sizes)}" if len(sizes) == 1 else ", ".join(map(str, degrees))
    raise PlanError(
        f"{plan.graph.name}: {_heads(plan, dim, num)}dim {dim.dim} of {dim.tensor} cannot be cut "
        f"into {num} parts: its size is {counts}, so it can be cut into {right}."
    )


def _heads(plan: Plan, dim: DimClass, num: int) -> str:
    """What a reader knows of a dim that has the heads of an attention; else empty."""
    for op in plan.graph.ops:
        if op.kind == "attention" and "h" in plan.dims.ids(op, dim):
            return f"{op.sizes['h']} heads of {op.name} do not divide among {num}: "
    return ""
