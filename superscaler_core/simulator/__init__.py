"""Simulator: time and memory of a program's step on any topology, without running it."""

from superscaler_core.cost import PROFILES, DeviceProfile
from superscaler_core.simulator.account import PARTS, Breakdown, LevelUse
from superscaler_core.simulator.activities import COLOURS, HIDDEN, KINDS, activity
from superscaler_core.simulator.grid_picture import draw_grids
from superscaler_core.simulator.live import Series
from superscaler_core.simulator.simulated import Simulated
from superscaler_core.simulator.simulation import simulate
from superscaler_core.simulator.stage_run import StageRun
from superscaler_core.simulator.timeline import Ran, StepTimeline

__all__ = [
    "COLOURS",
    "HIDDEN",
    "KINDS",
    "PARTS",
    "PROFILES",
    "Breakdown",
    "DeviceProfile",
    "LevelUse",
    "Ran",
    "Series",
    "Simulated",
    "StageRun",
    "StepTimeline",
    "activity",
    "draw_grids",
    "simulate",
]
