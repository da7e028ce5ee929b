"""Planners: search for the decisions of a plan."""
