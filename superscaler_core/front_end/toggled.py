"""Toggled: parameters that a forward freezes for a part of it, as reference models do.

A call that is traced in that part gets the parameter's value, without gradient (``detach``).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from superscaler_core.errors import CaptureError

# At run time this is a descriptor, which its declared type does not say.
_REQUIRES_GRAD: Any = Tensor.requires_grad

SETTERS = (Tensor.requires_grad_, _REQUIRES_GRAD.__set__)
"""The functions by which a forward freezes a parameter."""


class Toggled:
    """The parameters that the forward of a model has frozen or unfrozen so far."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._were: dict[int, tuple[nn.Parameter, bool]] = {}
        self._names: dict[int, str] = {}

    def set(self, setter: Any, parameter: nn.Parameter, args: Any, kwargs: Any) -> Any:
        """Let a forward set whether a parameter needs a gradient."""
        if id(parameter) not in self._were:
            self._were[id(parameter)] = parameter, parameter.requires_grad
            named = self._model.named_parameters(remove_duplicate=False)
            self._names |= {id(p): name for name, p in named if p is parameter}
        return setter(parameter, *args, **kwargs)

    def read(self, given: Any) -> Any:
        """The arguments of a call, with the values of the parameters that are frozen now.

        Raises:
            CaptureError: a parameter is trained here only.
        """
        return pytree.tree_map_only(nn.Parameter, self._read, given) if self._were else given

    def _read(self, parameter: nn.Parameter) -> Tensor:
        _, was_trained = self._were.get(id(parameter), (None, parameter.requires_grad))
        if parameter.requires_grad == was_trained:
            return parameter
        if not was_trained:
            raise CaptureError(
                f"it trains parameter {self._name(parameter)!r}, which is frozen outside of the "
                "forward; call requires_grad_() on it before the capture"
            )
        return parameter.detach()

    def check(self) -> None:
        """Refuse a forward that does not undo what it set.

        Raises:
            CaptureError: the next forward would begin with other parameters frozen.
        """
        for parameter, was_trained in self._were.values():
            if parameter.requires_grad != was_trained:
                now = "frozen" if was_trained else "trained"
                raise CaptureError(
                    f"it leaves parameter {self._name(parameter)!r} {now}, so that its next call "
                    "does something else; undo that before it returns"
                )

    def _name(self, parameter: nn.Parameter) -> str:
        return self._names.get(id(parameter), f"of shape {list(parameter.shape)}")
