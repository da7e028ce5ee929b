"""Whole ops on devices, by planners and by a policy that learns: ``python -m bench.placement``."""
