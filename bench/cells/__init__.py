"""Cells: a model on a number of GPUs, the plans that planners find for it, and a store of them."""
