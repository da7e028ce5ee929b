"""Running a program on this rank of a process group (docs/executors.md)."""
