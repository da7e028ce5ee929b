"""The 18 + 6 cases of the RVD benchmark: what they are, how they are timed, and their tables."""
