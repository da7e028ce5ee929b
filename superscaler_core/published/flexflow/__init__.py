"""FlexFlow: random walks over the ways to cut every op (Jia et al., 2019)."""

from superscaler_core.published.flexflow.flexflow import flexflow
from superscaler_core.published.flexflow.walk import Walk

__all__ = ["Walk", "flexflow"]
