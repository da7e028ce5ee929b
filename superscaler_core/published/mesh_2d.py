"""2-D tensor parallel: every weight matrix is cut along both of its dims, on a mesh of devices."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.plan import Axis, Plan
from superscaler_core.plans.pieces.along import spread


def mesh_2d(plan: Plan, *, x: int = 0, y: int = 0, sequence: bool = False) -> None:
    """Cut inner features along ``x`` and the width of the hidden state along ``y``.

    Words of an embedding and a head count as inner features. An op without such a dim is cut along
    the batch on that side of the mesh: a norm, which needs the whole width, along ``y``; ops
    between the maps along ``x``. So a linear map gathers its input along one side and reduces and
    scatters its output along the other. Memory per device: 1/(x * y) of the matrices of blocks, of
    embedding and head, and of the activations.

    Args:
        plan: to fill.
        x, y: sides of the mesh, ``y`` innermost; the rest is data parallel. If both are 0, all
            devices are one mesh, as square as can be; if one is 0, it follows from the other.
        sequence: cut the sequence instead of the batch, on the mesh.

    Raises:
        PlanError: ``x * y`` does not divide the devices.

    Source: Xu et al., GSPMD, 2021 (its 2-D layouts); Xu et al., Optimus, 2021.
    """
    num = len(plan.devices)
    rows, columns = _sides(num, x, y)
    blocks, batch = plan.blocks, plan.dims.batch
    rest = (*(blocks.tokens if sequence else ()), batch)
    spread(
        plan,
        plan.graph.ops,
        plan.devices,
        Axis(num // (rows * columns), (batch,)),
        Axis(rows, (*blocks.vocabulary, *blocks.inner, *rest)),
        Axis(columns, (*blocks.width, *rest)),
    )


def _sides(num: int, x: int, y: int) -> tuple[int, int]:
    """The sides of the mesh, given those that are not 0."""
    if min(x, y) < 0 or num % ((x or 1) * (y or 1)):
        raise PlanError(
            f"a mesh of x={x} times y={y} on {num} devices: their product has to divide {num}; the "
            "rest is data parallel."
        )
    if x and y:
        return x, y
    if x or y:
        return (x, num // x) if x else (num // y, y)
    side = next(side for side in range(int(num**0.5), 0, -1) if num % side == 0)
    return num // side, side
