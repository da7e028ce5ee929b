"""Functions: a ``torch.autograd.Function`` is one op that runs its own forward and backward.

Tracing would look into the forward of a ``Function`` and differentiate that, and so lose the
backward. Therefore, during tracing, ``Function.apply`` is a torch op that names the call.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from superscaler_core.errors import CaptureError

TARGET = "superscaler.autograd_function"
"""The torch op that represents a call of a ``Function`` in a traced program."""

_LITERALS = (bool, int, float, str, torch.dtype, type(None))

_TENSOR = object()
"""Represents a tensor among the arguments of a call."""


class FunctionCall:
    """A call of a ``Function`` in a traced model.

    Args:
        function: a subclass of ``torch.autograd.Function``.
        apply: its ``apply``, as torch defines it.
        args: the arguments of the call.

    Raises:
        CaptureError: an argument is neither a tensor nor a number or text.
    """

    def __init__(
        self, function: type[Function], apply: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        self._function, self._apply = function, apply
        self._args = [_TENSOR if isinstance(arg, Tensor) else arg for arg in args]
        self.returns_tuple = False
        for arg in self._args:
            if arg is not _TENSOR and not _is_literal(arg):
                raise self._error(f"takes a {type(arg).__name__}")
        if _TENSOR not in self._args:
            raise self._error("takes no tensor")

    @property
    def name(self) -> str:
        """The name of the class."""
        return self._function.__name__

    @property
    def module(self) -> str:
        """The module of the class."""
        return self._function.__module__

    @property
    def path(self) -> str:
        """The path by which generated code imports it: ``package.module.Class``."""
        return f"{self.module}.{self._function.__qualname__}"

    def is_importable(self) -> bool:
        """Whether another process can import it by its path."""
        if self.module == "__main__":
            return False
        found: Any = importlib.import_module(self.module)
        for name in self._function.__qualname__.split("."):
            found = getattr(found, name, None)
        return found is self._function

    def texts(self, tensors: Sequence[str], literal: Callable[[Any], str]) -> list[str]:
        """Its arguments as Python text, given the texts of its tensors."""
        left = iter(tensors)
        return [next(left) if arg is _TENSOR else literal(arg) for arg in self._args]

    def by_name(self, args: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """As ``__call__``, with the arguments of the torch op by name."""
        return self(args["tensors"])

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call it without gradients.

        Raises:
            CaptureError: it does what an op cannot: it draws random numbers or modifies an
                argument.
        """
        left, before = iter(tensors), [t._version for t in tensors]
        _here.runs = True
        try:
            with torch.no_grad(), _Unseeded(self):
                result = self._apply(*(next(left) if a is _TENSOR else a for a in self._args))
        finally:
            _here.runs = False
        self.returns_tuple = isinstance(result, tuple)
        found = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(t, Tensor) for t in found):
            raise self._error("returns a value that is not a tensor")
        if [t._version for t in tensors] != before:
            raise self._error("modifies an argument in place")
        return found

    def _error(self, why: str) -> CaptureError:
        return CaptureError(
            f"torch.autograd.Function {self.name} {why}, so it cannot be an op with a backward of "
            "its own; call it in a function of tensors and numbers under @register_op."
        )


class _Unseeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers in a forward."""

    def __init__(self, call: FunctionCall) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call = call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self._call._error(f"draws random numbers ({func})")
        return func(*args, **(kwargs or {}))


class _Here(threading.local):
    """What is being traced on a thread.

    Attributes:
        calls: of functions so far, by the number that is an argument of their torch op.
        runs: whether a function is being run, so that others that it calls are part of it.
    """

    calls: list[FunctionCall] | None = None
    runs = False


_here = _Here()


@contextmanager
def functions_as_ops() -> Iterator[list[FunctionCall]]:
    """While a model is traced on this thread, each call of a ``Function`` is one torch op.

    Yields the calls, by the number that is an argument of the op.
    """
    before = Function.__dict__["apply"]
    calls = _here.calls = []

    def apply(cls: type[Function], *args: Any, **keywords: Any) -> Any:
        own = before.__get__(None, cls)
        # What torch makes for the derivative of a torch.library op is inside of that op.
        is_inside = _here.runs or cls.__module__.startswith("torch._library")
        if _here.calls is None or is_inside:
            return own(*args, **keywords)
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        # What is given by name is no argument that an op could have.
        _here.calls.append(call := FunctionCall(cls, own, [*args, *filter(None, [keywords])]))
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        results = torch.ops.superscaler.autograd_function(tensors, len(_here.calls) - 1)
        return tuple(results) if call.returns_tuple else results[0]

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        Function.apply = before  # type: ignore[method-assign]
        _here.calls = None


def _checkpointed(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Reentrant checkpointing changes when things are computed, not what; plans say when."""
    needs_grad = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    if torch.is_grad_enabled() and not needs_grad:
        raise CaptureError(
            "torch.utils.checkpoint(use_reentrant=True) is given no tensor that needs a gradient, "
            "so torch gives the parameters in it none; say use_reentrant=False."
        )
    return run(*args)


def _is_literal(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_literal, value))
    return isinstance(value, _LITERALS)


def _shapes_only(tensors: list[Tensor], number: int) -> list[Tensor]:
    assert _here.calls is not None, "the op is called while a model is traced"
    return [torch.empty_like(t) for t in _here.calls[number](tensors)]


_OP = TARGET.replace(".", "::")
torch.library.define(_OP, "(Tensor[] tensors, int number) -> Tensor[]")
torch.library.register_fake(_OP, _shapes_only)
