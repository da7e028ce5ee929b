"""Models: small code of real structure, to capture, plan and test with."""

from superscaler_core.models.table import MODELS, Model, build, config_of, example_inputs

__all__ = ["MODELS", "Model", "build", "config_of", "example_inputs"]
