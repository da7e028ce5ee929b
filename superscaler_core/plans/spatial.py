"""Spatial parallel: every device has all weights and a tile of some images."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Axis, Plan
from superscaler_core.plans.pieces.along import shares


def spatial(plan: Plan, *, rows: int = 0, columns: int = 1) -> None:
    """Cut images into a grid of ``rows`` times ``columns`` tiles, and the batch among what is left.

    A microbatch exchanges, for every convolution or pool whose windows overlap, *halos*: the rows
    and columns of neighbouring tiles that windows reach into, and on the way back their gradients.
    Sums of batch norms are all-reduced, and once per step the gradients of weights. An op without
    an image, or whose image has fewer rows than tiles, is cut along the batch, or replicated if the
    batch is too small. Memory per device: all weights, 1/N of the activations, and halos.

    Args:
        plan: to fill.
        rows: tiles along the height, dim 2 of the first input; as many as devices allow if 0.
        columns: tiles along the width, dim 3.

    Raises:
        PlanError: ``rows * columns`` does not divide the devices, the batch is too small for the
            rest of them, or the first input is no image.

    Source: Dryden et al., Improving strong-scaling of CNN training by exploiting finer-grained
    parallelism, 2019.
    """
    num = len(plan.devices)
    rows = rows or num // max(columns, 1)
    pieces = shares(plan, rows=rows, columns=columns)
    grid = {_image_dim(plan, 2 + i): n for i, n in enumerate((rows, columns)) if n > 1}
    batch = plan.graph.inputs[0].shape[0]
    if batch < pieces:
        raise PlanError(
            f"spatial of {rows} rows times {columns} columns on {num} devices: the batch of "
            f"{batch} is cut into {pieces}; take more tiles, or a larger batch."
        )
    outer = Axis(pieces, (plan.dims.batch,))
    spare = (plan.dims.batch,) if batch >= num else ()
    for op in plan.graph.ops:
        tiles = [Axis(n, (d,) if _has_tiles(plan, op, d, n) else spare) for d, n in grid.items()]
        plan.spread(op, plan.devices, [outer, *tiles])


def _image_dim(plan: Plan, dim: int) -> DimClass:
    """The class of a spatial dim of the first input."""
    image = plan.graph.inputs[0]
    if dim < len(image.shape):
        return plan.dims.of(image.name, dim)
    raise PlanError(
        f"{plan.graph.name} has no images to cut along dim {dim}: its first input is {image}, and "
        "should be [batch, channels, height, width]; cut the batch instead (data_parallel)."
    )


def _has_tiles(plan: Plan, op: Op, dim: DimClass, num: int) -> bool:
    """Whether an op can be cut along a dim into ``num`` pieces of at least one row."""
    ids = plan.dims.ids(op, dim)
    return bool(ids) and op.sizes[ids[0]] >= num
