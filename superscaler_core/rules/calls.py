"""Calls that are one op: during tracing, each is a torch op that names the call by a number."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

TARGET = "superscaler.call"
"""The torch op that represents a call in a traced program."""

_LITERALS = (bool, int, float, str, torch.dtype, type(None))


class TracedCall(ABC):
    """A call that is one op: its inside is not traced.

    Attributes:
        imports: Python modules that its code needs.
        modules: keys of modules of the model that its code calls.
        annotation: how the dims of its tensors relate; empty if that is unknown.
        flops: floating-point operations of the products in its forward; 0 if unknown.
    """

    imports: Sequence[str] = ()
    modules: Sequence[str] = ()

    @property
    def annotation(self) -> str:
        return ""

    @property
    def flops(self) -> float:
        return 0.0

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the called function or module."""

    def refused(self) -> str:
        """Why generated code cannot call it; empty if it can."""
        return ""

    @abstractmethod
    def code(self, words: Sequence[str]) -> str:
        """The call as Python text, given the texts of its tensors."""

    def hint(self, rows: str) -> str:
        """How to make the call splittable; ``rows`` is its annotation if rows are independent."""
        return hint_of_function(rows)

    @abstractmethod
    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call it without gradients."""

    def by_name(self, args: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """As ``__call__``, with the arguments of the torch op by name."""
        return self(args["tensors"])

    def shapes_only(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors with the shapes and dtypes of the results, without values."""
        return [torch.empty_like(t) for t in self(tensors)]


def hint_of_function(rows: str) -> str:
    """How to make a call splittable if it can be put into a function under ``@register_op``."""
    if not rows:
        return "A function that calls it, under @register_op, can be split as its annotation says."
    return (
        f'A function that calls it, under @register_op("{rows}"), can be split if its rows are '
        "independent."
    )


def is_literal(value: Any) -> bool:
    """Whether a value can be written into code."""
    if isinstance(value, list | tuple):
        return all(map(is_literal, value))
    return isinstance(value, _LITERALS)


class _Here(threading.local):
    """The state of tracing on a thread."""

    calls: list[TracedCall] | None = None  # by the number in their torch op; None: no tracing
    runs = False  # whether a call is being run, so that inner calls are part of it


_here = _Here()


@contextmanager
def recorded() -> Iterator[list[TracedCall]]:
    """Inside this context, a model is traced on this thread; yields the calls that became ops."""
    _here.calls = []
    try:
        yield _here.calls
    finally:
        _here.calls = None


def is_tracing() -> bool:
    """Whether a call that is made now is traced."""
    return _here.calls is not None and not _here.runs


@contextmanager
def running() -> Iterator[None]:
    """Inside this context, calls are part of the call that is being run."""
    before, _here.runs = _here.runs, True
    try:
        yield
    finally:
        _here.runs = before


def called_as_op(call: TracedCall, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The results of a call in the traced program."""
    assert _here.calls is not None, "a model is traced"
    _here.calls.append(call)
    found: list[Tensor] = torch.ops.superscaler.call(list(tensors), len(_here.calls) - 1)
    return found


def _shapes_only(tensors: list[Tensor], number: int) -> list[Tensor]:
    assert _here.calls is not None, "the op is called while a model is traced"
    return _here.calls[number].shapes_only(tensors)


_OP = TARGET.replace(".", "::")
torch.library.define(_OP, "(Tensor[] tensors, int number) -> Tensor[]")
torch.library.register_fake(_OP, _shapes_only)
