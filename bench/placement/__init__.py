"""Placement of whole ops by planners and by a learned policy: ``python -m bench.placement``."""
