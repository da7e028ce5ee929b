"""Plans for one tensor, for many tensors and for gradients; each plan owns its program."""

from rvdcomm.plans.bundle import bundle_over
from rvdcomm.plans.modelled import modelled_cost
from rvdcomm.plans.plan import EXECUTORS, Plan
from rvdcomm.plans.planner import clear_cache, plan, plan_over, plan_with, with_trees
from rvdcomm.plans.simulate import Simulation, simulate_program

__all__ = [
    "EXECUTORS",
    "Plan",
    "Simulation",
    "bundle_over",
    "clear_cache",
    "modelled_cost",
    "plan",
    "plan_over",
    "plan_with",
    "simulate_program",
    "with_trees",
]
