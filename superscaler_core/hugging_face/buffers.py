"""Buffers: those of a model of transformers that is on the meta device get their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def give_buffers(model: nn.Module) -> None:
    """Give buffers on the meta device the values that the model initializes them with, on the CPU.

    As ``from_pretrained`` does for buffers that no folder has, such as rotary frequencies. Those
    that the model does not initialize stay on the meta device. Parameters stay as they are.

    Args:
        model: changed in place; models that are not of transformers are left alone.
    """
    init: Any = getattr(model, "_init_weights", None)
    if init is None or not hasattr(model, "save_pretrained"):
        return
    for module in model.modules():
        own = module._buffers
        empty = {name: value for name, value in own.items() if value is not None and value.is_meta}
        if not empty:
            continue
        for name, value in empty.items():
            own[name] = _unset(value)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            init(module)
        for name, value in empty.items():
            if _is_unset(own[name]):
                own[name] = value


def saved_on_meta(model: nn.Module) -> list[str]:
    """The names of buffers on the meta device that the state dict has, such as running means."""
    saved = model.state_dict()
    return [name for name, value in model.named_buffers() if value.is_meta and name in saved]


def _unset(like: Tensor) -> Tensor:
    """A tensor on the CPU of a value that no initialization gives."""
    made = torch.empty_like(like, device="cpu")
    if made.is_floating_point() or made.is_complex():
        return made.fill_(float("nan"))
    return made.zero_() if made.dtype == torch.bool else made.fill_(torch.iinfo(made.dtype).min)


def _is_unset(tensor: Tensor | None) -> bool:
    if tensor is None or tensor.dtype == torch.bool or not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return bool((tensor == torch.iinfo(tensor.dtype).min).any())
