"""Search: compile a planner's candidates, read their memory, simulate and compare them."""
