"""Cost: time and memory of single choices of a plan, computed without a plan."""

from superscaler_core.cost.collective import Collective
from superscaler_core.cost.comm_cost import (
    METHODS,
    TICKS_PER_SEC,
    CommCost,
    CommCosts,
    comm_costs_on,
    topology_for,
)
from superscaler_core.cost.cost_model import CostModel
from superscaler_core.cost.issued import Issued
from superscaler_core.cost.launches import Launches, launches_of
from superscaler_core.cost.memory_cost import MemoryCost, peak_bytes, recomputed
from superscaler_core.cost.neighbours import product_of
from superscaler_core.cost.op_memory import Kept
from superscaler_core.cost.op_time import (
    OpTimes,
    backward_products,
    forward_bytes,
    forward_flops,
    halves,
    signature,
)
from superscaler_core.cost.presets import PROFILES, profile_of
from superscaler_core.cost.prices import EdgeCost, OpCost, StageCost, SyncCost, together
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.reach import Reach

__all__ = [
    "METHODS",
    "PROFILES",
    "TICKS_PER_SEC",
    "Collective",
    "CommCost",
    "CommCosts",
    "CostModel",
    "DeviceProfile",
    "EdgeCost",
    "Issued",
    "Kept",
    "Launches",
    "MemoryCost",
    "OpCost",
    "OpTimes",
    "Reach",
    "StageCost",
    "SyncCost",
    "backward_products",
    "comm_costs_on",
    "forward_bytes",
    "forward_flops",
    "halves",
    "launches_of",
    "peak_bytes",
    "product_of",
    "profile_of",
    "recomputed",
    "signature",
    "together",
    "topology_for",
]
