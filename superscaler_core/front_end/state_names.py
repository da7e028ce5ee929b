"""State names: parameters and buffers by the names that ``model.state_dict()`` has for them.

They differ from the paths of modules if a hook renames them, as that of ``checkpoint_wrapper``.
A module that ``torch.compile`` wraps has the names that it has without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from superscaler_core.grouped import grouped

_EXTRA = "_extra_state"


@dataclass(frozen=True)
class StateNames:
    """The tensors of a model by the names of its state dict.

    Attributes:
        of_path: the name of every parameter and buffer by its path; the path itself for a tensor
            that the state dict lacks.
        extra: what modules add by ``get_extra_state``, by name.
        parameters: every parameter under each of its names.
        buffers: every buffer under each of its names.
        saved: the names of buffers that the state dict has.
    """

    of_path: Mapping[str, str]
    extra: Mapping[str, Any]
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    saved: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> StateNames:
        """The names of a model."""
        state = model.state_dict(keep_vars=True)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        found = _paired({**parameters, **buffers}, state)
        names = {path: _plain(name) for path, name in found.items()}
        if len({*names.values()}) < len({*found.values()}):
            names = found
        return cls(
            names,
            {_plain(name): value for name, value in state.items() if name.endswith(_EXTRA)},
            {names[path]: parameter for path, parameter in parameters.items()},
            {names[path]: buffer for path, buffer in buffers.items()},
            frozenset(names[path] for path in buffers if found[path] in state),
        )


def _plain(name: str) -> str:
    """The name that a tensor has where nothing is wrapped by ``torch.compile``."""
    return ".".join(word for word in name.split(".") if word != "_orig_mod")


def _paired(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, str]:
    """The name of each path. A tensor of several paths has several names, in the same order."""
    names = grouped((id(value), name) for name, value in state.items() if name not in tensors)
    found = {}
    for path, tensor in tensors.items():
        is_own = state.get(path) is tensor
        left = [] if is_own else names.get(id(tensor), [])
        found[path] = left.pop(0) if left else path
    return found
