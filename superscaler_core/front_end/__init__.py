"""Front end: from a PyTorch model to a ``Graph`` of annotated ops."""

from superscaler_core.front_end.capture import capture
from superscaler_core.front_end.model_call import ModelCall

__all__ = [
    "ModelCall",
    "capture",
]
