"""The four studies of the SuperScaler paper, on simulated V100s: ``python -m bench.studies``."""
