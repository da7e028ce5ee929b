"""The port model: the seconds and bytes of traffic, and the lower bound of any plan."""

from rvdcomm.cost.bound import LevelBound, cost_of_levels, lower_bound
from rvdcomm.cost.ports import Cost, StepCost, port_secs, step_cost, total_cost

__all__ = [
    "Cost",
    "LevelBound",
    "StepCost",
    "cost_of_levels",
    "lower_bound",
    "port_secs",
    "step_cost",
    "total_cost",
]
