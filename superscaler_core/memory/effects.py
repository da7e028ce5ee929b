"""Effects: what the instructions of a stage do to the memory of one device.

Effects name values by numbers, in the order of their first use, and segments by their structure. So
stages that do the same have equal effects, and these are the key under which their memory is known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from superscaler_core.materialize.flow import Held
from superscaler_core.materialize.weights import Use
from superscaler_core.memory.meta import Index, Strided
from superscaler_core.program.value import IN_BLOCK, Role, Value
from superscaler_core.schedules import ActionKind

LOSS_GRAD = 0
"""The number of the gradient of the loss, a scalar that always exists."""

NOTHING = -1
"""In place of the number of a value that is not there."""

Numbers = tuple[int, ...]
"""Values by their numbers."""

Term = tuple[int, Index]
"""A box of a value."""

WEIGHTS = frozenset({Role.COPY, Role.WEIGHT})
"""Roles of copies of weights."""


class MemoryEffect(NamedTuple):
    """A call of a method of ``Fold``, with its arguments."""

    do: Callable[..., None]
    args: tuple[Any, ...] = ()


class TrainedWeight(NamedTuple):
    """A weight to which a backward adds a gradient.

    Attributes:
        position: its position among the tensors given to the forward.
        grad: number of its gradient.
        num_bytes: bytes of the gradient where it is accumulated.
        stays: whether it stays until the step's end; otherwise until its FSDP unit closes.
        is_cast: whether it is accumulated in another dtype than it is computed in.
    """

    position: int
    grad: int
    num_bytes: int
    stays: bool
    is_cast: bool


class SegmentShape(NamedTuple):
    """The structure of a segment, without names.

    Attributes:
        form: equal for segments whose functions do the same.
        num_inputs: how many of its arguments need gradients; they come first.
        recompute, swap: as in ``Segment``.
        trained: the weights that get gradients.
    """

    form: Hashable
    num_inputs: int
    recompute: bool
    swap: bool
    trained: tuple[TrainedWeight, ...]


class StageEffects(NamedTuple):
    """What a stage does to the memory of a device: everything that its memory depends on.

    Attributes:
        num_steps: number of its steps.
        runs: for each run of the stage, the effects for one microbatch, in order.
        segments: its segments, by number.
        outside: by number, the values whose memory is counted elsewhere: weights and the batch.
    """

    num_steps: int
    runs: tuple[tuple[ActionKind, tuple[MemoryEffect, ...]], ...]
    segments: tuple[SegmentShape, ...]
    outside: tuple[tuple[int, Strided], ...]


class Numbering:
    """Numbers the values of a stage on one device, in the order of their first use.

    Args:
        uses: the uses of weights, by name.
        loss_dtype: the dtype of the loss.

    Attributes:
        outside: the values whose memory is counted elsewhere: weights and the batch.
    """

    def __init__(self, uses: Mapping[str, Use], loss_dtype: str) -> None:
        self._uses = uses
        self.outside = {LOSS_GRAD: Strided.new((), loss_dtype)}
        self._numbers: dict[Hashable, int] = {"gradient of the loss": LOSS_GRAD}

    def number(self, value: Hashable) -> int:
        """The number of a value."""
        return self._numbers.setdefault(value, len(self._numbers))

    def of_run(self, value: Value, half: int | None) -> int:
        """The number of a value that lives while the stage runs a half of the microbatch."""
        return self.number((value.key, half))

    def grad(self, value: Value, half: int | None) -> int:
        """The number of the gradient of a value, to which its readers add."""
        return self.number(("grad", value.key, half))

    def of(self, held: Held, half: int | None) -> int:
        """The number of what a device holds of a tensor, in a half of the microbatch."""
        value = held.value
        if value.role in IN_BLOCK:
            return self.of_run(value, half)
        number = self.number(value.key)
        if number not in self.outside:
            is_trained = value.role in WEIGHTS and self._uses[value.name].is_trained
            shape, dtype = held.box.shape, held.tensor.dtype
            self.outside[number] = Strided.new(shape, dtype, is_trained=is_trained)
        return number

    def all(self, held: Iterable[Held], half: int | None) -> Numbers:
        """The numbers of several values."""
        return tuple(self.of(each, half) for each in held)
