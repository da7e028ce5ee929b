"""Simulator: time and memory of a program's step on any topology, without running it."""

from superscaler_core.cost import PROFILES, DeviceProfile
from superscaler_core.simulator.account import PARTS, Breakdown, LevelUse
from superscaler_core.simulator.grid_picture import draw_grids
from superscaler_core.simulator.simulated import Simulated
from superscaler_core.simulator.simulation import simulate

__all__ = [
    "PARTS",
    "PROFILES",
    "Breakdown",
    "DeviceProfile",
    "LevelUse",
    "Simulated",
    "draw_grids",
    "simulate",
]
