"""Search: candidates of a planner, compiled, read for memory, simulated and compared."""
