"""ModelCall: the arguments with which a model is captured, and what of its output is the loss.

Models return their loss in several forms: alone, first in a tuple, or by the name ``loss`` in a
mapping or an object with fields. What else they return stays in the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler_core.errors import CaptureError

_OFF = {"use_cache": False}
"""Arguments of a forward that ask for values which only generation uses, and how to decline."""


@dataclass(frozen=True)
class ModelCall:
    """One call of a model.

    Attributes:
        args, kwargs: arguments of its forward, by position and by name.
        num_results: how many more values are kept beside the loss; a model with such results
            returns a tuple, first the loss.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_results: int = 0

    @classmethod
    def of(
        cls, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_results: int = 0
    ) -> ModelCall:
        """The call with copies of these arguments, those by name in the order of the forward.

        Raises:
            CaptureError: the forward does not take them.
        """
        signature = inspect.signature(model.forward)
        order = list(signature.parameters)
        off = {name: value for name, value in _OFF.items() if name in order}
        if _takes_any(signature) and hasattr(getattr(model, "config", None), "use_cache"):
            off = _OFF
        given = {**off, **kwargs}
        try:
            signature.bind(*args, **given)
        except TypeError as error:
            names = ", ".join([*(f"argument {i}" for i in range(len(args))), *kwargs])
            raise CaptureError(
                f"{type(model).__name__}.forward does not take {names}: {error}."
            ) from None
        given = dict(sorted(given.items(), key=lambda item: _place(order, item[0])))
        device = next((p.device for p in model.parameters()), None)

        def copy(leaf: Any) -> Any:
            # Tracing takes one tensor given twice for one input.
            return leaf.detach().to(device, copy=True) if isinstance(leaf, Tensor) else leaf

        copies: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(copy, (tuple(args), given))
        return cls(*copies, num_results)

    @contextmanager
    def returning_loss(self, model: nn.Module) -> Iterator[None]:
        """Inside this context, the model returns the tuple of its loss and the results kept."""

        def only(module: nn.Module, args: Any, output: Any) -> tuple[Any, ...]:
            return self._kept(model, output)

        handle = model.register_forward_hook(only)
        try:
            yield
        finally:
            handle.remove()

    def _kept(self, model: nn.Module, output: Any) -> tuple[Any, ...]:
        if self.num_results:
            return tuple(output) if isinstance(output, tuple | list) else (output,)
        return (loss_of(model, output),)


def loss_of(model: nn.Module, output: Any) -> Tensor:
    """The loss in what a model returned.

    Raises:
        CaptureError: there is none.
    """
    for form, found in _FORMS.items():
        if isinstance(output, form):
            loss = found(output)
            break
    else:
        loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    raise CaptureError(
        f"{type(model).__name__} returns {type(output).__name__} without a loss; it has to return "
        "a scalar loss, alone, first in a tuple, or by the name 'loss'. Many models compute it "
        "only if they are given labels."
    )


_FORMS: Mapping[type[Any], Callable[[Any], Any]] = {
    Tensor: lambda output: output,
    Mapping: lambda output: output.get("loss"),
    tuple: lambda output: getattr(output, "loss", output[0] if output else None),
    list: lambda output: output[0] if output else None,
}
"""The loss in each form of output."""


def _takes_any(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)
