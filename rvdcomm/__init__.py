"""rvdcomm: redistribute a tensor between any two layouts: plan it, prove it, run it.

``import rvdcomm`` does not import torch; the first use of ``redistribute`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rvdcomm.box import Box
from rvdcomm.bundle import Bundle
from rvdcomm.bundle.planning import plan_many
from rvdcomm.cost import Cost
from rvdcomm.errors import (
    CheckpointError,
    CommError,
    LayoutError,
    MemoryLimitError,
    ProgramError,
    ShapeMismatchError,
)
from rvdcomm.executors.simulate import SimulationResult, simulate
from rvdcomm.layout import Cell, Layout
from rvdcomm.link import Link
from rvdcomm.path import Path
from rvdcomm.planner import Plan, plan
from rvdcomm.program import Program
from rvdcomm.relabel import best_ranks
from rvdcomm.rvd import RVD
from rvdcomm.topology import Level, Topology

if TYPE_CHECKING:
    from rvdcomm.api import Redistributor, redistribute, redistribute_many

_NEEDS_TORCH = frozenset({"Redistributor", "redistribute", "redistribute_many"})

__all__ = [
    "RVD",
    "Box",
    "Bundle",
    "Cell",
    "CheckpointError",
    "CommError",
    "Cost",
    "Layout",
    "LayoutError",
    "Level",
    "Link",
    "MemoryLimitError",
    "Path",
    "Plan",
    "Program",
    "ProgramError",
    "Redistributor",
    "ShapeMismatchError",
    "SimulationResult",
    "Topology",
    "best_ranks",
    "plan",
    "plan_many",
    "redistribute",
    "redistribute_many",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'rvdcomm' has no attribute {name!r}")
    from rvdcomm import api

    return getattr(api, name)
