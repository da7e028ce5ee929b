"""Predicted and measured step times of plans: ``python -m bench.superscaler_predict``."""
