"""Cost: time and memory of single choices of a plan, computed without a plan."""

from superscaler_core.cost.cost_model import CostModel
from superscaler_core.cost.memory_cost import MemoryCost, peak_bytes, recomputed
from superscaler_core.cost.neighbours import product_of
from superscaler_core.cost.op_memory import Kept
from superscaler_core.cost.presets import PROFILES
from superscaler_core.cost.prices import EdgeCost, OpCost, StageCost, SyncCost, together
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.cost.reach import Reach

__all__ = [
    "PROFILES",
    "CostModel",
    "DeviceProfile",
    "EdgeCost",
    "Kept",
    "MemoryCost",
    "OpCost",
    "Reach",
    "StageCost",
    "SyncCost",
    "peak_bytes",
    "product_of",
    "recomputed",
    "together",
]
