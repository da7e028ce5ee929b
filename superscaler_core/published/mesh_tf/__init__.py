"""Mesh-TensorFlow's layout optimizer: the layout of a model that takes the least memory."""

from superscaler_core.published.mesh_tf.models import layout_problem, propose_mesh_tf
from superscaler_core.published.mesh_tf.optimizer import assignments, auto_mtf
from superscaler_core.published.mesh_tf.problem import (
    LayoutProblem,
    MeshOp,
    MeshTensor,
    list_schedule,
)

__all__ = [
    "LayoutProblem",
    "MeshOp",
    "MeshTensor",
    "assignments",
    "auto_mtf",
    "layout_problem",
    "list_schedule",
    "propose_mesh_tf",
]
