"""Alpa's two levels: stages on submeshes, and how the ops of every stage are cut on its mesh."""

from superscaler_core.published.alpa.alpa_hierarchical import (
    alpa_hierarchical,
    meshes_of,
    placed,
)
from superscaler_core.published.alpa.mesh_cut import MeshCut, MeshStage
from superscaler_core.published.alpa.proposals import propose_alpa
from superscaler_core.published.alpa.runs import Runs
from superscaler_core.published.alpa.ways import MeshWay, StagePrices, price_ways

__all__ = [
    "MeshCut",
    "MeshStage",
    "MeshWay",
    "Runs",
    "StagePrices",
    "alpa_hierarchical",
    "meshes_of",
    "placed",
    "price_ways",
    "propose_alpa",
]
