"""Functions: a ``torch.autograd.Function`` is one op that runs its own forward and backward.

Tracing would differentiate its forward and lose its backward. So ``Function.apply`` is a torch op
that names the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from threading import Lock
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from superscaler_core.errors import CaptureError
from superscaler_core.front_end.checkpointed import checkpointed
from superscaler_core.front_end.pointwise_functions import is_pointwise
from superscaler_core.rules.call import literal, names, text
from superscaler_core.rules.calls import (
    TracedCall,
    called_as_op,
    is_literal,
    is_tracing,
    running,
)
from superscaler_core.rules.register import NOT_IMPORTED, imported

_TENSOR = object()
"""Represents a tensor among the arguments of a call."""


class FunctionCall(TracedCall):
    """A call of a ``Function`` in a traced model; ``apply`` is its own, as torch defines it.

    Attributes:
        returned: the number of tensors in the tuple that it returned; None if it was one tensor.

    Raises:
        CaptureError: an argument is neither a tensor nor a number or text.
    """

    def __init__(
        self, function: type[Function], apply: Callable[..., Any], args: Sequence[Any]
    ) -> None:
        self._function, self._apply = function, apply
        self._args = [_TENSOR if isinstance(arg, Tensor) else arg for arg in args]
        self.imports = [self.module]
        self.returned: int | None = None
        self._forms: list[tuple[tuple[int, ...], torch.dtype]] = []
        for arg in self._args:
            if arg is not _TENSOR and not is_literal(arg):
                raise self._error(f"takes a {type(arg).__name__}")
        if _TENSOR not in self._args:
            raise self._error("takes no tensor")

    @property
    def name(self) -> str:
        return self._function.__name__

    @property
    def module(self) -> str:
        """The module of the class."""
        return self._function.__module__

    @property
    def path(self) -> str:
        """The path by which generated code imports it: ``package.module.Class``."""
        return f"{self.module}.{self._function.__qualname__}"

    def refused(self) -> str:
        return "" if imported(self._function) is self._function else NOT_IMPORTED.format(self.path)

    def code(self, words: Sequence[str]) -> str:
        left = iter(words)
        texts = [next(left) if arg is _TENSOR else literal(arg, ()) for arg in self._args]
        return f"{self.path}.apply({', '.join(texts)})" + ("[0]" if self.returned == 1 else "")

    @cached_property
    def annotation(self) -> str:
        """How the dims relate if it is pointwise; else empty: gradients of parts may not add up."""
        shapes = {shape for shape, _ in self._forms}
        if len(shapes) > 1 or not is_pointwise(self._applied, self._forms):
            return ""
        dims = text(names(len(*shapes)))
        results = [dims] * (1 if self.returned is None else self.returned)
        return f"{', '.join([dims] * len(self._forms))} -> {', '.join(results)}"

    def _applied(self, *tensors: Tensor) -> Any:
        left = iter(tensors)
        return self._apply(*(next(left) if a is _TENSOR else a for a in self._args))

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call it without gradients.

        Raises:
            CaptureError: the function does what an op cannot: it draws random numbers, modifies an
                argument, or returns a value that is no tensor.
        """
        before = [t._version for t in tensors]
        self._forms = [(tuple(t.shape), t.dtype) for t in tensors]
        with running(), torch.no_grad(), _Unseeded(self):
            result = self._applied(*tensors)
        self.returned = len(result) if isinstance(result, tuple) else None
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


_FUNCTION: FunctionType = Function.__dict__["apply"].__func__
_OWN = FunctionType(
    _FUNCTION.__code__, _FUNCTION.__globals__, "apply", _FUNCTION.__defaults__,
    _FUNCTION.__closure__,
)  # fmt: skip
"""``Function.apply`` as torch defines it."""

_lock, _num_watching = Lock(), 0


@contextmanager
def functions_as_ops() -> Iterator[None]:
    """While a model is traced on this thread, each call of a ``Function`` is one torch op.

    The code of ``Function.apply`` is replaced, not the attribute: a model may have taken the method
    out of its class before, as in ``round = Round.apply``.
    """
    global _num_watching
    with _lock:
        _num_watching += 1
        _FUNCTION.__code__ = _code_of_apply()
    try:
        yield
    finally:
        with _lock:
            _num_watching -= 1
            if not _num_watching:
                _FUNCTION.__code__ = _OWN.__code__


def _code_of_apply() -> CodeType:
    """Code that calls ``_apply``, with the same closure variables as torch's code."""
    __class__: Any = None

    def apply(cls: type[Function], *args: Any, **keywords: Any) -> Any:
        # The code runs in torch's module, with the closure of torch's code, which has __class__.
        assert __class__ is not None
        from superscaler_core.front_end.functions import _apply

        return _apply(cls, *args, **keywords)

    return apply.__code__


def _apply(cls: type[Function], *args: Any, **keywords: Any) -> Any:
    # A Function that torch makes for the derivative of a custom op is inside of that op.
    if not is_tracing() or cls.__module__.startswith("torch._library"):
        return _OWN(cls, *args, **keywords)
    if cls is CheckpointFunction:
        return _checkpointed(*args)
    # An op has no keyword arguments: the dict of them is an argument that the call refuses.
    call = FunctionCall(cls, partial(_OWN, cls), [*args, *filter(None, [keywords])])
    results = called_as_op(call, [arg for arg in args if isinstance(arg, Tensor)])
    return results[0] if call.returned is None else tuple(results)


def _checkpointed(run: Callable[..., Any], _: bool, *args: Any) -> Any:
    """Run directly: checkpointing only changes when values are computed, and plans decide that."""
    needs_grad = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    if torch.is_grad_enabled() and not needs_grad:
        raise CaptureError(
            "torch.utils.checkpoint(use_reentrant=True) is given no tensor that needs a gradient, "
            "so torch gives the parameters in it none; say use_reentrant=False."
        )
    with checkpointed():
        return run(*args)
