"""Models of published studies of planners."""
