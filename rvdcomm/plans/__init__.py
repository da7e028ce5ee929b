"""Plans: of one tensor, of many tensors, of a gradient; each owns its program."""

from rvdcomm.plans.planner import EXECUTORS, Plan, plan

__all__ = ["EXECUTORS", "Plan", "plan"]
