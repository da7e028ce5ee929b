"""This machine, measured: its links, ops and overheads, and a race of programs on it."""
