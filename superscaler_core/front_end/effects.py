"""Effects: actions of a model besides its ops, which a traced program would silently lose.

An example are hooks that change gradients. They are detected by name, before and during tracing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import grad_mode, graph
from torch.nn.modules import module as modules_of_torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler_core.errors import CaptureError
from superscaler_core.front_end.dense import check_dense
from superscaler_core.front_end.overlapping_memory import check_apart
from superscaler_core.front_end.rewrites import DATA, rewritten
from superscaler_core.front_end.toggled import SETTERS, Toggled

_INSTEAD = "write what it does as a torch.autograd.Function, which is captured with its backward"
_LOOK = "look at, or change, gradients of Trainer.parameters() after a step, and remove it"

_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MODULE_HOOKS = {"_backward_hooks": "a backward hook", "_backward_pre_hooks": "a backward pre-hook"}

# At run time this is a descriptor, which its declared type does not say.
_NODE: Any = Tensor.grad_fn

_CALLS: Mapping[Callable[..., Any], str] = {
    Tensor.register_hook: f"it registers a hook on a tensor; {_INSTEAD}",
    Tensor.register_post_accumulate_grad_hook: f"it registers a hook on a parameter; {_LOOK}",
    torch.autograd.grad: "it asks for a gradient (torch.autograd.grad); put what does so into a "
    "function under @register_op",
    Tensor.backward: "it runs a backward; put what does so into a function under @register_op",
    _NODE.__get__: f"it looks at the node of autograd behind a tensor (grad_fn); {_INSTEAD}",
}
"""Functions that a forward may not call, each with the reason and a remedy."""

_SEEDING = tuple((m, name) for m in (torch, torch.random) for name in ("manual_seed", "seed"))
_SEEDS = (
    "it seeds torch's random numbers, and a program draws others in every step; draw what is to "
    "stay the same once, and register it as a buffer"
)

_PACK: Any = torch._C._VariableFunctions._pack_padded_sequence

_BLOCKS: Mapping[type[Any], str] = {
    graph.saved_tensors_hooks: "it changes what autograd keeps (saved_tensors_hooks); plans say "
    "what is kept, by Plan.keep and Plan.swap",
    grad_mode.inference_mode: "it enters torch.inference_mode(); use torch.no_grad()",
    TorchDispatchMode: "it enters a TorchDispatchMode, which is not traced; call what it does",
}
"""Blocks that a forward may not enter. Torch's own subclasses of them do not change the results."""


