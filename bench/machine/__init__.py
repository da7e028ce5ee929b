"""Measurements of this machine: its links, ops and overheads, and a race of programs on it."""
