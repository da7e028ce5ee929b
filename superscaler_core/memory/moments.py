"""Moments: the memory of a device while a stage runs, step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from superscaler_core.run.live_bytes import StorageMeter, tensors_of


@dataclass(frozen=True, slots=True)
class Moment:
    """Bytes on a device at one moment, relative to the start of the observation.

    Attributes:
        activations: kept values and results of segments, gradients of activations, and gradients
            of weights until they are accumulated.
        weights: weights of open windows.
        grads: accumulated gradients of weights.
        buffers: further memory of communication.
    """

    activations: int = 0
    weights: int = 0
    grads: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.activations + self.weights + self.grads + self.buffers

    def __add__(self, other: Moment) -> Moment:
        return Moment(
            self.activations + other.activations,
            self.weights + other.weights,
            self.grads + other.grads,
            self.buffers + other.buffers,
        )

    def __neg__(self) -> Moment:
        return Moment(-self.activations, -self.weights, -self.grads, -self.buffers)


@dataclass(frozen=True, slots=True)
class Peak:
    """One step of a stage: its peak, and the memory after it."""

    most: Moment
    after: Moment

    @property
    def most_bytes(self) -> int:
        """Bytes at the peak."""
        return self.most.total

    @property
    def after_bytes(self) -> int:
        """Bytes after the step."""
        return self.after.total


class Meter(StorageMeter):  # type: ignore[no-untyped-call]
    """Measures the memory of a stage step by step.

    Gradients of weights that stay until the step's end are counted in two ways at once: as if they
    existed before, and as if they were allocated now, as in the first backward.

    Attributes:
        opened, buffers: bytes of weights of open windows, and of communication.
        passing: bytes of gradients of open windows, by weight.
        staying: bytes of gradients that stay, by weight.
        host: bytes on the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host = StorageMeter()
        self._forms: dict[Any, list[Form]] = {}
        self._most_total = self._first_total = -1
        self._most = self._first_most = Moment()
        self.opened = self.buffers = 0
        self.passing: Counter[str] = Counter()
        self.staying: dict[str, int] = {}
        self.start()

    def start(self) -> None:
        """Start a new observation from the present memory."""
        self.staying = {}
        self._base = Moment()
        self._base = -self._moment()
        self.peaks: dict[str, Peak] = {}
        self.first_peaks: dict[str, Peak] = {}
        self._name: str | None = None
        self._begin()

    def step(self, name: str | None) -> None:
        """End a step and begin another; None gives it no name."""
        self.look()
        if self._name is not None:
            now = self._moment()
            most = _worse(self.peaks.get(self._name), self._most)
            self.peaks[self._name] = Peak(most, now)
            first = now + Moment(grads=sum(self.staying.values()))
            most = _worse(self.first_peaks.get(self._name), self._first_most)
            self.first_peaks[self._name] = Peak(most, first)
            self._begin()
        self._name = name

    def look(self) -> None:
        """Update the peaks with the present memory."""
        passing = sum(self.passing.values())
        total = self.now_bytes + self.opened + self.buffers + passing
        if total > self._most_total:
            self._most_total, self._most = total, self._moment()
        total += (staying := sum(self.staying.values()))
        if total > self._first_total:
            self._first_total = total
            self._first_most = self._moment() + Moment(grads=staying)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; if its results are known, allocate them instead: meta ops are slow."""
        if not _makes_all(func):
            return func(*args, **kwargs)
        key = func, _form(args), _form(tuple(kwargs.items()))
        found = self._forms.get(key)
        if found is not None:
            made = tuple(_empty(form) for form in found)
            return made if len(made) > 1 else made[0]
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if all(isinstance(x, Tensor) and x.is_meta for x in results):
            # Some operators whose schema says that they allocate their result return a view of an
            # input, for example ``_unsafe_view``.
            given = {id(x.untyped_storage()) for x in tensors_of((*args, *kwargs.values()))}
            if given.isdisjoint(id(x.untyped_storage()) for x in results):
                self._forms[key] = [_form(x) for x in results]
        return result

    def _begin(self) -> None:
        self._most_total = self._first_total = -1
        self._most = self._first_most = Moment()
        self.look()

    def _moment(self) -> Moment:
        passing = sum(self.passing.values())
        return self._base + Moment(self.now_bytes, self.opened, passing, self.buffers)


def _worse(before: Peak | None, most: Moment) -> Moment:
    """The peak of a step; a backward with a rerun runs the step twice."""
    return most if before is None or before.most.total <= most.total else before.most


Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""


def _form(value: Any) -> Any:
    """The properties of an argument on which the results of an operator depend, without data."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    # 1 and 1.0 are equal, but make tensors of different dtypes.
    return type(value), value


def _empty(form: Form) -> Tensor:
    shape, stride, dtype = form
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


@cache
def _makes_all(func: Any) -> bool:
    """Whether an operator modifies no argument, and returns no view of one."""
    schema = func._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
