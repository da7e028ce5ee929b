"""HiDup's evaluation: its models on its clusters, compared with the systems of its time."""
