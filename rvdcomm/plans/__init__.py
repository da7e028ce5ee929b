"""Plans for one tensor, for many tensors and for gradients; each plan owns its program."""

from rvdcomm.plans.planner import EXECUTORS, Plan, plan

__all__ = ["EXECUTORS", "Plan", "plan"]
