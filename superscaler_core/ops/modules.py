"""Modules that are one op: generated code runs their own forward, with the weights it gives them.

A program names such a module by a key. The module itself, without weights, is in the program's
folder, from where every rank reads it.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from superscaler_core.errors import PlanError
from superscaler_core.ops.without_data import without_data

FILE = "modules.pt"
"""File of the modules in a program's folder."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor among the arguments of a call, by its number."""

    number: int


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A call of a module, as a function of tensors.

    Attributes:
        skeleton: the module; its parameters and buffers are on the meta device.
        args: its arguments by position and by name; tensors are ``Slot``s.
        names: names of the parameters and buffers, which follow the arguments.
        dtypes: dtypes of the results.
        kept_bytes: what autograd keeps for each byte of the arguments, as measured at the capture.
    """

    skeleton: nn.Module
    args: tuple[tuple[Any, ...], Mapping[str, Any]]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    kept_bytes: float = 0.0

    def run(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """What a module returns for the arguments, parameters and buffers in ``tensors``."""
        num_args = len(tensors) - len(self.names)
        state = dict(zip(self.names, tensors[num_args:], strict=True))
        args, keywords = pytree.tree_map(
            lambda leaf: tensors[leaf.number] if isinstance(leaf, Slot) else leaf, self.args
        )
        return functional_call(module, state, args, keywords)

    def __call__(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> tuple[Tensor, ...]:
        """The tensors that it returns, of these shapes.

        Raises:
            PlanError: a result has another shape.
        """
        if any(x.is_meta for x in tensors):
            args = tensors[: len(tensors) - len(self.names)]
            kept = round(self.kept_bytes * sum(x.nbytes for x in args))
            return without_data(tensors, list(zip(shapes, self.dtypes, strict=True)), kept)
        found = tensors_of(self.run(self._own, tensors))
        if [tuple(x.shape) for x in found] != [tuple(shape) for shape in shapes]:
            raise PlanError(
                f"{type(self.skeleton).__name__} returns {[list(x.shape) for x in found]}, and "
                f"returned {[list(shape) for shape in shapes]} at the capture: the shapes of its "
                "results depend on values, or its annotation is wrong."
            )
        return found

    @property
    def _own(self) -> nn.Module:
        """This thread's copy of the module, because a call puts tensors into it."""
        copies: dict[int, nn.Module] = _here.__dict__.setdefault("copies", {})
        if id(self) not in copies:
            copies[id(self)] = copy.deepcopy(self.skeleton)
        return copies[id(self)]


_here = threading.local()
_numbers = count()

MODULES: dict[str, ModuleCall] = {}
"""Calls of modules in this process, by their keys."""

_pickled: dict[str, bytes] = {}
"""Calls in the folders of programs that this process loaded, by their keys."""


def call_module(
    key: str, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
) -> Tensor | tuple[Tensor, ...]:
    """Run a module of a program; its result, or results, have these shapes.

    Raises:
        PlanError: the module is not in this process.
    """
    found = module_call(key)(tensors, shapes)
    return found[0] if len(found) == 1 else found


def enter(call: ModuleCall) -> str:
    """The key of a call; equal calls, such as those of equal layers, share one key."""
    name = type(call.skeleton).__name__
    text = pickled(call)
    key = f"{name}_{hashlib.sha256(text).hexdigest()[:12] if text else next(_numbers)}"
    MODULES.setdefault(key, call)
    return key


def save_modules(folder: Path, keys: Iterable[str]) -> None:
    """Write the modules of a program to its folder; those that cannot be pickled stay here."""
    texts = {key: text for key in keys if (text := pickled(MODULES[key]))}
    if texts:
        torch.save(texts, folder / FILE)


def load_modules(data: bytes) -> None:
    """Enter what ``save_modules`` wrote; a module is unpickled when a program calls it first."""
    _pickled.update(torch.load(io.BytesIO(data), weights_only=True))


def module_call(key: str) -> ModuleCall:
    """The call of a module with this key.

    Raises:
        PlanError: the module is not in this process.
    """
    if key not in MODULES and key in _pickled:
        MODULES[key] = pickle.loads(_pickled[key])
    if key not in MODULES:
        raise PlanError(
            f"module {key} is not in the program's folder: it could not be pickled where the model "
            "was captured. Define its class, and the functions that it holds, at the top of a "
            "module."
        )
    return MODULES[key]


def tensors_of(result: Any) -> tuple[Tensor, ...]:
    """The tensors in what a module returned, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Its parameters and buffers, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def skeleton_of(module: nn.Module) -> nn.Module:
    """A copy of a module without data, and without its own hooks, which its caller runs."""
    memo: dict[int, Any] = {}
    for tensor in state_of(module).values():
        empty = tensor.detach().to("meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    made = copy.deepcopy(module, memo)
    made._forward_hooks.clear()
    made._forward_pre_hooks.clear()
    return made


def pickled(call: ModuleCall) -> bytes:
    """The call as bytes; none if Python cannot pickle it."""
    file = io.BytesIO()
    try:
        pickle.dump(call, file)
    except (pickle.PicklingError, AttributeError, TypeError):
        return b""
    return file.getvalue()
