"""Optim: optimizers and averages over a model whose parameters are stored on several ranks."""

from superscaler_core.optim.averaged import Averaged
from superscaler_core.optim.whole import Whole, whole

__all__ = ["Averaged", "Whole", "whole"]
