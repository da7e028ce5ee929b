"""Cells: a model on some GPUs, what planners find for it, and how that is kept."""
