"""The 18 + 6 cases of the RVD benchmark: their definition, their timing, and their tables."""
