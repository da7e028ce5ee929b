"""Mesh-TensorFlow: a layout of named dims on a mesh of devices is a whole plan."""

from __future__ import annotations

from superscaler_core.plan import Axis, Plan
from superscaler_core.plan.mesh import Mesh
from superscaler_core.plans import plan_row
from superscaler_core.plans.option_texts import MESH_TEXT
from superscaler_core.plans.pieces.along import spread
from superscaler_core.plans.row import OptionReader
from superscaler_core.published.mesh_tf.mesh_layout import (
    MeshLayout,
    check_layout,
    named_dims,
)

DATA_PARALLEL = MeshLayout((("batch", "all"),))


@plan_row(
    readers={
        "layout": OptionReader(
            MeshLayout.parse, "DIM:SIDE with semicolons between, such as batch:rows;hidden:cols"
        ),
        "mesh": MESH_TEXT,
    }
)
def mesh_tf(plan: Plan, *, layout: MeshLayout = DATA_PARALLEL, mesh: Mesh | None = None) -> None:
    """Cut every op along the sides of a mesh, where the layout says so for a dim that it has.

    An op without such a dim is replicated along a side, and weights are stored as they are read.
    Of two dims of one name in an op, such as queries and keys along the sequence, the first is cut.
    Memory per device: each tensor divided by the sides along which its dims are cut. Communication:
    all-reduces where an op sums over a cut dim, and moves where the next op lacks the dim.

    Args:
        plan: to fill.
        layout: names of dims (``pieces.mesh_layout.NAMES``), each with a side of the mesh.
        mesh: its sides; all devices are one side ``all`` if None.

    Raises:
        PlanError: a rule of ``check_layout`` is broken.

    Source: Shazeer et al., Mesh-TensorFlow, NeurIPS 2018.
    """
    mesh = mesh or Mesh((("all", len(plan.devices)),))
    check_layout(plan, layout, mesh)
    dims = named_dims(plan.blocks)
    axes = [
        Axis(num, tuple(dim for name in layout.along(side) for dim in dims[name]))
        for side, num in mesh.axes
    ]
    spread(plan, plan.graph.ops, plan.devices, *axes)
