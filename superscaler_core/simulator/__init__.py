"""Simulator: what a program takes in time and memory on any topology, without its devices."""

from superscaler_core.simulator.account import Level
from superscaler_core.simulator.presets import PROFILES
from superscaler_core.simulator.profile import DeviceProfile
from superscaler_core.simulator.simulated import Simulated
from superscaler_core.simulator.simulation import simulate

__all__ = ["PROFILES", "DeviceProfile", "Level", "Simulated", "simulate"]
