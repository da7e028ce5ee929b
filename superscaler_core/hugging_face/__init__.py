"""Hugging Face: models of the library transformers, from their folders and back."""

from superscaler_core.hugging_face.buffers import give_buffers, saved_on_meta
from superscaler_core.hugging_face.distributed_config import (
    config_of_plan,
    is_config,
    plan_of_config,
)
from superscaler_core.hugging_face.read import read_weights
from superscaler_core.hugging_face.write import write_folder

__all__ = [
    "config_of_plan",
    "give_buffers",
    "is_config",
    "plan_of_config",
    "read_weights",
    "saved_on_meta",
    "write_folder",
]
