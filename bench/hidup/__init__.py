"""HiDup's evaluation: its models on its clusters, against the systems of its day."""
