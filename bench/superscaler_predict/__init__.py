"""Predicted against measured steps: ``python -m bench.superscaler_predict``."""
