"""Running a program on this rank of a process group (docs/executors.md)."""

from rvdcomm.run.local import add_into

__all__ = ["add_into"]
