"""A whole model from trainer ranks to inference ranks: ``python -m bench.weights``."""