def check_model(model: nn.Module) -> None:
    """Refuse a model with overlapping weights or with effects that its graph would lose.

    Raises:
        CaptureError: a hook would not be called, a factor of a batch norm depends on the number of
            calls, a tensor is sparse, or a parameter shares memory with another tensor.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError("a ScriptModule is not traced; capture the module that it was made of.")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(getattr(parameter, hooks, None) for hooks in _PARAMETER_HOOKS):
            raise CaptureError(
                f"parameter {name!r} has a hook on its gradient, which would not be called; {_LOOK}"
                " (handle.remove())."
            )
    for path, module in model.named_modules():
        is_counting = isinstance(module, _BatchNorm) and module.num_batches_tracked is not None
        if is_counting and module.momentum is None and module.training:
            raise CaptureError(
                f"module {path!r} ({type(module).__name__}) has momentum=None, so that its factor "
                "depends on the number of batches so far; give it a number."
            )
        for where, what in _MODULE_HOOKS.items():
            of_all = getattr(modules_of_torch, f"_global{where}")
            for hook in (getattr(module, where) or of_all).values():
                which = getattr(hook, "__qualname__", type(hook).__name__)
                place = f"module {path!r} ({type(module).__name__})" if path else "the model itself"
                raise CaptureError(
                    f"{place} has {what} ({which}), which would not be called; {_INSTEAD}, or "
                    "remove it (handle.remove())."
                )
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    check_dense("parameter", {n: p for n, p in parameters.items() if not is_lazy(p)})
    check_dense("buffer", buffers)
    check_apart(parameters, buffers)


@contextmanager
def watched(model: nn.Module, found: list[str]) -> Iterator[None]:
    """Inside this context, in which a model is traced, refuse effects that the program would lose.

    Args:
        model: the model.
        found: receives the reasons, because the model may catch the errors that are raised here.
    """

    def refuse(why: str) -> None:
        found.append(why)
        raise CaptureError(why)

    seeds = _seeds()
    with ExitStack() as stack:
        for block, why in _BLOCKS.items():
            stack.enter_context(_refusing(block, partial(refuse, why)))
        for owner, name in _SEEDING:
            stack.enter_context(patch.object(owner, name, lambda *_: refuse(_SEEDS)))
        # In a process group, this module would communicate.
        stack.enter_context(patch.object(nn.SyncBatchNorm, "forward", _BatchNorm.forward))
        stack.enter_context(_Calls(refuse, model, toggled := Toggled(model)))
        yield
        toggled.check()
    if _seeds() != seeds:
        found.append(
            "it draws random numbers of Python or numpy, and a program would have those of the "
            "capture; pass them to the model as an input"
        )


@contextmanager
def _refusing(block: type[Any], refuse: Callable[[], None]) -> Iterator[None]:
    enter = block.__enter__

    def entered(self: Any) -> Any:
        is_of_torch = type(self).__module__.startswith(("torch.", "superscaler_core."))
        if getattr(self, "mode", True) and (type(self) is block or not is_of_torch):
            refuse()
        return enter(self)

    with patch.object(block, "__enter__", entered):
        yield


class _Calls(TorchFunctionMode):
    """Refuses calls of ``_CALLS``, and lets others have what they mean in a traced program."""

    def __init__(self, refuse: Callable[[str], None], model: nn.Module, toggled: Toggled) -> None:
        super().__init__()
        self._refuse, self._toggled = refuse, toggled
        # Before it calls the model, the tracer reads these.
        self._own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Torch's own code may look at the nodes of autograd.
        if func in _CALLS and not (func == _NODE.__get__ and _is_of_torch(sys._getframe(1))):
            self._refuse(_CALLS[func])
        if func is _PACK:
            # A module that packs sequences and returns tensors of fixed shapes can be one op.
            raise NotImplementedError(
                "the sizes of packed sequences depend on values; pack and unpack them in a module "
                "of their own, which returns pad_packed_sequence(..., total_length=...)."
            )
        kwargs = kwargs or {}
        if func in SETTERS and isinstance(args[0], nn.Parameter):
            return self._toggled.set(func, args[0], args[1:], kwargs)
        if func == DATA.__set__:
            return self._set_data(*args)
        for value in filter(self._is_unknown, _leaves((*args, *kwargs.values()))):
            self._refuse(
                f"it reads a tensor {list(value.shape)} that needs a gradient but is no parameter "
                "of the model; put modules that are in a list, a dict or a closure into "
                "nn.ModuleList, nn.ModuleDict or an attribute, make a tensor a registered "
                "nn.Parameter, or detach it"
            )
        args, kwargs = self._toggled.read((args, kwargs))
        return rewritten(func, args, kwargs)

    def _is_unknown(self, value: Any) -> bool:
        """Whether a value is a trained tensor that is not of the model, nor of the tracing."""
        is_tensor = type(value) in (Tensor, nn.Parameter) and id(value) not in self._own
        return is_tensor and value.requires_grad and not is_fake(value)

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        """A frozen parameter gets other values: it is state, like a buffer."""
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
            self._refuse("it replaces the data of a tensor; compute a new tensor")
        with torch.no_grad():
            tensor.copy_(value)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def _is_of_torch(frame: FrameType | None) -> bool:
    """Whether torch's own code makes the call that has come to this frame through modes."""
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch.")


def _seeds() -> tuple[Any, str]:
    """The state of the generators that tracing does not follow."""
    return random.getstate(), str(np.random.get_state())
