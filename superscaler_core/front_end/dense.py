"""Dense: plans cut and move boxes of dense tensors, so tensors of other layouts are refused."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from superscaler_core.errors import CaptureError


def is_dense(tensor: Tensor) -> bool:
    """Whether every element of a tensor has a place in memory."""
    return tensor.layout is torch.strided and not tensor.is_nested


def check_dense(what: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors, given by name, that are not dense; ``what`` they are is for the message.

    Raises:
        CaptureError: a tensor is sparse or nested; the message names it.
    """
    for name, tensor in tensors.items():
        if not is_dense(tensor):
            layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise CaptureError(
                f"{what} {name!r} is {layout}, and plans cut dense tensors; pass what is dense "
                "(to_dense()), or build what is sparse in a function under @register_op."
            )
