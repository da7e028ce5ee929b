"""Returned: what a model returns for a call, and models that return something else of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from superscaler_core.front_end.model_call import ModelCall

Forward = Callable[..., dict[str, Tensor]]
"""From the forward of a model's class, the model and its arguments to the loss and results."""


def returned_by(model: nn.Module, call: ModelCall) -> Any:
    """What a model returns, as tensors without values; nothing is computed."""
    state = dict([*model.named_parameters(), *model.named_buffers()])
    args, kwargs = call.arguments
    real = pytree.tree_map_only(Tensor, Tensor.detach, (state, tuple(args), dict(kwargs)))
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        held, given, named = pytree.tree_map_only(Tensor, fake.from_tensor, real)
        return torch.func.functional_call(model, held, given, named)


def class_of(model: nn.Module) -> type[nn.Module]:
    """The class of the model from which ``with_forward`` made this one; else its own class."""
    found: type[nn.Module] = getattr(type(model), "_class_of_model", type(model))
    return found


def with_forward(model: nn.Module, forward: Forward, *more: inspect.Parameter) -> nn.Module:
    """A model with the same parameters and buffers, and another forward.

    Attributes that a caller changes later, as by ``model.eval()``, are those of both.

    Args:
        model: a model, maybe one that this function made.
        forward: called with the forward of the model's class, the model, and its arguments.
        more: keyword arguments that it takes besides those of the model.
    """
    kind = class_of(model)

    def new(self: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return forward(kind.forward, self, *args, **kwargs)

    said = inspect.signature(kind.forward)
    # Behind the model's own arguments, and before a catch-all of keywords.
    own = [p for p in said.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in said.parameters.values() if p.kind is p.VAR_KEYWORD]
    new.__signature__ = said.replace(  # type: ignore[attr-defined]
        parameters=[*own, *more, *rest], return_annotation=dict
    )
    made = copy.copy(model)
    made.__class__ = type(kind.__name__, (kind,), {"forward": new, "_class_of_model": kind})
    made.__dict__ = model.__dict__
    return made
