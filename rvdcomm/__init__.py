"""rvdcomm: redistribute a tensor between any two layouts: plan it, prove it, run it.

``import rvdcomm`` does not import torch; the first use of ``redistribute`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rvdcomm.cost import Cost
from rvdcomm.errors import (
    CheckpointError,
    CommError,
    LayoutError,
    MemoryLimitError,
    ProgramError,
    ShapeMismatchError,
)
from rvdcomm.layout import RVD, Box, Cell, Layout
from rvdcomm.network import Level, Link, Network, Switch, Topology, Wire
from rvdcomm.planning.path import Path
from rvdcomm.planning.relabel import best_ranks
from rvdcomm.plans.bundle import Bundle
from rvdcomm.plans.many import plan_many
from rvdcomm.plans.plan import Plan
from rvdcomm.plans.planner import plan
from rvdcomm.plans.saved import load_plan
from rvdcomm.plans.simulate import SimulationResult, simulate
from rvdcomm.program import Program

if TYPE_CHECKING:
    from rvdcomm.api import (
        Arrival,
        CallOptions,
        Difference,
        Pending,
        Redistributor,
        abort,
        digest,
        empty,
        empty_cache,
        known_groups,
        prove,
        redistribute,
        redistribute_many,
        restart,
        tell,
        timeout,
        told,
    )

__version__ = "0.1.0"

_NEEDS_TORCH = frozenset(
    {
        *("CallOptions", "Pending", "Redistributor", "empty", "empty_cache"),
        *("abort", "redistribute", "redistribute_many", "restart", "tell"),
        *("known_groups", "timeout", "told"),
        *("Arrival", "Difference", "digest", "prove"),
    }
)

__all__ = [
    "RVD",
    "Arrival",
    "Box",
    "Bundle",
    "CallOptions",
    "Cell",
    "CheckpointError",
    "CommError",
    "Cost",
    "Difference",
    "Layout",
    "LayoutError",
    "Level",
    "Link",
    "MemoryLimitError",
    "Network",
    "Path",
    "Pending",
    "Plan",
    "Program",
    "ProgramError",
    "Redistributor",
    "ShapeMismatchError",
    "SimulationResult",
    "Switch",
    "Topology",
    "Wire",
    "abort",
    "best_ranks",
    "digest",
    "empty",
    "empty_cache",
    "known_groups",
    "load_plan",
    "plan",
    "plan_many",
    "prove",
    "redistribute",
    "redistribute_many",
    "restart",
    "simulate",
    "tell",
    "timeout",
    "told",
]


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module 'rvdcomm' has no attribute {name!r}")
    from rvdcomm import api

    # The next look-up finds it in the module itself.
    found = globals()[name] = getattr(api, name)
    return found
