"""Run: executes a generated program on real ranks, or on threads of one process."""
