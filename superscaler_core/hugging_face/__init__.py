"""Hugging Face: models of the library transformers, from their folders and back."""

from superscaler_core.hugging_face.buffers import give_buffers
from superscaler_core.hugging_face.read import read_weights
from superscaler_core.hugging_face.write import write_folder

__all__ = ["give_buffers", "read_weights", "write_folder"]
