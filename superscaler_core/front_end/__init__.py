"""Front end: from a PyTorch model to a ``Graph`` of annotated ops."""

from superscaler_core.front_end.capture import capture

__all__ = ["capture"]
