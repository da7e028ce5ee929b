"""Models: small code of real structure, to capture, plan and test with."""

from superscaler_core.models.gpt import GPT, Block, GPTConfig
from superscaler_core.models.mlp import MLPConfig, MLPModel
from superscaler_core.models.moe import MoEConfig, MoETransformer, top_gating
from superscaler_core.models.recycling import last_pass
from superscaler_core.models.swin import Swin, SwinConfig
from superscaler_core.models.table import MODELS, Model, build, config_of, example_inputs

__all__ = [
    "GPT",
    "MODELS",
    "Block",
    "GPTConfig",
    "MLPConfig",
    "MLPModel",
    "MoEConfig",
    "MoETransformer",
    "Model",
    "Swin",
    "SwinConfig",
    "build",
    "config_of",
    "example_inputs",
    "last_pass",
    "top_gating",
]
